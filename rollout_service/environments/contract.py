"""The contract of an environment: how a task is set up, what the agent may do, how the outcome is scored.

Guarantees of the pipeline:
- Each of `init`, `run` and `evaluate` runs under its stage's deadline, and may be cancelled at any await.
- `evaluate` may be called again after a failure that may pass.
- The sandbox in `Episode` is alive and belongs to this rollout alone. The pipeline releases it, never the environment.
- Anything that `evaluate` must keep from the agent stays out of the sandbox until the agent has ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    field_serializer,
    field_validator,
    model_validator,
)

from api_schemas.base import Name
from api_schemas.rollouts import RolloutRequest, StopReason
from rollout_service.agents.harnesses.preset import HarnessSettings
from rollout_service.agents.mcp.settings import McpSettings
from rollout_service.agents.parallel.settings import ParallelSettings
from rollout_service.agents.web.search import SearchSettings
from rollout_service.base.errors import ENVIRONMENT_PACKAGES, EnvironmentFailedError
from rollout_service.environments.dataset_files import ShippedTasks
from rollout_service.episodes import Episode, EpisodeLimits, Policy, Score
from rollout_service.tokens import ToolSpec
from sandboxes import SandboxConfigError, SessionName
from sandboxes.egress.rules import AllowList


class EnvironmentSettings(BaseModel):
    """A part of an environment's settings; unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SecretSource(EnvironmentSettings):
    """Where the service's host has a secret; the operator allows it in the settings (`[secrets]`)."""

    variable: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """A variable of the service."""
    file: str | None = Field(None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """The name of a file in the operator's folder of secrets."""

    @model_validator(mode="before")
    @classmethod
    def _is_a_table(cls, source: Any) -> Any:
        if isinstance(source, str):
            raise ValueError(  # noqa: TRY004 - pydantic passes no TypeError on
                'name where the host has it: { variable = "NAME" } or { file = "NAME" }'
            )
        return source

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.variable is None) is (self.file is None):
            raise ValueError("give either `variable` or `file`")
        return self

    def __str__(self) -> str:
        return f"variable {self.variable}" if self.variable else f"file {self.file}"


Secrets = dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], SecretSource]
"""By the variables that commands find them in."""

Size = Annotated[str, Field(pattern=r"^\d{1,18}(\.\d{1,18})?[KMGT]?$")]


class SandboxSettings(EnvironmentSettings):
    """The resources that an environment's sandbox may use."""

    network: Literal["none", "full"] | tuple[str, ...] = "none"
    """A list names the reachable hosts: HOST, *.HOST or an address, each optionally with :PORT."""
    memory: Size = "2G"
    """Bytes, or with a suffix K, M, G or T (powers of 1024)."""
    max_processes: int = Field(256, ge=1)
    cpus: float | None = Field(None, gt=0)
    """Processors' worth of time; None sets no limit, so the sandbox uses whatever others leave."""
    disk: Size | None = None
    """The bytes that may be written, in the form of `memory`; None is the provider's default."""
    lifetime: float | None = Field(None, gt=0)
    """Seconds after which the sandbox ends, whatever it is doing; None: it lives as long as its rollout."""
    pause: bool = True
    """Whether the sandbox may be paused, with all programs in the background, while the built-in agent waits long for
    the engine (`[sandboxes] pause_seconds` of the settings). One with an agent or a server of its own never is."""
    env: dict[str, str] = {}
    """Variables of every process; anyone who may read the API sees them."""
    secrets: Secrets = Field({}, exclude=True)
    """Variables of every process, the agent's too, with values that are shown nowhere."""
    requires: tuple[Name, ...] = ()
    """The labels that a node must have, such as `large-disk`; see `[cluster] labels` of the settings."""

    @field_validator("network", mode="before")
    @classmethod
    def _network_is_known(cls, network: Any) -> Any:
        """Report one error instead of one for each form."""
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
        return parse_size(self.memory)

    @property
    def disk_bytes(self) -> int | None:
        return None if self.disk is None else parse_size(self.disk)


