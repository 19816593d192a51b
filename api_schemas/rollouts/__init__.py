"""Rollouts: one attempt at a task, from its request to its one terminal state."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from api_schemas.base import (
    MAX_INT32,
    Count,
    Flag,
    Integer,
    Name,
    Number,
    Real,
    RolloutId,
    Signed,
    StrEnum,
    Text,
    Timestamp,
    TraceContext,
    WireModel,
)
from api_schemas.errors import ErrorInfo
from api_schemas.external import AgentKind, RolloutAccess
from api_schemas.rollouts.sessions import RolloutKind, SessionInfo, TurnMark
from api_schemas.rollouts.stages import Span as Span
from api_schemas.rollouts.stages import Stage as Stage
from api_schemas.rollouts.stages import StopReason as StopReason
from api_schemas.rollouts.stages import Usage as Usage
from api_schemas.rollouts.trees import AgentNode, NodeDetail, Work
from api_schemas.tasks import Limits, Task
from api_schemas.trajectories import Trajectory


class Sampling(WireModel):
    """How the policy is sampled. The defaults are plain on-policy sampling, without truncation of any kind."""

    temperature: Annotated[float, Number] = Field(1.0, ge=0.0, le=100.0)
    """The sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Number] = Field(1.0, gt=0.0, le=1.0)
    top_k: Annotated[int, Number] = Field(-1, ge=-1, le=MAX_INT32)
    """The number of likeliest tokens to sample from; -1 keeps every token."""
    min_p: Annotated[float, Number] = Field(0.0, ge=0.0, le=1.0)
    stop: list[str] = []
    """Stop strings, in addition to the stop tokens of the policy's template."""
    seed: Signed | None = None
    """A seed for repeatable samples, on engines that support it."""


class TokenExtras(WireModel):
    """Numbers per token to record besides ids, log-probabilities and versions.

    A rollout is refused if its engine cannot return them; a backend's `exports` lists those that it can return.
    """

    top_logprobs: Annotated[int, Number] = Field(0, ge=0, le=100)
    """The number of likeliest tokens to record at each sampled one, as `top_ids` and `top_logprobs` of the segments."""
    prompt_logprobs: Flag = False
    """Whether to record the log-probabilities of prompt tokens, as `prompt_logprobs` of the segments. Engines then read
    each prompt again, at least from the first token that a turn adds."""
    routed_experts: Flag = False
    """Whether to record which experts of a mixture of experts read each token, as `routed_experts` of the segments."""
    nodes: Annotated[NodeDetail, Field(exclude_if=lambda detail: detail is NodeDetail.NONE)] = NodeDetail.NONE
    """How much of the agent's sub-agents to return with the rollout, as its `nodes` and `work`."""
    turn_marks: Annotated[Flag, Field(exclude_if=lambda marks: not marks)] = False
    """Whether to return a live session's part with its `session` and the `turn_marks` of its turns."""


class RolloutState(StrEnum):
    """The state of a rollout. The last three are final."""

    QUEUED = "queued"
    INIT = "init"
    ROLLOUT = "rollout"
    EVALUATE = "evaluate"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (RolloutState.COMPLETED, RolloutState.FAILED, RolloutState.CANCELLED)


class AgentProgram(WireModel):
    """The outcome of a program that was the agent."""

    harness: Name
    exit_code: Integer | None = None
    """Null if it was ended at the limit of its time."""
    seconds: Real
    output: str
    """The end of its output."""


class BranchPoint(WireModel):
    """A turn of an earlier rollout at which another one goes its own way.

    The turns before it are played again, with the same token ids; the agent's tools run again in a new sandbox.
    """

    rollout_id: RolloutId
    """The earlier rollout. It has ended, and was an attempt at the same task."""
    turn: Count
    """The first turn that is sampled anew, counted from 0."""
    train_prefix: Flag = False
    """Whether the turns before are marked as sampled in this trajectory, too. Else their mask is 0, so that each token
    is trained on once."""
    reuse_results: Annotated[Flag, Field(exclude_if=lambda reuses: not reuses)] = False
    """Whether the model is shown the tool results that it had before, not those of now: for tools that print times or
    random names. Else a result that differs fails the branch."""


