"""Rollouts: one attempt at a task, from its request to its one terminal state."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from api_schemas.base import (
    MAX_INT32,
    Flag,
    Integer,
    Name,
    Number,
    Real,
    RolloutId,
    Signed,
    StrEnum,
    Timestamp,
    WireModel,
)
from api_schemas.errors import ErrorInfo
from api_schemas.tasks import Limits, Task
from api_schemas.trajectories import Trajectory


class Sampling(WireModel):
    """How the policy is sampled. The defaults are plain on-policy sampling: no truncation of any kind."""

    temperature: Annotated[float, Number] = Field(1.0, ge=0.0, le=100.0)
    """0 is greedy."""
    top_p: Annotated[float, Number] = Field(1.0, gt=0.0, le=1.0)
    top_k: Annotated[int, Number] = Field(-1, ge=-1, le=MAX_INT32)
    """-1 keeps every token."""
    min_p: Annotated[float, Number] = Field(0.0, ge=0.0, le=1.0)
    stop: list[str] = []
    """Stop strings, beside the stop tokens of the policy's template."""
    seed: Signed | None = None
    """Asks the engine for a repeatable sample, where it can give one."""


class TokenExtras(WireModel):
    """What the trajectory is to have beside ids, log-probabilities and versions. An engine that does not give it
    refuses the rollout; `exports` of a backend says what it gives."""

    top_logprobs: Annotated[int, Number] = Field(0, ge=0, le=100)
    """So many of the likeliest tokens at each sampled one: `top_ids` and `top_logprobs` of the segments."""
    prompt_logprobs: Flag = False
    """Log-probabilities of what was read: `prompt_logprobs` of the segments. Engines read such prompts anew, at least
    from the first token that a turn adds."""
    routed_experts: Flag = False
    """Which experts of a mixture of experts read each token: `routed_experts` of the segments."""


class Stage(StrEnum):
    """The three stages of the pipeline."""

    INIT = "init"
    ROLLOUT = "rollout"
    EVALUATE = "evaluate"


class RolloutState(StrEnum):
    """Where a rollout stands. The last three are final."""

    QUEUED = "queued"
    INIT = "init"
    ROLLOUT = "rollout"
    EVALUATE = "evaluate"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Whether nothing follows this state."""
        return self in (RolloutState.COMPLETED, RolloutState.FAILED, RolloutState.CANCELLED)


class StopReason(StrEnum):
    """Why the agent stopped."""

    FINISHED = "finished"
    """It called `finish`."""
    ANSWERED = "answered"
    """It answered without calling a tool."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    """The next prompt would not fit the model's context."""
    TRUNCATED = "truncated"
    """A turn was cut off by its own token limit and held no complete tool call."""
    MALFORMED = "malformed"
    """Too many malformed tool calls in a row."""
    AGENT_TIMEOUT = "agent_timeout"
    """The agent's own wall clock ran out; what it did is scored."""
    SANDBOX_ENDED = "sandbox_ended"
    """Its sandbox ended under it, by its own doing or at the end of its lifetime; what it did until then is scored."""
    STAGE_TIMEOUT = "stage_timeout"
    """A stage's deadline passed; the rollout failed."""
    ERROR = "error"
    CANCELLED = "cancelled"


class Span(WireModel):
    """One stage of one attempt. Time in the queue is told apart and counts against no limit."""

    stage: Stage
    attempt: Integer
    started_at: Timestamp
    queued_seconds: Real
    """How long the rollout waited for a worker of this stage."""
    seconds: Real
    """How long the stage worked on it."""
    sandbox_seconds: Real = 0.0
    """How much of it went into starting a sandbox and opening its sessions, part of it while the task was set up."""
    engine_seconds: Real = 0.0
    """How much of it was spent waiting for an engine's answer."""
    tool_seconds: Real = 0.0
    """How much of it was spent in the agent's tools."""
    error: str | None = None
    """The code of the error that ended it, if one did."""


class Usage(WireModel):
    """What a rollout cost."""

    turns: Integer = 0
    prompt_tokens: Integer = 0
    """Prompt tokens sent to the engine, summed over the turns."""
    cached_tokens: Integer = 0
    """How many of them the engine served from its prefix cache, by its own count."""
    sampled_tokens: Integer = 0
    tool_calls: Integer = 0
    malformed_calls: Integer = 0


class RolloutRequest(WireModel):
    """An order for one rollout. Sending it again under the same `rollout_id` changes nothing."""

    rollout_id: RolloutId | None = None
    """Chosen by the caller, or by the service when left out."""
    task: Task
    pool: Name = "policy"
    """The pool of engines that serves the agent."""
    sampling: Sampling = Sampling()
    exports: TokenExtras = TokenExtras()
    limits: Limits = Limits()
    metadata: dict[str, JsonValue] = {}
    """Handed back untouched."""


class Rollout(WireModel):
    """A rollout as it stands; with its trajectory once it has one and the caller asks for it."""

    rollout_id: RolloutId
    state: RolloutState
    task: Task
    pool: Name
    attempt: Integer = 0
    """Attempts begun; 0 while the first has not."""
    reward: Real | None = None
    """The score, or null when there is none: a failure is never a zero."""
    reward_parts: dict[str, Real] = {}
    notes: list[str] = []
    """What a person should know of the result, such as files of the agent that were left out."""
    stop_reason: StopReason | None = None
    error: ErrorInfo | None = None
    """Why it failed; set if and only if the state is `failed`."""
    retries: list[ErrorInfo] = []
    """Failures of earlier attempts."""
    usage: Usage = Usage()
    spans: list[Span] = []
    metadata: dict[str, JsonValue] = {}
    created_at: Timestamp
    finished_at: Timestamp | None = None
    trajectory: Trajectory | None = None


class RolloutPage(WireModel):
    """A page of rollouts, oldest first."""

    rollouts: list[Rollout]
    next_cursor: str | None = None
    """Pass it as `cursor` for the next page; null on the last one."""
    counts: dict[RolloutState, int] = {}
    """How many rollouts of this store are in each state."""


class CancelAnswer(WireModel):
    """What became of an order to cancel a rollout."""

    rollout_id: RolloutId
    was: RolloutState | None
    """The state that it was in; null when it is not known yet, and is cancelled when it comes."""


class AbortAnswer(WireModel):
    """The rollouts whose cancellation was asked for."""

    cancelled: list[RolloutId]
