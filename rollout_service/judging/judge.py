"""Asks the engines of a pool for judgments; implements `contract.Judge`.

All votes are sampled at once, each within the rubric's time; once more than half of all votes agree, the others are
cancelled. A value rests on more than half of the votes, and a majority on more than half of the valid ones.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

import anyio
from pydantic import JsonValue

from api_schemas.rollouts.steps import StepKind
from api_schemas.trajectories import Message
from rollout_service.activity import in_lane, waits_for
from rollout_service.base.errors import ServiceError, describe
from rollout_service.judging.contract import (
    Judge,
    JudgeTimeoutError,
    Judgment,
    NoVerdictError,
    Poll,
    TextSampler,
    Vote,
    VoteOutcome,
)
from rollout_service.judging.metrics import CACHED, JUDGED, JudgeMetrics
from rollout_service.judging.rubric import Rubric, RubricSettings

SHOWN_CHARS = 200
"""Characters of an answer that an error shows."""


class PoolJudge(Judge):
    def __init__(self, sampler: TextSampler, metrics: JudgeMetrics, cache: JudgmentCache | None = None) -> None:
        self._sampler = sampler
        self._metrics = metrics
        self._cache = cache or JudgmentCache()

    async def ask(self, rubric: Rubric, instance: dict[str, JsonValue], **texts: str) -> Judgment:
        messages = rubric.messages(instance, texts)
        name = rubric.settings.name
        try:
            model = self._sampler.model(rubric.settings.pool)
            with waits_for(StepKind.JUDGE, name):
                judgment, is_cached = await self._remembered(rubric, messages, model)
        except Exception as error:
            self._metrics.count_judgment(name, describe(error).code)
            raise
        self._metrics.count_judgment(name, CACHED if is_cached else JUDGED)
        return judgment

    async def _remembered(self, rubric: Rubric, messages: Sequence[Message], model: str) -> tuple[Judgment, bool]:
        prompt_hash = _hash(*(message.content for message in messages))
        return await self._cache.get(
            _hash(model, rubric.digest, prompt_hash),
            lambda: self._judge(rubric, messages, model, prompt_hash[:12]),
        )

    async def _judge(self, rubric: Rubric, messages: Sequence[Message], model: str, prompt_hash: str) -> Judgment:
        votes = await self._collect(rubric, messages)
        value, label = decide(rubric.settings, votes)
        kept = tuple(replace(vote, error=None) for vote in votes)  # an error's traceback keeps all of its call
        return Judgment(value, label, kept, model, rubric.settings.name, prompt_hash)

    async def poll(
        self,
        rubric: Rubric,
        instance: dict[str, JsonValue],
        texts: Mapping[str, str],
        *,
        keep_texts: bool = False,
    ) -> Poll:
        model = self._sampler.model(rubric.settings.pool)
        with waits_for(StepKind.JUDGE, rubric.settings.name):
            votes = await self._collect(rubric, rubric.messages(instance, texts), keep_texts=keep_texts)
        return Poll(tuple(votes), model)

    async def _collect(self, rubric: Rubric, messages: Sequence[Message], *, keep_texts: bool = False) -> list[Vote]:
        votes: list[Vote] = []
        started = time.perf_counter()

        async def collect_one(number: int) -> None:
            with in_lane(f"vote {number}"):
                votes.append(await self._vote(rubric, messages, keep_texts))
            if _has_settled(rubric.settings, votes):
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for number in range(rubric.settings.votes):
                tasks.start_soon(collect_one, number + 1)
        self._metrics.count_votes(rubric.settings.name, votes, time.perf_counter() - started)
        return votes

    async def _vote(self, rubric: Rubric, messages: Sequence[Message], keep_text: bool) -> Vote:
        settings = rubric.settings
        with anyio.move_on_after(settings.vote_seconds):
            try:
                said = await self._sampler.sample(
                    settings.pool, messages, max_tokens=settings.max_tokens, temperature=settings.temperature
                )
            except ServiceError as error:
                return Vote(VoteOutcome.FAILED, error=error)
            cost = (said.prompt_tokens, said.sampled_tokens)
            shown = said.text if keep_text else said.text[-SHOWN_CHARS:]
            if said.truncated:
                return Vote(VoteOutcome.TRUNCATED, None, *cost, text=shown)
            label = rubric.read(said.text)
            if label is None:
                return Vote(VoteOutcome.UNREADABLE, None, *cost, text=shown)
            return Vote(VoteOutcome.VALID, label, *cost, text=shown if keep_text else "")
        return Vote(VoteOutcome.TIMED_OUT)


def decide(rubric: RubricSettings, votes: Sequence[Vote]) -> tuple[float, str | None]:
    """Return the value, and the label if one has the majority."""
    labels = [vote.label for vote in votes if vote.label is not None]
    if 2 * len(labels) <= rubric.votes:
        raise _too_few(rubric, votes, len(labels))
    if rubric.combine == "mean":
        return sum(rubric.labels[label] for label in labels) / len(labels), None
    [(label, count)] = Counter(labels).most_common(1)
    if 2 * count <= len(labels):
        counted = ", ".join(f"{label} {count}" for label, count in sorted(Counter(labels).items()))
        raise NoVerdictError(
            f"the judge's votes have no majority: {counted}",
            hint="Use an odd number of votes, or combine them by their mean.",
            retryable=True,
        )
    return rubric.labels[label], label


def _has_settled(rubric: RubricSettings, votes: Sequence[Vote]) -> bool:
    """Return whether missing votes cannot change the majority."""
    if rubric.combine == "mean":
        return len(votes) == rubric.votes
    counts = Counter(vote.label for vote in votes if vote.label is not None)
    return any(2 * count > rubric.votes for count in counts.values())


def _too_few(rubric: RubricSettings, votes: Sequence[Vote], valid: int) -> ServiceError:
    if (failed := next((vote.error for vote in votes if vote.error is not None), None)) is not None:
        return failed
    outcomes = Counter(vote.outcome for vote in votes)
    if outcomes[VoteOutcome.TIMED_OUT]:
        return JudgeTimeoutError(
            f"the judge took longer than {rubric.vote_seconds:g} s, {outcomes[VoteOutcome.TIMED_OUT]} times",
            hint=f"Give the pool {rubric.pool!r} more engines, or raise `vote_seconds`.",
            retryable=True,
        )
    ends = next((vote.text for vote in votes if vote.text), "")
    hint = (
        "Raise `max_tokens` of the rubric."
        if outcomes[VoteOutcome.TRUNCATED]
        else "Use a model that follows the rubric, or more votes."
    )
    return NoVerdictError(
        f"only {valid} of {rubric.votes} answers of the judge have a verdict; one ends in {ends!r}",
        hint=hint,
        retryable=rubric.temperature > 0,
    )


def _hash(*parts: str) -> str:
    digest = sha256()
    for part in parts:
        data = part.encode(errors="replace")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


SIZE = 10_000
"""Each takes about a kilobyte."""


@dataclass(slots=True)
class _OpenQuestion:
    answered: anyio.Event = field(default_factory=anyio.Event)
    error: Exception | None = None


class JudgmentCache:
    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._kept: OrderedDict[str, Judgment] = OrderedDict()
        self._asked: dict[str, _OpenQuestion] = {}

    async def get(self, key: str, ask: Callable[[], Awaitable[Judgment]]) -> tuple[Judgment, bool]:
        """Ask equal questions once; return whether another caller had asked.

        The others wait for the judgment or the failure; if the one who asks is cancelled, another that waits asks.
        Failures are not kept.
        """
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
