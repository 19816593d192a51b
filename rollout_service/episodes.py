"""One attempt at a task, as policies, agents, environments and the pipeline share it.

The contract of a policy: messages in, one message out, and every token id kept. An agent drives a policy with an
`Episode`; an environment turns the episode into a `Score`.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import inf
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Protocol

import anyio
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from api_schemas.base import MAX_FLOAT32
from api_schemas.errors import Boundary
from api_schemas.rollouts import AgentProgram, RolloutRequest, StopReason, Usage
from api_schemas.rollouts.sessions import SessionInfo, TurnMark
from api_schemas.rollouts.trees import AgentNode, Work
from api_schemas.tasks import Task
from api_schemas.trajectories import ForkReason, Message, Trajectory
from rollout_service.activity import current_step
from rollout_service.base.errors import EnvironmentFailedError, ServiceError
from rollout_service.judging.contract import Judge, TextSampler
from rollout_service.tokens import ToolSpec
from sandboxes import LimitExceededError, Sandbox


class ContextFullError(ServiceError):
    """The next prompt leaves no room for an answer in the model's context."""

    code = "context_full"
    boundary: ClassVar[Boundary] = Boundary.TOKENS


def require_sandbox(sandbox: Sandbox | None) -> Sandbox:
    """Return the sandbox of an episode or a tool call, which now works on the caller's step."""
    if sandbox is None:
        raise EnvironmentFailedError("a sandbox is needed, and there is none", hint="Give the environment an image.")
    if (step := current_step()) is not None:
        step.sandbox = sandbox
    return sandbox


class EpisodeLimits(BaseModel):
    """The limits of an episode: an environment's, unless a request overrides them (see `api_schemas.tasks.Limits`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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


def require_score(value: object, environment: str) -> Score:
    """Return what an environment's `evaluate` returned.

    Raises:
        EnvironmentFailedError: It is not a score of finite numbers that fit 32 bits.
    """
    if not isinstance(value, Score):
        raise _no_score(environment, f"{value!r:.100}")
    numbers: list[tuple[str, object]] = [("the reward", value.reward), *value.parts.items()]
    for name, number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= MAX_FLOAT32:
            raise _no_score(environment, f"{number!r:.100} for {name}")
    return value


def _no_score(environment: str, found: str) -> EnvironmentFailedError:
    return EnvironmentFailedError(
        f"evaluate of {environment!r} returned {found}",
        hint='Return Score(reward, parts), for example Score(1.0, {"moves": 3.0}), with numbers of up to 3.4e38.',
    )


ESCAPING = (SystemExit, asyncio.CancelledError)
"""Errors of an environment's code that would end the service, as they are not exceptions: see `contain`."""


def contain(error: BaseException, where: str) -> NoReturn:
    """Make one of `ESCAPING` a failure of the environment, unless the caller itself is cancelled.

    Raises:
        EnvironmentFailedError: The code called `sys.exit`, or let through that something else was cancelled.
    """
    if isinstance(error, SystemExit):
        raise EnvironmentFailedError(
            f"{where} called sys.exit({error.code!r:.100})", hint="Raise an exception, which fails only its rollout."
        ) from error
    if (task := asyncio.current_task()) is None or task.cancelling():
        raise error
    raise EnvironmentFailedError(
        f"{where} raised CancelledError, although nobody cancelled the rollout",
        hint="Catch it where the code waits for a task or a call that something cancels.",
    ) from error


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

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        """Offer these tools instead of those that the conversation was opened with; only before the first turn."""
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
    def usage(self) -> Usage: ...

    @property
    def engine_seconds(self) -> float:
        """The time spent waiting for the engine so far."""
        ...

    def trajectory(self) -> Trajectory:
        """Return the segments so far, complete and exact after every turn and after an error."""
        ...


class UndrivenPolicy(ABC):
    """The half of `Policy` that drives it, for one that something else drives or has driven: all is refused."""

    @abstractmethod
    def refusal(self) -> ServiceError:
        """Return the error that says why no agent may drive the policy here."""

    async def respond(self, new_messages: list[Message], *, max_tokens: int) -> PolicyTurn:  # noqa: ARG002
        raise self.refusal()

    def offer(self, tools: Sequence[ToolSpec]) -> None:  # noqa: ARG002
        raise self.refusal()

    def replace(self, messages: list[Message], reason: ForkReason = ForkReason.HISTORY_EDITED) -> None:  # noqa: ARG002
        raise self.refusal()


