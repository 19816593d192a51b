"""Hints in hindsight: what the next state tells about what an answer should have been.

Guarantees: a hint is between marks that the judge wrote in its own answer, and comes from a vote that says that there
is one. The augmented prompt is rendered by the policy's own chat format from the recorded messages, with the hint at
the end of the last user message. Whatever fails, the turn keeps its value and the mark says why there is no hint.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import anyio.to_thread
import structlog

from api_schemas.rollouts.sessions import Hint
from api_schemas.trajectories import Message
from rollout_service.base.errors import ServiceError, describe
from rollout_service.judging.contract import Judge, Vote
from rollout_service.judging.rubric import Rubric
from rollout_service.judging.verdicts import without_reasoning
from rollout_service.live.contract import TurnRecord
from rollout_service.live.judging.overlap import overlaps
from rollout_service.live.judging.prompt import USABLE, question
from rollout_service.live.judging.teacher import ServedModels
from rollout_service.live.judging.turn_judge import FoundHint
from rollout_service.live.replay import TurnPrompt

log = structlog.get_logger(__name__)

HEADER: Final = "[user's hint / instruction]"
"""The line above a hint in the last user message."""
TOO_SHORT: Final = 10
"""Hints of up to this many characters are passed over: they are no sentences."""
LONGEST: Final = 2_000
"""Longer hints are passed over: they are not a few sentences."""
CANDIDATES: Final = 3
"""The most hints whose overlap is measured, the shortest ones."""
_HINT = re.compile(r"\[HINT_START\]((?:(?!\[HINT_(?:START|END)\]).)*)\[HINT_END\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """What a turn was sampled on, and by which pool."""

    pool: str
    prompt: TurnPrompt


PromptOf = Callable[[TurnRecord], Awaitable[RecordedPrompt]]
"""Returns what a turn was sampled on; a ServiceError says why that is not known."""


class JudgedHints:
    """Asks the judge for hints, and selects one."""

    def __init__(
        self,
        judge: Judge,
        rubric: Rubric,
        prompt_of: PromptOf,
        models: ServedModels,
        *,
        selection: Literal["longest", "overlap"] = "longest",
        teacher_pool: str | None = None,
    ) -> None:
        self._judge = judge
        self._rubric = rubric
        self._prompt_of = prompt_of
        self._models = models
        self._selection = selection
        self._teacher_pool = teacher_pool

    async def find(self, turn: TurnRecord) -> FoundHint:
        """Return the hint that is selected, or why there is none; nothing is raised."""
        try:
            return await self._find(turn)
        except ServiceError as error:
            return FoundHint(None, describe(error).code)
        except Exception as error:  # noqa: BLE001 - a hint must not cost the turn its value
            log.error(
                "a hint could not be made",
                session_id=turn.session_id,
                turn=turn.turn,
                error=type(error).__name__,  # its message may quote the turn
                hint="Check the prompt for hints.",
            )
            return FoundHint(None, "internal_error")

    async def _find(self, turn: TurnRecord) -> FoundHint:
        if turn.next_state is None:
            return FoundHint(None, "no_next_state")
        instance, texts = question(turn.answer, turn.next_state)
        poll = await self._judge.poll(self._rubric, instance, texts, keep_texts=True)
        proposed = candidates(poll.votes)
        if not proposed:
            valid = any(vote.label is not None for vote in poll.votes)
            return FoundHint(None, "no_hint" if valid else "judge_failed")
        recorded = await self._prompt_of(turn)
        hinted = await anyio.to_thread.run_sync(self._augment_all, recorded, proposed)
        if not hinted:
            return FoundHint(None, "no_user_message")
        chosen = await self._select(recorded, proposed, hinted)
        return FoundHint(
            Hint(
                text=proposed[chosen],
                prompt_ids=hinted[chosen],
                candidates=len(proposed),
                selected_by=self._selection,
            )
        )

    def _augment_all(self, recorded: RecordedPrompt, hints: Sequence[str]) -> list[list[int]]:
        """Return the prompts with each hint; none if no user message can have one. Slow for a long prompt."""
        renderer = self._models.connect(recorded.pool)[0].renderer
        prompts: list[list[int]] = []
        for hint in hints:
            messages = with_hint(recorded.prompt.messages, hint)
            if messages is None:
                return []
            prompts.append(renderer.render(messages, recorded.prompt.tools))
        return prompts

    async def _select(
        self, recorded: RecordedPrompt, hints: Sequence[str], hinted: Sequence[Sequence[int]]
    ) -> int:
        longest = max(range(len(hints)), key=lambda number: len(hints[number]))
        if self._selection == "longest" or len(hints) == 1:
            return longest
        compared = sorted(range(len(hints)), key=lambda number: len(hints[number]))[:CANDIDATES]
        scores = await overlaps(
            self._models.connect(recorded.pool)[1],
            self._models.connect(self._teacher_pool or recorded.pool)[1],
            recorded.prompt.prompt_ids,
            [hinted[number] for number in compared],
            recorded.prompt.output_ids,
        )
        return compared[max(range(len(scores)), key=scores.__getitem__)]


def candidates(votes: Iterable[Vote]) -> list[str]:
    """Return the different hints of the votes that say that there is one, in their order."""
    found: dict[str, str] = {}
    for vote in votes:
        said = without_reasoning(vote.text) if vote.label == USABLE else None
        blocks = _HINT.findall(said or "")
        hint = blocks[-1].strip() if blocks else ""
        if TOO_SHORT < len(hint) <= LONGEST:
            found.setdefault(" ".join(hint.casefold().split()), hint)
    return list(found.values())


def with_hint(messages: Sequence[Message], hint: str) -> list[Message] | None:
    """Return the messages with the hint at the end of the last user message; None if there is no user message."""
    for place in range(len(messages) - 1, -1, -1):
        if messages[place].role == "user":
            content = f"{messages[place].content}\n\n{HEADER}\n{hint}".lstrip("\n")
            edited = messages[place].model_copy(update={"content": content})
            return [*messages[:place], edited, *messages[place + 1 :]]
    return None