class RolloutRequest(WireModel):
    """A request for one rollout. Sending it again under the same `rollout_id` changes nothing."""

    rollout_id: RolloutId | None = None
    """The rollout's id; if left out, the service chooses one."""
    task: Task
    agent: Annotated[AgentKind, Field(exclude_if=lambda kind: kind is AgentKind.ENVIRONMENT)] = AgentKind.ENVIRONMENT
    """Who works on the task: the environment's own agent, or a program outside."""
    pool: Name = "policy"
    """The pool of engines that serves the agent."""
    sampling: Sampling = Sampling()
    exports: TokenExtras = TokenExtras()
    limits: Limits = Limits()
    branch_of: Annotated[BranchPoint | None, Field(exclude_if=lambda branch: branch is None)] = None
    """Where in an earlier rollout it begins; if left out, at the task."""
    metadata: dict[str, JsonValue] = {}
    """Data of the caller, returned unchanged."""
    trace: Annotated[TraceContext | None, Field(exclude_if=lambda trace: trace is None)] = None
    """The caller's span, which the rollout's trace continues; if left out, the header `traceparent` says it."""


class Rollout(WireModel):
    """A rollout in its present state, with its trajectory if it has one and the caller asks for it."""

    rollout_id: RolloutId
    state: RolloutState
    task: Task
    pool: Name
    attempt: Integer = 0
    """The number of attempts begun; 0 before the first."""
    reward: Real | None = None
    """The score; null if there is none, since a failure never counts as zero."""
    reward_parts: dict[Text, Real] = {}
    """The parts of the score that the grader named."""
    notes: list[Text] = []
    """Remarks on the result for people, such as files of the agent that were left out."""
    stop_reason: StopReason | None = None
    program: Annotated[AgentProgram | None, Field(exclude_if=lambda program: program is None)] = None
    """The program that was the agent; left out of JSON for the built-in one."""
    error: ErrorInfo | None = None
    """Why the rollout failed; set if and only if the state is `failed`."""
    retries: list[ErrorInfo] = []
    """The failures of earlier attempts."""
    usage: Usage = Usage()
    spans: list[Span] = []
    branch_of: Annotated[BranchPoint | None, Field(exclude_if=lambda branch: branch is None)] = None
    """Where in an earlier rollout it began. Left out of JSON if it began at the task."""
    metadata: dict[str, JsonValue] = {}
    created_at: Timestamp
    finished_at: Timestamp | None = None
    access: Annotated[RolloutAccess | None, Field(exclude_if=lambda access: access is None)] = None
    """How a program outside reaches the policy. Left out unless the request asks for such an agent, it may begin, and
    the caller's key may submit rollouts."""
    trajectory: Trajectory | None = None
    nodes: Annotated[list[AgentNode], Field(exclude_if=lambda nodes: not nodes)] = []
    """The agent's sub-agents, in the order of their calls. Left out unless requested by `exports.nodes`."""
    work: Annotated[Work | None, Field(exclude_if=lambda work: work is None)] = None
    """How the work was divided among them. Left out unless requested by `exports.nodes`, and for agents without any."""
    kind: Annotated[RolloutKind, Field(exclude_if=lambda kind: kind is RolloutKind.TASK)] = RolloutKind.TASK
    """Where it comes from. Left out of JSON for attempts at tasks."""
    session: Annotated[SessionInfo | None, Field(exclude_if=lambda session: session is None)] = None
    """The live session that it is a part of. Left out unless requested by `exports.turn_marks`."""
    turn_marks: Annotated[list[TurnMark], Field(exclude_if=lambda marks: not marks)] = []
    """The marks of this part's turns, ordered by turn id. Left out unless requested by `exports.turn_marks`."""


class RolloutPage(WireModel):
    """A page of rollouts, oldest first."""

    rollouts: list[Rollout]
    next_cursor: str | None = None
    """The `cursor` of the next page; null on the last page."""
    counts: dict[RolloutState, int] = {}
    """The number of rollouts in each state, over the whole store."""


class CancelAnswer(WireModel):
    """The outcome of a request to cancel a rollout."""

    rollout_id: RolloutId
    was: RolloutState | None
    """The state that the rollout was in; null if it is not known yet, in which case it is cancelled if it arrives."""


class AbortAnswer(WireModel):
    """The rollouts whose cancellation was requested."""

    cancelled: list[RolloutId]
