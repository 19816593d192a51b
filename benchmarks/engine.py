"""A scripted engine that writes down when each request came, so that turns can be timed from outside the service.

Run: python benchmarks/engine.py --delay SECONDS --address FILE --arrivals FILE
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import time
from array import array
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import anyio
from tokenizers import Tokenizer

import rollout_service.policies
from rollout_service.inference.fakes.engine import ScriptedEngine
from rollout_service.inference.fakes.script import Replies, Reply

MODEL = Path(rollout_service.policies.__file__).parent / "calc-tuned"
COMMAND = "echo hello"
CALL = {"name": "bash", "arguments": {"command": COMMAND}}
TURN = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call><|im_end|>"
KEPT_TOKENS = 256
"""How much of a prompt is written down: enough to hold the number in the first message."""
RECORD = struct.Struct(f"=d{KEPT_TOKENS}i")


class Recorder:
    """The script of one turn that repeats for ever; appends a record per request to a file."""

    def __init__(self, arrivals: Path) -> None:
        self._replies = Replies.from_texts([TURN], MODEL)
        self._file = os.open(arrivals, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        """Write down the time and how the prompt begins."""
        begin = array("i", input_ids[:KEPT_TOKENS])
        begin.extend([0] * (KEPT_TOKENS - len(begin)))
        os.write(self._file, struct.pack("=d", time.monotonic()) + begin.tobytes())
        return self._replies.reply(input_ids, budget)


def read_arrivals(file: Path) -> dict[int, list[float]]:
    """When the requests of each rollout came (seconds), by the number in its prompt."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    arrivals: dict[int, list[float]] = defaultdict(list)
    for when, *begin in RECORD.iter_unpack(file.read_bytes()):
        if found := re.search(r"Greet number (\d+) ", tokenizer.decode(begin)):
            arrivals[int(found[1])].append(when)
    return arrivals


async def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description="A scripted engine that writes down when each request came.")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds per turn")
    parser.add_argument("--address", type=Path, required=True, help="write the URL to this file")
    parser.add_argument("--arrivals", type=Path, required=True, help="write the requests to this file")
    given = parser.parse_args()
    vocab_size = json.loads((MODEL / "config.json").read_bytes())["vocab_size"]
    script = Recorder(given.arrivals)
    async with ScriptedEngine(script, latency=given.delay, vocab_size=vocab_size, model_path=MODEL) as engine:
        draft = given.address.with_suffix(".draft")
        draft.write_text(engine.url)
        draft.replace(given.address)
        await engine.died.wait()


if __name__ == "__main__":
    anyio.run(main, backend_options={"use_uvloop": True})