class GatewayAccess(Protocol):
    """The model APIs through which a program of its own drives the policy of one episode, and is recorded.

    Every call of the program becomes a turn of the episode's policy. The access ends with the agent.
    """

    @property
    def url(self) -> str:
        """The address of the gateway for programs on this machine or elsewhere, without a path."""
        ...

    @property
    def key(self) -> str:
        """The key that names this episode, to be sent as a client of each API sends its key. It is a secret."""
        ...

    @property
    def stop_reason(self) -> StopReason | None:
        """The limit that calls have reached; they get only a closing text since then."""
        ...

    def serve(self, listener: socket.socket) -> AbstractAsyncContextManager[None]:
        """Serve this episode alone on a listening socket, such as one inside a sandbox, within the block.

        The socket is closed at its end.
        """
        ...

    async def until_failed(self) -> NoReturn:
        """Wait until a call could not be answered, without end if none fails.

        Raises:
            InferenceError: No engine answered.
            TokenError: An answer cannot be trained on.
        """
        ...


class SubagentSlot(Protocol):
    """The right of one sub-agent to be at work."""

    def lent(self) -> AbstractAsyncContextManager[None]:
        """Give the slot back within the block, since the sub-agent waits for sub-agents of its own."""
        ...


class SubagentHost(Protocol):
    """The host of one episode's sub-agents: the engines of frozen pools, slots, and sandboxes of their own."""

    def model(self, pool: str) -> str: ...

    async def open(self, pool: str, tools: list[ToolSpec], *, agent: str, temperature: float) -> Policy:
        """Open a conversation with a pool. Those of one agent prefer the same engine, since they share a prompt.

        Raises:
            NoBackendError: The pool is not served.
        """
        ...

    def slot(self) -> AbstractAsyncContextManager[SubagentSlot]:
        """Wait for a slot, which is held within the block; episodes take turns."""
        ...

    def sandbox(self) -> AbstractAsyncContextManager[Sandbox]:
        """Start a sandbox of the environment's image, which ends with the block."""
        ...


