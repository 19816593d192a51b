"""The contract of an environment: how a task is set up, what the agent may do, how the outcome is scored.

Three coroutines: `init` and `run`, which have working defaults in `base.AgentEnvironment`, and `evaluate`.
Guarantees of the pipeline to them: each runs under its stage's deadline and may be cancelled at any await;
`evaluate` may be called again after a failure that may go away by itself; a sandbox that `Episode` holds is
alive and belongs to this rollout alone; it is released by the pipeline, never by the environment; whatever
`evaluate` must not trust the agent with stays outside of the sandbox until the agent has ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal, Protocol, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from api_schemas.base import Name
from api_schemas.rollouts import RolloutRequest, StopReason, Usage
from api_schemas.tasks import Task
from api_schemas.trajectories import ForkReason, Message, Trajectory
from rollout_service.tokens import ToolSpec
from sandboxes import LimitExceededError, Sandbox, SandboxConfigError, SessionName
from sandboxes.egress.rules import AllowList


class EnvironmentSettings(BaseModel):
    """A part of an environment's settings; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


Size = Annotated[str, Field(pattern=r"^\d+(\.\d+)?[KMGT]?$")]


class EpisodeLimits(EnvironmentSettings):
    """The limits of an environment; a request may set each of them anew (see `api_schemas.tasks.Limits`)."""

    max_turns: int = Field(16, ge=1)
    max_tokens: int = Field(16_384, ge=1)
    max_turn_tokens: int = Field(4_096, ge=1)
    max_malformed: int = Field(3, ge=1)
    """Turns in a row whose tool calls are all malformed, before the agent is stopped."""
    agent_seconds: float = Field(900.0, gt=0)
    tool_seconds: float = Field(60.0, gt=0)
    tool_output_chars: int = Field(16_384, ge=256)
    """A longer result of a tool is cut in the middle, with a note."""
    init_seconds: float = Field(120.0, gt=0)
    rollout_seconds: float = Field(1_200.0, gt=0)
    evaluate_seconds: float = Field(300.0, gt=0)


class SandboxSettings(EnvironmentSettings):
    """What the sandbox of an environment may use."""

    network: Literal["none", "full"] | tuple[str, ...] = "none"
    """A list names the hosts that may be reached: HOST, *.HOST or an address, each also with :PORT."""
    memory: Size = "2G"
    """Bytes, or with a suffix K, M, G or T (powers of 1024)."""
    max_processes: int = Field(256, ge=1)
    cpus: float | None = Field(None, gt=0)
    """Processors' worth of time; None sets no limit: what others leave is used."""
    disk: Size | None = None
    """What may be written, as `memory`; None is the provider's default."""
    lifetime: float | None = Field(None, gt=0)
    """Seconds after which a sandbox ends, whatever it does; None: it lives as long as its rollout."""
    env: dict[str, str] = {}

    @field_validator("network", mode="before")
    @classmethod
    def _network_is_known(cls, network: Any) -> Any:
        """One message for the key, instead of one for each form that it may have."""
        hosts = isinstance(network, list | tuple) and all(isinstance(host, str) for host in network)
        if not hosts and network not in ("none", "full"):
            raise ValueError('give "none", "full", or a list of hosts')
        if hosts:
            try:
                AllowList(network)
            except SandboxConfigError as error:
                raise ValueError(f"{error}; {error.hint}") from error
        return network

    @property
    def memory_bytes(self) -> int:
        """`memory` as a number of bytes."""
        return parse_size(self.memory)

    @property
    def disk_bytes(self) -> int | None:
        """`disk` as a number of bytes."""
        return None if self.disk is None else parse_size(self.disk)


DEFAULT_DISK_BYTES = 1 << 30
"""The defaults of providers, unless their settings say otherwise."""


def parse_size(size: str) -> int:
    """Return the bytes that a size stands for."""
    number, suffix = size.rstrip("KMGT"), size[-1]
    return int(float(number) * 1024 ** ("KMGT".find(suffix) + 1))


class EvaluateIn(StrEnum):
    """Where an outcome is scored."""

    NONE = "none"
    """Without a sandbox; the agent's is released when the agent ends."""
    SAME = "same"
    """In the agent's own sandbox."""
    FRESH = "fresh"
    """In a new one, that receives only the paths in `artifacts`."""


SESSIONS: frozenset[SessionName] = frozenset(get_args(SessionName))
"""Each is used by the built-in tool of its name."""


