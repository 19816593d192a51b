"""Two scripted engines for `parallel_agents.py`: one for agents that assign tasks, one for their sub-agents.

The first takes no time. The second takes as long for every task, however many there are; tasks of the kind `hold` take
longer, to keep slots busy.

Run: python benchmarks/programs/delegation_engines.py --address FILE --latency SECONDS --hold SECONDS
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import anyio
from tokenizers import Tokenizer

from rollout_service.agents.parallel.tools import ASSIGN, CREATE, created_text
from rollout_service.engines.shipped import policy_folder
from rollout_service.testing import Reply, ScriptedEngine
from rollout_service.testing.serving import serve

MODEL = policy_folder("calc-tuned")
CONTEXT_LENGTH = 1_000_000
AGENT = "worker"
END = "<|im_end|>"
_TASK = re.compile(r"Assign (\d+) (\w+) tasks\.")
_HELD = re.compile(r"hold \d")


class Delegating:
    """Creates a sub-agent and assigns tasks to it, all in one turn; then answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = cache(lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids))

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        del budget
        prompt = self._tokenizer.decode(list(input_ids))
        found = _TASK.search(prompt)
        if found is None or created_text(AGENT) in prompt:
            return Reply(self._ids(f"Done.{END}"))
        return Reply(self._ids(first_turn(int(found[1]), found[2])))


class Working:
    """Gives a result in its first turn; tasks of the kind `hold` take `hold` seconds."""

    def __init__(self, tokenizer: Tokenizer, hold: float) -> None:
        self._tokenizer = tokenizer
        self._hold = hold
        self._ids = list(tokenizer.encode(f"<result>ok</result>{END}", add_special_tokens=False).ids)

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        del budget
        is_hold = _HELD.search(self._tokenizer.decode(list(input_ids)))
        return Reply(self._ids, seconds=self._hold if is_hold else None)


def first_turn(tasks: int, kind: str) -> str:
    """Return the calls of a turn that creates a sub-agent and assigns tasks of a kind to it."""
    calls = [_call(CREATE, name=AGENT, system_prompt="Work.")]
    calls += [_call(ASSIGN, agent=AGENT, prompt=f"{kind} {number}") for number in range(tasks)]
    return "\n".join(calls) + END


def _call(tool: str, /, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


async def main() -> None:
    parser = argparse.ArgumentParser(description="Run the engines of agents and of their sub-agents.")
    parser.add_argument("--address", type=Path, required=True, help="write the two URLs to this file")
    parser.add_argument("--latency", type=float, required=True, help="seconds per turn of a sub-agent")
    parser.add_argument("--hold", type=float, required=True, help="the same for tasks that keep slots busy")
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    engine = partial(ScriptedEngine, model_path=MODEL, context_length=CONTEXT_LENGTH)
    await serve(
        engine(Delegating(tokenizer), latency=0.0),
        engine(Working(tokenizer, given.hold), latency=given.latency),
        address=given.address,
    )


if __name__ == "__main__":
    anyio.run(main, backend_options={"use_uvloop": True})