class WorkClock:
    """The time that was spent on an agent's work, over interruptions; the limits of the work are measured by it.

    It runs from its first use on.
    """

    def __init__(self) -> None:
        self._zero: float | None = None
        """When the clock would have shown zero, on the event loop's clock; None before its first use."""
        self._stopped_at: float | None = None
        self._limits: dict[anyio.CancelScope, float] = {}
        """The open limits, and the time on the clock at which they are reached."""

    @property
    def seconds(self) -> float:
        if self._stopped_at is not None:
            return self._stopped_at
        if self._zero is None:
            self._zero = anyio.current_time()
        return anyio.current_time() - self._zero

    def stop(self) -> None:
        """Stop the clock; until it is started, no limit is reached."""
        self._stopped_at = self.seconds
        self._set_deadlines()

    def start(self, seconds: float) -> None:
        """Let the clock run on from this reading."""
        self._stopped_at = None
        self._zero = anyio.current_time() - seconds
        self._set_deadlines()

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stop the clock within the block, unless it is stopped already."""
        if self._stopped_at is not None:
            yield
            return
        shown = self.seconds
        self.stop()
        try:
            yield
        finally:
            self.start(shown)

    def limit(self, seconds: float) -> WorkLimit:
        """Return a context that cancels its block once the clock has advanced by this much."""
        return WorkLimit(self, seconds)

    def _set_deadlines(self) -> None:
        for scope, end in self._limits.items():
            scope.deadline = inf if self._stopped_at is not None or self._zero is None else self._zero + end


class WorkLimit:
    """A time limit on a clock, as a context whose scope tells whether the limit was reached."""

    def __init__(self, clock: WorkClock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._scope = anyio.CancelScope()

    def __enter__(self) -> anyio.CancelScope:
        self._scope.__enter__()
        self._clock._limits[self._scope] = self._clock.seconds + self._seconds
        self._clock._set_deadlines()
        return self._scope

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        del self._clock._limits[self._scope]
        return self._scope.__exit__(kind, error, trace)


@dataclass(slots=True)
class Episode:
    """One attempt at a task, as it passes through the stages.

    The `require_` methods raise an `EnvironmentFailedError` where there is no such thing.
    """

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
    tool_error_turns: set[int] = field(default_factory=set)
    """The turns with a tool call that failed, as in `Trajectory`."""
    proposed_turns: set[int] = field(default_factory=set)
    """The turns of `propose_branch`."""
    limit_violations: list[LimitExceededError] = field(default_factory=list)
    """Sandbox limits that the agent's calls reached."""
    program: AgentProgram | None = None
    """The program that was the agent, once it has ended."""
    notes: list[str] = field(default_factory=list)
    """Notes for people on the result, such as files of the agent that were left out."""
    ended: list[str] = field(default_factory=list)
    """The command lines of the processes that the agent left running, which were ended before the grading."""
    grader_output: str = ""
    """The end of the grader's output. Its author may see it; it never becomes part of a result, since it may quote
    hidden tests."""
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """The secrets of the stage under way (`EnvironmentSpec.init_secrets`, `evaluate_secrets`), by variable."""
    hidden: set[str] = field(default_factory=set, repr=False)
    """The spellings of all secrets so far; texts that are shown have them masked."""
    state: dict[str, Any] = field(default_factory=dict)
    """Values that the environment carries from one stage to the next."""
    gateway: GatewayAccess | None = None
    """How a program reaches the policy; None unless the environment asks for it (`Environment.uses_gateway`)."""
    judge: Judge | None = None
    """Asks models for judgments in `evaluate`; None where there are no engines, as in a trial."""
    sampler: TextSampler | None = None
    """Samples from other pools, such as an opponent's moves; nothing of it becomes part of the trajectory. None where
    there are no engines, as in a trial."""
    checkpoint: Callable[[], Awaitable[None]] | None = None
    """Keeps the artifacts as they are now, to be scored on their own after the agent has ended. It ends the agent's
    processes. None unless the environment is scored in a fresh sandbox."""
    pauses: Callable[[Sandbox | None], AbstractContextManager[object]] = nullcontext
    """Returns a context for a wait of the agent, in which a sandbox may be paused until its next use."""
    save_due: Callable[[list[Message]], Callable[[], Coroutine[Any, Any, None]] | None] = lambda _: None
    """Returns how to save the sandbox now, between the calls of a turn and their results, if it is time to."""
    known_results: Sequence[list[Message]] = ()
    """The agent's messages after each turn, if the sandbox was saved after these turns: their calls are not run."""
    earlier_results: Sequence[list[Message]] = ()
    """The same of another rollout's turns, of which the model is shown the results in place of those of now."""
    subagents: SubagentHost | None = None
    """The host of sub-agents; None unless the environment has them (`EnvironmentSpec.parallel`), and in a trial."""
    nodes: list[AgentNode] = field(default_factory=list)
    """The sub-agents so far, in the order in which they began."""
    work: Work | None = None
    """How the work was divided among them; None in an environment without sub-agents."""
    session: SessionInfo | None = None
    """The live session that the episode is a part of; None for a task."""
    turn_marks: list[TurnMark] = field(default_factory=list)
    """The marks of that part's turns."""
    clock: WorkClock = field(default_factory=WorkClock)
    """Measures the agent's work; an agent's own time limits belong on it, so that a replay does not count."""

    def note_ended(self, reward: float) -> None:
        """Note the processes ended before the grading, if the agent may have missed a reward of 1 because of it."""
        if self.ended and reward < 1:
            ended = ", ".join(dict.fromkeys(self.ended))
            self.notes.append(
                f"processes of the agent or of init were ended before the grading: {ended}; "
                "`agent_processes` may let them live for a grader without secrets in the agent's own sandbox"
            )

    def propose_branch(self) -> None:
        """Propose the policy's next turn as one at which branches of the rollout begin (`at` = `proposed`)."""
        self.proposed_turns.add(self.policy.usage.turns)

    def require_sandbox(self) -> Sandbox:
        return require_sandbox(self.sandbox)

    def require_judge(self) -> Judge:
        if self.judge is None:
            raise EnvironmentFailedError(
                "a judge is needed to score this, and there is none here",
                hint="Score it in a service with a pool for judges, or pass `OtherModels(judge=...)` to `play`.",
            )
        return self.judge

    def require_sampler(self) -> TextSampler:
        if self.sampler is None:
            raise EnvironmentFailedError(
                "another model takes part in this, and there are no engines here",
                hint="Roll it out in a service with a pool for that model, or pass `OtherModels(sampler=...)` "
                "to `play`.",
            )
        return self.sampler

    def require_subagents(self) -> SubagentHost:
        if self.subagents is None:
            raise EnvironmentFailedError(
                "this task is for an agent with sub-agents, and there are no engines for them here",
                hint="Roll it out in a service with a frozen pool, or pass `OtherModels(policies=...)` to `play`.",
            )
        return self.subagents

    @property
    def task(self) -> Task:
        return self.request.task

    @property
    def instance(self) -> dict[str, JsonValue]:
        return self.request.task.instance
