"""Two scripted engines for `live.py`: one answers users, one judges its answers.

The first one's answer depends on the conversation alone, and goes on where an interrupted one ends. The second votes 1
or -1.

Run: python benchmarks/programs/live_engines.py --address FILE --latency SECONDS --judge-latency SECONDS
"""

from __future__ import annotations

import argparse
import zlib
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
from tokenizers import Tokenizer

from rollout_service.engines.shipped import policy_folder
from rollout_service.testing import Reply, ScriptedEngine
from rollout_service.testing.serving import serve

MODEL = policy_folder("calc-tuned")
CONTEXT_LENGTH = 1_000_000
WORDS = 24
"""The length of an answer."""


class Answers:
    """A script of sentences with a number that stands for the conversation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._assistant = array("i", self._ids("<|im_start|>assistant\n")).tobytes()

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        """Return what the prompt lacks of its answer."""
        del budget
        prompt = array("i", input_ids).tobytes()
        begin = prompt.rfind(self._assistant)
        begin = len(prompt) if begin < 0 else begin + len(self._assistant)  # none: the service tries its engine
        number = zlib.crc32(prompt[:begin])
        answer = self._ids(f"The answer is{' so' * WORDS} {number}.<|im_end|>")
        return Reply(answer[(len(prompt) - begin) // array("i").itemsize :])

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


class Verdicts:
    """A script of votes that depend on the prompt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._votes = [
            list(tokenizer.encode(f"It is \\boxed{{{vote}}}<|im_end|>", add_special_tokens=False).ids)
            for vote in (1, -1)
        ]

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        del budget
        return Reply(self._votes[zlib.crc32(array("i", input_ids).tobytes()) % 2])


async def main() -> None:
    parser = argparse.ArgumentParser(description="Run the engines of a policy and of its judge.")
    parser.add_argument("--address", type=Path, required=True, help="write the two URLs to this file")
    parser.add_argument("--latency", type=float, required=True, help="seconds per answer")
    parser.add_argument("--judge-latency", type=float, required=True, help="seconds per vote")
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    engine = partial(ScriptedEngine, model_path=MODEL, context_length=CONTEXT_LENGTH)
    await serve(
        engine(Answers(tokenizer), latency=given.latency),
        engine(Verdicts(tokenizer), latency=given.judge_latency),
        address=given.address,
    )


if __name__ == "__main__":
    anyio.run(main, backend_options={"use_uvloop": True})
