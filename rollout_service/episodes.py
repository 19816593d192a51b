"""One attempt at a task, as policies, agents, environments and the pipeline share it.

The contract of a policy: messages in, one message out, and every token id kept. An agent drives a policy with an
`Episode`; an environment turns the episode into a `Score`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from api_schemas.errors import Boundary
from api_schemas.rollouts import RolloutRequest, Usage
from api_schemas.tasks import Task
from api_schemas.trajectories import ForkReason, Message, Trajectory
from rollout_service.errors import EnvironmentFailedError, ServiceError
from sandboxes import LimitExceededError, Sandbox


class ContextFullError(ServiceError):
    """The next prompt leaves no room for an answer in the model's context."""

    code = "context_full"
    boundary: ClassVar[Boundary] = Boundary.TOKENS


def require_sandbox(sandbox: Sandbox | None) -> Sandbox:
    """Return the sandbox of an episode or a tool call.

    Raises:
        EnvironmentFailedError: There is no sandbox.
    """
    if sandbox is None:
        raise EnvironmentFailedError(
            "a sandbox is needed, and there is none", hint="Give the environment an image."
        )
    return sandbox


class EpisodeLimits(BaseModel):
    """The limits of an episode: an environment's, unless a request overrides them (see `api_schemas.tasks.Limits`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_turns: int = Field(16, ge=1)
    max_tokens: int = Field(16_384, ge=1)
    max_turn_tokens: int = Field(4_096, ge=1)
    max_malformed: int = Field(3, ge=1)
    """Consecutive turns whose tool calls are all malformed before the agent is stopped."""
    agent_seconds: float = Field(900.0, gt=0)
    tool_seconds: float = Field(60.0, gt=0)
    tool_output_chars: int = Field(16_384, ge=256)
    """A longer tool result is cut in the middle, with a note."""
    init_seconds: float = Field(120.0, gt=0)
    rollout_seconds: float = Field(1_200.0, gt=0)
    evaluate_seconds: float = Field(300.0, gt=0)


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome of a rollout: a reward, and the parts that a person may want to see."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)


SANDBOX_ENDED_SCORE = Score(0.0, {"sandbox_ended": 1.0})
"""The score of an agent that ended the sandbox in which it is to be scored."""


@dataclass(frozen=True, slots=True)
class PolicyTurn:
    """One answer of the policy."""

    message: Message
    """The answer as parsed from the sampled ids; for acting on it, never for making ids again."""
    truncated: bool
    """Whether the answer was cut off by its token limit."""
    malformed: int
    """The number of tool calls that could not be parsed; their errors are in `message.tool_calls`."""
    context_full: bool = False
    """Whether the end of the model's context cut the answer off."""


class Policy(Protocol):
    """The policy under training, as an agent sees it."""

    async def respond(self, new_messages: list[Message], *, max_tokens: int) -> PolicyTurn:
        """Append these messages to the conversation and sample one turn of at most `max_tokens` tokens.

        Raises:
            ContextFullError: The prompt leaves no room in the model's context.
            InferenceError: No engine answered.
            TokenError: The messages cannot be turned into ids.
        """
        ...

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far, including the policy's own turns."""
        ...

    def replace(self, messages: list[Message], reason: ForkReason = ForkReason.HISTORY_EDITED) -> None:
        """Replace the whole history, for example by a summary of it (`COMPACTION`).

        The next turn begins a new segment. Tokens sampled before stay trainable in their own segment.
        """
        ...

    @property
    def usage(self) -> Usage:
        """The cost of the turns so far."""
        ...

    @property
    def engine_seconds(self) -> float:
        """The time spent waiting for the engine so far."""
        ...

    def trajectory(self) -> Trajectory:
        """Return the segments so far, complete and exact after every turn and after an error."""
        ...


@dataclass(slots=True)
class Episode:
    """One attempt at a task, as it passes through the stages."""

    request: RolloutRequest
    attempt: int
    limits: EpisodeLimits
    """The environment's limits, overridden by the request's."""
    policy: Policy
    sandbox: Sandbox | None = None
    """The agent's sandbox; in `evaluate` the one to score in; None if the environment needs none."""
    answer: str | None = None
    """The agent's final text: the answer it passed to `finish`, or its last message."""
    tool_calls: int = 0
    tool_seconds: float = 0.0
    limit_violations: list[LimitExceededError] = field(default_factory=list)
    """Sandbox limits that the agent's calls reached."""
    notes: list[str] = field(default_factory=list)
    """Notes for people on the result, such as files of the agent that were left out."""
    state: dict[str, Any] = field(default_factory=dict)
    """Values that the environment carries from one stage to the next."""

    def require_sandbox(self) -> Sandbox:
        """Return the sandbox.

        Raises:
            EnvironmentFailedError: There is no sandbox.
        """
        return require_sandbox(self.sandbox)

    @property
    def task(self) -> Task:
        """The task being attempted."""
        return self.request.task

    @property
    def instance(self) -> dict[str, JsonValue]:
        """The data of the task."""
        return self.request.task.instance