class EnvironmentSpec(EnvironmentSettings):
    """What is known of an environment without running it; `GET /v1/environments` shows it."""

    name: Name
    description: str = ""
    image: str | None = None
    """The sandbox image: a name, a path or a reference; None means that the agent needs no sandbox."""
    system: str | None = None
    """The system prompt, a sandboxed Jinja2 template over the task's instance."""
    prompt: str = "{{ instance.question }}"
    """The first user message, a sandboxed Jinja2 template over the task's instance."""
    tools: list[str] = []
    """Names of the built-in tools that the agent has."""
    limits: EpisodeLimits = EpisodeLimits()
    sandbox: SandboxSettings = SandboxSettings()
    evaluate_in: EvaluateIn = EvaluateIn.NONE
    artifacts: list[str] = []
    """Absolute paths that a fresh evaluation sandbox receives from the agent's."""
    artifacts_size: Size = "256M"
    """The limit for all artifacts, as `memory`, and no more than half of the sandbox's memory and disk. Above it the
    agent counts as having left nothing."""
    runs_submission: bool = False
    """Whether `Environment.execute` is called before `evaluate`, where nothing of the grader is."""
    binds: dict[str, str] = Field({}, exclude=True)
    """Files and folders of the host that a sandbox shows and cannot change, by their path inside."""

    @property
    def artifacts_bytes(self) -> int:
        """`artifacts_size` in bytes, and so many that the grader's sandbox has room for the grader too."""
        room = [self.sandbox.memory_bytes, self.sandbox.disk_bytes or DEFAULT_DISK_BYTES]
        return min(parse_size(self.artifacts_size), min(room) // 2)

    @property
    def sessions(self) -> frozenset[SessionName]:
        """The sessions that the agent's tools use; they are open before the agent begins."""
        return SESSIONS.intersection(self.tools)


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome of a rollout: a reward, and the parts that a person may want to see."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)


SANDBOX_ENDED_SCORE = Score(0.0, {"sandbox_ended": 1.0})
"""The note for an agent that ended the sandbox in which it is to be scored."""


@dataclass(frozen=True, slots=True)
class PolicyTurn:
    """One answer of the policy."""

    message: Message
    """As parsed from the sampled ids; only for acting on it, never for making ids again."""
    truncated: bool
    """Whether it was cut off by its token limit."""
    malformed: int
    """How many of its tool calls could not be parsed; their errors are in `message.tool_calls`."""
    context_full: bool = False
    """Whether what cut it off was the end of the model's context."""


class Policy(Protocol):
    """The policy under training, as an agent sees it: messages in, one message out, every id kept."""

    async def respond(self, new_messages: list[Message], *, max_tokens: int) -> PolicyTurn:
        """Continue the conversation by these messages and sample one turn of at most `max_tokens` tokens.

        Raises ContextFullError when the prompt leaves no room in the model's context, InferenceError and
        TokenError.
        """
        ...

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation as it stands, with the policy's own turns."""
        ...

    def replace(self, messages: list[Message], reason: ForkReason = ForkReason.HISTORY_EDITED) -> None:
        """Put other messages in the place of the whole history, such as a summary of it (`COMPACTION`).

        The next turn begins a new segment. What was sampled before stays trainable in its own.
        """
        ...

    @property
    def usage(self) -> Usage:
        """What the turns cost so far."""
        ...

    @property
    def engine_seconds(self) -> float:
        """Time spent waiting for the engine's answers so far."""
        ...

    def trajectory(self) -> Trajectory:
        """The segments so far, complete and exact after every turn, also after an error."""
        ...


@dataclass(slots=True)
class Episode:
    """One attempt at a task, as it passes through the stages."""

    request: RolloutRequest
    attempt: int
    spec: EnvironmentSpec
    limits: EpisodeLimits
    """The environment's limits with the request's own put over them."""
    policy: Policy
    sandbox: Sandbox | None = None
    """The agent's sandbox; in `evaluate` the one to score in; None where the environment needs none."""
    answer: str | None = None
    """The agent's final text: what it passed to `finish`, or its last message."""
    tool_calls: int = 0
    tool_seconds: float = 0.0
    limit_violations: list[LimitExceededError] = field(default_factory=list)
    """Limits of the sandbox that the agent's calls reached."""
    notes: list[str] = field(default_factory=list)
    """Notes for people on the result, such as files of the agent that were left out."""
    state: dict[str, Any] = field(default_factory=dict)
    """Whatever the environment wants to carry from one stage to the next."""

    @property
    def task(self) -> Task:
        """The task that is attempted."""
        return self.request.task

    @property
    def instance(self) -> dict[str, JsonValue]:
        """The data of the task."""
        return self.request.task.instance


class Environment(ABC):
    """How tasks of one kind are set up, run and scored."""

    spec: EnvironmentSpec

    def findings(self) -> list[str]:
        """Return what is wrong with the environment itself, as far as that can be told without running it."""
        return []

    def warnings(self) -> list[str]:
        """Return what is not wrong but has no effect."""
        return []

    def check(self, instance: dict[str, JsonValue]) -> None:
        """Refuse an instance that this environment cannot use, before it is accepted.

        Raises InvalidFieldError with paths that start at `instance`. Must be quick: it runs on the event
        loop.
        """
        _ = instance  # a working default: everything is accepted

    async def init(self, episode: Episode) -> None:  # noqa: B027 - a working default: nothing to prepare
        """Prepare the sandbox for the agent."""

    def tool_definitions(self) -> list[ToolSpec]:
        """What the policy is told of its tools, in the OpenAI function format; fixed for all of its turns."""
        return []

    @abstractmethod
    async def run(self, episode: Episode) -> StopReason:
        """Let the agent work; returns why it stopped and leaves its answer in `episode.answer`."""

    async def execute(self, episode: Episode) -> None:  # noqa: B027 - a working default: nothing is run
        """Run what the agent left, where its specification asks for that, and keep what came out as data.

        The sandbox is a fresh one with the artifacts, and another takes its place for `evaluate`; or the agent's own,
        whose processes are ended before `evaluate`. What fails here is the agent's doing, so it must not raise for it.
        """

    @abstractmethod
    async def evaluate(self, episode: Episode) -> Score:
        """Score the outcome."""

    def dataset(self) -> list[dict[str, JsonValue]]:
        """The instances that ship with the environment, for demos and checks."""
        return []
