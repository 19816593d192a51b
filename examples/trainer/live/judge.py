r"""A judge for demonstrations: it thinks nothing, and reads what the scripted user said.

It answers as a model would, behind an engine's own HTTP API: with the value in a box, and a hint between marks if the
service asks for hints.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rollout_service.testing import Reply, ScriptedEngine
from rollout_service.tokens import ChatRenderer
from training.live import talk

_SAID = re.compile(r"<next_state-([0-9a-f]{16})>\n(.*?)\n</next_state-\1>", re.DOTALL)
_WANTS = re.compile(re.escape(talk.complaint("?")).replace(r"\?", "(.)"))
_ASKS_FOR_HINTS = "[HINT_START]"


class RuleJudge:
    """Answers each prompt of the service's judge by a rule."""

    def __init__(self, folder: Path) -> None:
        """Read and write with the tokenizer in `folder`."""
        self._renderer = ChatRenderer.load(folder)

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        del budget
        text = verdict(self._renderer.decode(list(input_ids)))
        return Reply([*self._renderer.encode(text), self._renderer.stop_token_ids[0]])


def verdict(prompt: str) -> str:
    """Return the judge's answer: to the question for a value, or to that for a hint."""
    quoted = _SAID.findall(prompt)
    said = quoted[-1][1].removeprefix("[user]\n") if quoted else ""
    if _ASKS_FOR_HINTS in prompt:
        if wants := _WANTS.match(said):
            return f"[HINT_START]{talk.hint(wants[1])}[HINT_END] \\boxed{{1}}"
        return "It tells nothing. \\boxed{-1}"
    value = 1 if said.startswith(talk.THANKS) else -1 if said.startswith("no,") else 0
    return f"\\boxed{{{value}}}"


@asynccontextmanager
async def judging(folder: Path) -> AsyncIterator[str]:
    """Serve the judge, and yield its engine's URL."""
    vocabulary = ChatRenderer.load(folder).vocab_size
    async with ScriptedEngine(RuleJudge(folder), model_path=folder, vocab_size=vocabulary) as engine:
        yield engine.url
