"""The contract of a judge: a rubric and a text in, a judgment out.

A judgment rests on verdicts that the model gave. A call that failed, took too long or gave no readable verdict is an
error with its cause, and never a value. `InferenceError` and `TokenError` are raised as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from pydantic import JsonValue

from api_schemas.errors import Boundary
from api_schemas.trajectories import Message
from rollout_service.base.errors import ServiceError

if TYPE_CHECKING:
    from rollout_service.judging.rubric import Rubric


class JudgeError(ServiceError):
    """The base of the family."""

    code = "judge_failed"
    boundary = Boundary.ENVIRONMENT

    def __init__(self, message: str, *, hint: str = "", retryable: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.retryable = retryable


class NoVerdictError(JudgeError):
    """Too few answers of the judge have a verdict, or no verdict has a majority."""

    code = "no_verdict"


class JudgeTimeoutError(JudgeError):
    """The judge took longer than the rubric allows."""

    code = "judge_timeout"


class VoteOutcome(StrEnum):
    VALID = "valid"
    UNREADABLE = "unreadable"
    """The answer has no verdict, or one that the rubric does not have."""
    TRUNCATED = "truncated"
    """Cut off by the token limit, so its end is not known."""
    TIMED_OUT = "timed_out"
    FAILED = "failed"
    """No engine answered, or the prompt cannot be rendered."""


@dataclass(frozen=True, slots=True)
class SampledText:
    text: str
    """Without the reasoning that its chat format marks as such."""
    truncated: bool
    prompt_tokens: int
    sampled_tokens: int


class TextSampler(Protocol):
    def model(self, pool: str) -> str:
        """Name the model that a pool serves now, as `path@version`; its path is the one that its engine reports.

        Raises:
            NoBackendError: The pool has no backend.
        """
        ...

    async def sample(
        self, pool: str, messages: Sequence[Message], *, max_tokens: int, temperature: float
    ) -> SampledText:
        """Sample one answer of at most `max_tokens` tokens.

        Raises:
            ContextFullError: The prompt leaves no room for an answer.
            InferenceError: No engine answered.
            TokenError: The messages cannot be turned into ids.
        """
        ...


@dataclass(frozen=True, slots=True)
class Vote:
    outcome: VoteOutcome
    label: str | None = None
    """None unless `outcome` is valid."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    error: ServiceError | None = None
    """None in a judgment, which is remembered for long."""
    text: str = ""
    """The end of an answer without a verdict, for people; all of it if a poll asks for texts."""


@dataclass(frozen=True, slots=True)
class Judgment:
    value: float
    """The majority's value, or the mean over all chosen labels."""
    label: str | None
    """None for a mean."""
    votes: tuple[Vote, ...]
    """Without those that could not change a majority any more."""
    model: str
    """As `path@version`."""
    rubric: str
    prompt_hash: str
    """Identifies the prompt, without its content."""

    @property
    def note(self) -> str:
        count = sum(vote.outcome is VoteOutcome.VALID for vote in self.votes)
        verdict = f"{self.label!r}" if self.label is not None else f"a mean of {self.value:g}"
        return (
            f"judged by {self.model} with the rubric {self.rubric}: {verdict}, {count} valid of "
            f"{len(self.votes)} votes (prompt {self.prompt_hash})"
        )


@dataclass(frozen=True, slots=True)
class Poll:
    """Votes on a question that is not decided."""

    votes: tuple[Vote, ...]
    """Without those that could not change a majority any more."""
    model: str
    """As `path@version`."""


class Judge(Protocol):
    async def ask(self, rubric: Rubric, instance: dict[str, JsonValue], **texts: str) -> Judgment:
        """Judge texts of a task, by the names that the rubric has for them.

        The texts are data: they are marked as such in the prompt, whatever they say.

        Raises:
            JudgeError: There is no verdict, or it took too long.
            InferenceError: No engine answered.
            TokenError: The prompt cannot be turned into ids.
            InvalidFieldError: The instance lacks a field that the rubric uses.
        """
        ...

    async def poll(
        self,
        rubric: Rubric,
        instance: dict[str, JsonValue],
        texts: Mapping[str, str],
        *,
        keep_texts: bool = False,
    ) -> Poll:
        """Return all votes, failed ones too, for callers with a rule of their own. Nothing is remembered.

        Raises:
            NoBackendError: The rubric's pool has no backend.
            InvalidFieldError: The instance lacks a field that the rubric uses.
        """
        ...
