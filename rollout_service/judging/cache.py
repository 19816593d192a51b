"""Judgments by their content: equal questions are asked once.

Guarantees: of equal questions at the same time one is asked, and the others wait for its judgment or its failure; one
that is cancelled is asked by another that waits. Failures are not kept. At most `size` judgments are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio

from rollout_service.judging.contract import Judgment

SIZE = 10_000
"""Judgments that are kept; each takes about a kilobyte."""


@dataclass(slots=True)
class _OpenQuestion:
    """A question that is being asked."""

    answered: anyio.Event = field(default_factory=anyio.Event)
    error: Exception | None = None


class JudgmentCache:
    """The last judgments."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._kept: OrderedDict[str, Judgment] = OrderedDict()
        self._asked: dict[str, _OpenQuestion] = {}

    async def get(self, key: str, ask: Callable[[], Awaitable[Judgment]]) -> tuple[Judgment, bool]:
        """Return the judgment of a question, and whether it was asked for another caller."""
        while True:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept, True
            if (question := self._asked.get(key)) is None:
                return await self._ask(key, ask), False
            await question.answered.wait()
            if question.error is not None:
                raise question.error

    async def _ask(self, key: str, ask: Callable[[], Awaitable[Judgment]]) -> Judgment:
        question = self._asked[key] = _OpenQuestion()
        try:
            judgment = self._kept[key] = await ask()
        except Exception as error:
            question.error = error
            raise
        finally:
            del self._asked[key]
            question.answered.set()
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)
        return judgment
