"""Gives a turn its mark: by a rule, by the judge's votes, and with a hint if hints are asked for.

The judge is not asked where a rule decides. A judge that fails in any way gives a mark without a value and with a
reason; only engines that are out of service are an error, since asking again later may help.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Final, Literal

from pydantic import JsonValue, ValidationError

from api_schemas.rollouts.sessions import Hint, JudgedBy, MarkReason, Votes
from rollout_service.base.errors import ConfigurationError
from rollout_service.base.validation import describe_problems
from rollout_service.engines.errors import InferenceError
from rollout_service.judging.contract import Judge, Vote, VoteOutcome
from rollout_service.judging.rubric import Rubric, RubricSettings
from rollout_service.live.contract import NextStateRecord, TurnMarkRecord, TurnRecord
from rollout_service.live.judging.overrides import Overrides
from rollout_service.settings.live import LiveJudgeSettings
from sandboxes.task_groups import open_task_group

VALUES: Final = {"1": 1.0, "0": 0.0, "-1": -1.0}
USABLE, USELESS = "1", "-1"
"""Votes on whether the next state holds a hint."""


def value_rubric(settings: LiveJudgeSettings) -> Rubric:
    """Make the rubric for values; this reads the prompt, so call it in a thread."""
    return _rubric(settings, "live-turn", _read(settings.prompt, "turn"), VALUES, "majority")


def hint_rubric(settings: LiveJudgeSettings) -> Rubric:
    """Make the rubric for hints, of which every vote is wanted; this reads the prompt, so call it in a thread."""
    labels = {USABLE: 1.0, USELESS: -1.0}
    return _rubric(settings, "live-hint", _read(settings.hint_prompt, "hint"), labels, "mean")


def question(answer: str, state: NextStateRecord) -> tuple[dict[str, JsonValue], dict[str, str]]:
    """Return the fields and the texts of a prompt."""
    return {"role": state.role, "is_error": state.is_error}, {"answer": answer, "next_state": state.text}


def _read(path: Path | None, default: str) -> str:
    if path is None:
        return files(__package__).joinpath("prompts", f"{default}.jinja").read_text(encoding="utf-8")
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"the judge's prompt {str(path)!r} cannot be read: {error}",
            hint="Correct the path in the settings `live.judge`, or leave it out.",
        ) from error


def _rubric(
    settings: LiveJudgeSettings,
    name: str,
    template: str,
    labels: dict[str, float],
    combine: Literal["majority", "mean"],
) -> Rubric:
    try:
        described = RubricSettings(
            name=name,
            template=template,
            texts=("answer", "next_state"),
            labels=labels,
            mark="boxed",
            pool=settings.pool,
            votes=settings.votes,
            combine=combine,
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            vote_seconds=settings.vote_seconds,
            max_chars=settings.text_chars,
        )
    except ValidationError as error:
        raise ConfigurationError(
            f"live.judge: {'; '.join(describe_problems(error, RubricSettings))}",
            hint="Correct the settings of the judge.",
        ) from error
    return Rubric(described)


@dataclass(frozen=True, slots=True)
class FoundHint:
    hint: Hint | None
    dropped: str = ""
    away: InferenceError | None = None
    """Set if the judge's engines did not answer, so that asking again may help."""


FindHint = Callable[[TurnRecord], Awaitable[FoundHint]]
"""Failures are reasons, and never raised."""


@dataclass(frozen=True, slots=True)
class TurnJudge:
    judge: Judge
    rubric: Rubric
    overrides: Overrides
    find_hint: FindHint | None = None

    @property
    def pool(self) -> str:
        return self.rubric.settings.pool

    @property
    def asks_for_hints(self) -> bool:
        return self.find_hint is not None

    async def hint(self, turn: TurnRecord) -> FoundHint:
        """Return nothing if hints are not asked for."""
        return FoundHint(None) if self.find_hint is None else await self.find_hint(turn)

    async def mark(
        self, turn: TurnRecord, earlier: Sequence[TurnRecord] = (), *, is_last_try: bool = False
    ) -> TurnMarkRecord:
        """Judge a turn that has a next state, given the earlier turns of its session.

        At the last try, engines that do not answer are votes that failed.

        Raises:
            NoBackendError: The judge's pool has no backend.
            InferenceError: Every vote failed by its engine.
        """
        found = FoundHint(None)

        async def find_hint() -> None:
            nonlocal found
            found = await self.hint(turn)

        async with open_task_group() as tasks:
            tasks.start_soon(find_hint)
            if (decided := self.overrides.decide(turn, earlier)) is not None:
                name, value = decided
                source = f"override:{name}"
                mark = TurnMarkRecord(value=value, reason=MarkReason.OVERRIDE, source=source, at=0.0)
            else:
                mark = await self._ask(turn, is_last_try)
        return replace(mark, hint=found.hint, hint_dropped=found.dropped, at=time.time())

    async def _ask(self, turn: TurnRecord, is_last_try: bool) -> TurnMarkRecord:
        if turn.next_state is None:
            raise ValueError(f"turn {turn.turn} has no next state to judge it by")
        instance, texts = question(turn.answer, turn.next_state)
        poll = await self.judge.poll(self.rubric, instance, texts)
        if not is_last_try and (error := outage(poll.votes)) is not None:
            raise error
        judge = JudgedBy(pool=self.pool, model=poll.model, prompt_hash=self.rubric.prompt_hash)
        return replace(tally(poll.votes), judge=judge)


def tally(votes: Sequence[Vote]) -> TurnMarkRecord:
    """Make a mark of the votes; one with another label than -1, 0 or 1 has failed.

    The value with most valid votes counts; if several have most, it is 0, and the reason says so. Without valid votes
    there is no value, which is not the same as 0.
    """
    counts = Counter(VALUES[vote.label] for vote in votes if vote.label in VALUES)
    counted = Votes(minus=counts[-1.0], zero=counts[0.0], plus=counts[1.0], failed=len(votes) - counts.total())
    winners = [value for value, count in counts.items() if count == max(counts.values())]
    value, reason = (0.0, MarkReason.TIE) if len(winners) > 1 else (next(iter(winners), None), MarkReason.MAJORITY)
    if not winners:
        is_late = bool(votes) and all(vote.outcome is VoteOutcome.TIMED_OUT for vote in votes)
        reason = MarkReason.TIMEOUT if is_late else MarkReason.ALL_FAILED
    return TurnMarkRecord(value=value, reason=reason, source="judge", votes=counted, at=0.0)


def outage(votes: Sequence[Vote]) -> InferenceError | None:
    """Return an error if no vote reached a working engine, so that asking again may help."""
    errors = [vote.error for vote in votes]
    if errors and all(isinstance(error, InferenceError) and error.retryable for error in errors):
        return next(error for error in errors if isinstance(error, InferenceError))
    return None