DEFAULT_DISK_BYTES = 1 << 30
"""The default of every provider, unless its settings say otherwise."""


def parse_size(size: str) -> int:
    number, suffix = size.rstrip("KMGT"), size[-1]
    return int(float(number) * 1024 ** ("KMGT".find(suffix) + 1))


class EvaluateIn(StrEnum):
    NONE = "none"
    """Without a sandbox; the agent's is released when the agent ends."""
    SAME = "same"
    """In the agent's own sandbox."""
    FRESH = "fresh"
    """In a new sandbox that receives only the paths in `artifacts`."""


AgentProcesses = Literal["end", "keep"]
"""Whether processes that outlive the agent are ended or kept when it is graded in its own sandbox."""

Replayable = Literal["answer", "tools", "never"]
"""How a finished rollout can be scored again; see `Environment.replayable`."""

SESSIONS: frozenset[SessionName] = frozenset(get_args(SessionName))
"""Each is used by the built-in tool of the same name."""


class RecordedPolicies(Protocol):
    """Policies that were sampled before, such as those of served sessions."""

    async def open(self, request: RolloutRequest) -> Policy:
        """Return the same policy whenever a rollout is attempted again."""
        ...


class EnvironmentSpec(EnvironmentSettings):
    """The description of an environment, as `GET /v1/environments` shows it."""

    name: Name
    description: str = ""
    image: str | None = None
    """The sandbox image: a name, a path or a reference; None if the agent needs no sandbox."""
    system: str | None = None
    """The system prompt, a sandboxed Jinja2 template over the task's instance."""
    prompt: str = "{{ instance.question }}"
    """The first user message, a sandboxed Jinja2 template over the task's instance."""
    tools: list[str] = []
    """Names of the built-in tools available to the agent."""
    harness: Annotated[HarnessSettings | None, Field(exclude_if=lambda harness: harness is None)] = None
    """The program that is the agent instead of the built-in one; its name, where the environment is shown."""
    mcp: Annotated[list[McpSettings], Field(exclude_if=lambda servers: not servers)] = []
    """The MCP servers whose tools the built-in agent has too; their names, where the environment is shown."""
    search: Annotated[SearchSettings | None, Field(exclude_if=lambda search: search is None)] = None
    """The service behind the tool `search`; its host, where the environment is shown."""
    parallel: Annotated[ParallelSettings | None, Field(exclude_if=lambda parallel: parallel is None)] = None
    """How the agent may hand on work to sub-agents; None if it has none."""
    limits: EpisodeLimits = EpisodeLimits()
    sandbox: SandboxSettings = SandboxSettings()
    evaluate_in: EvaluateIn = EvaluateIn.NONE
    artifacts: list[str] = []
    """Absolute paths that are copied from the agent's sandbox into a fresh one for the evaluation; `.` is the working
    folder."""
    artifacts_size: Size = "256M"
    """The limit for all artifacts together, in the form of `memory`, capped at half of the sandbox's memory and disk.
    An agent that leaves more counts as having left nothing."""
    agent_processes: Annotated[AgentProcesses, Field(exclude_if=lambda kept: kept == "end")] = "end"
    """Whether processes that outlive the agent are ended before grading, or kept for a grader that needs them, such as
    a server that it calls. Kept processes can forge the reward; only where `evaluate_in` is `same`."""
    runs_submission: bool = False
    """Whether `Environment.execute` is called before `evaluate`, in a sandbox that holds nothing of the grader."""
    workdir: str = Field("", exclude=True)
    """The working folder, an absolute path; "" is the image's own."""
    grader_image: str | None = Field(None, exclude=True)
    """The image of the fresh sandbox that scores the outcome; None is the agent's."""
    grader_sandbox: SandboxSettings | None = Field(None, exclude=True)
    """The resources of the fresh sandbox that scores the outcome; None are the agent's."""
    init_secrets: Secrets = Field({}, exclude=True)
    """The secrets in `Episode.secrets` during `init`. Whatever `init` leaves running is ended."""
    evaluate_secrets: Secrets = Field({}, exclude=True)
    """The secrets in `Episode.secrets` during `evaluate` and `evaluate_checkpoint`; not in the agent's own sandbox."""
    binds: dict[str, str] = Field({}, exclude=True)
    """Files and folders of the host that the sandbox can read, by their path inside it."""

    @model_validator(mode="after")
    def _kept_processes_are_in_the_sandbox(self) -> Self:
        if self.agent_processes == "keep" and (self.evaluate_in is not EvaluateIn.SAME or self.runs_submission):
            raise ValueError(
                "kept processes need the agent's own sandbox, and no program of the agent that runs before the grader"
            )
        return self

    @model_validator(mode="after")
    def _secrets_are_kept_from_the_agent(self) -> Self:
        if self.evaluate_secrets and self.evaluate_in is EvaluateIn.SAME:
            raise ValueError("secrets of the evaluation need a fresh sandbox: the agent's programs could read them")
        return self

    @field_serializer("mcp")
    def _mcp_as_shown(self, servers: list[McpSettings]) -> list[str]:
        return [server.name for server in servers]

    @field_serializer("search")
    def _search_as_shown(self, search: SearchSettings | None) -> str | None:
        return None if search is None else search.host

    @field_serializer("harness")
    def _harness_as_shown(self, harness: HarnessSettings | None) -> str | None:
        return None if harness is None else harness.name

    @property
    def artifacts_bytes(self) -> int:
        """Capped so that the grader's sandbox has room for the grader too."""
        grader = self.for_grader().sandbox
        room = [grader.memory_bytes, grader.disk_bytes or DEFAULT_DISK_BYTES]
        return min(parse_size(self.artifacts_size), min(room) // 2)

    def for_grader(self) -> EnvironmentSpec:
        if self.grader_image is None and self.grader_sandbox is None:
            return self
        own = {"image": self.grader_image or self.image, "sandbox": self.grader_sandbox or self.sandbox}
        return self.model_copy(update={**own, "grader_image": None, "grader_sandbox": None})

    @property
    def sessions(self) -> frozenset[SessionName]:
        """Opened before the agent begins."""
        return SESSIONS.intersection(self.tools)


class Environment(ABC):
    """How tasks of one kind are set up, run and scored."""

    spec: EnvironmentSpec
    replayable: Replayable = "tools"
    """How a finished rollout can be scored again. `answer`: `evaluate` looks at nothing but the task and the answer.
    `tools`: `init` and the recorded tool calls recreate the sandbox that it looks at. `never`: it looks at something
    that they do not recreate, such as a service elsewhere."""

    shares_setup: bool = False
    """Whether `prepare` does the same for all rollouts of an instance, and leaves only files: see `Sandbox.snapshot`
    for which. Its processes are ended."""

    init_leaves_files: bool = False
    """Whether the agent is the built-in one, and `init` and tools that are not built in leave nothing but files in the
    sandbox. An interrupted rollout may then go on in a copy of its sandbox, where neither runs again."""

    has_solution: bool = False
    """Whether `solve` can act as a perfect agent, for checks of the grading."""

    uses_gateway: bool = False
    """Whether the agent is a program of its own that drives the policy through `Episode.gateway`. `Policy.respond` is
    then not available."""

    shipped: ShippedTasks = ShippedTasks()
    """The instances of `dataset`, and findings on them."""
    recorded: RecordedPolicies | None = None
    """Where the policy of each rollout was recorded; None if it is sampled. `Policy.respond` is then not available."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let failures of a rollout name calls in the author's package."""
        super().__init_subclass__(**options)
        package = cls.__module__.partition(".")[0]
        if package != __name__.partition(".")[0]:
            ENVIRONMENT_PACKAGES.add(package)

    def findings(self) -> list[str]:
        """Return mistakes that can be found without running the environment."""
        return [*self.shipped.findings]

    def warnings(self) -> list[str]:
        """Return the settings that have no effect."""
        return []

    def check(self, instance: dict[str, JsonValue]) -> None:
        """Reject a task's instance that this environment cannot use, before the task is accepted.

        Must be quick: it runs on the event loop.

        Raises:
            InvalidFieldError: The instance cannot be used; the paths start at `instance`.
            ConfigurationError: A library that the environment needs is not installed.
        """
        _ = instance  # a working default: everything is accepted

    def for_instance(self, instance: dict[str, JsonValue]) -> Environment:
        """Return the environment of one task, if its image, limits or prompts depend on the instance.

        Every rollout uses the result of this for its task, after `check`. Must be quick, as `check`.

        Raises:
            InvalidFieldError: The instance cannot be used; the paths start at `instance`.
        """
        _ = instance  # a working default: all tasks have the same
        return self

    async def prepare(self, episode: Episode) -> None:  # noqa: B027 - a working default: nothing is shared
        """Prepare the files of the sandbox that all rollouts of the instance may share, before `init`.

        With `shares_setup`, a node runs this for one of its rollouts, and the others start from the files that it left,
        with copies of `episode.state`. Its processes are ended. It must not use the policy.
        """

    async def init(self, episode: Episode) -> None:  # noqa: B027 - a working default: nothing to prepare
        """Prepare the sandbox for the agent, in every rollout."""

    async def set_up(self, episode: Episode, *, is_prepared: bool = False) -> None:
        """Run `prepare`, unless the sandbox started from its files, then `init`.

        Where setups are not shared, the processes that `prepare` left are ended all the same; no session may be open.
        """
        if not is_prepared:
            await self.prepare(episode)
            if self.shares_setup and episode.sandbox is not None:
                await episode.sandbox.end_processes()
        await self.init(episode)

    def tool_definitions(self) -> list[ToolSpec]:
        """Return the policy's tools in the OpenAI function format, the same for all turns."""
        return []

    @abstractmethod
    async def run(self, episode: Episode) -> StopReason:
        """Run the agent, put its answer in `episode.answer`, and return why it stopped."""

    async def solve(self, episode: Episode) -> StopReason:  # noqa: ARG002 - for environments that have one
        """Act as a perfect agent, in place of `run`; only if `has_solution`.

        Raises:
            EnvironmentFailedError: The task has no solution, or its solution failed.
        """
        raise EnvironmentFailedError(f"the environment {self.spec.name!r} brings no solution of its tasks")

    async def evaluate_checkpoint(self, episode: Episode, number: int) -> bool:  # noqa: ARG002 - a default
        """Score the artifacts of a checkpoint; return whether those after it matter.

        Called in order, before `evaluate`, for each `Episode.checkpoint` that `run` made; `number` counts from 0. Each
        has a fresh sandbox with the artifacts of that moment. Keep the outcome in `episode.state`.
        """
        return False

    def dockerfiles(self) -> dict[str, Path]:
        """Return Dockerfiles of images that tasks need, by the images' names."""
        return {}

    async def execute(self, episode: Episode) -> None:  # noqa: B027 - a working default: nothing is run
        """Run the agent's program, if `spec.runs_submission`, and keep its output as data in `episode.state`.

        The sandbox is a fresh one with the artifacts, replaced by another for `evaluate`; or the agent's own, whose
        processes are ended before `evaluate`. Don't raise for a program that fails.
        """

    def private_texts(self) -> dict[str, str]:
        """Return texts of files, by name, that the agent must not see, whatever the instance."""
        return {}

    @abstractmethod
    async def evaluate(self, episode: Episode) -> Score: ...

    def dataset(self) -> list[dict[str, JsonValue]]:
        """Return instances that ship with the environment, for demos and checks.

        Raises:
            ConfigurationError: A library that the environment needs is not installed.
        """
        return [dict(instance) for instance in self.shipped.instances]
