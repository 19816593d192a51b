"""The keys of a task's `task.toml` in Harbor's format, and how the file is read.

Guarantees: an unknown key is rejected with its path and the nearest known key; old spellings still work; nothing of the
host is looked up.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rollout_service.base.errors import ConfigurationError
from rollout_service.base.validation import describe_problems
from rollout_service.environments.contract import parse_size
from rollout_service.environments.declarative.declaration import parse_toml

STEP_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
SIZE = r"^\d{1,15}(\.\d{1,15})?[KMGT]$"
MIB = 1024 * 1024
MOST_MIB = 1 << 40
MOST_RETRIES = 100_000


class TaskSection(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_by_name=True,
        validate_by_alias=True,
        allow_inf_nan=False,
    )


class NetworkKeys(TaskSection):
    """The keys with which several tables choose a network."""

    network_mode: Literal["no-network", "public", "allowlist"] | None = None
    allowed_hosts: tuple[str, ...] = ()
    """Names, `*.NAME`, or addresses."""

    @model_validator(mode="after")
    def _hosts_belong_to_a_list(self) -> NetworkKeys:
        if bool(self.allowed_hosts) != (self.network_mode == "allowlist"):
            raise ValueError('`allowed_hosts` and network_mode = "allowlist" need each other')
        return self


class AgentTable(NetworkKeys):
    """`[agent]`."""

    timeout_sec: float | None = Field(None, gt=0)
    user: str | int | None = None


class HealthcheckTable(TaskSection):
    """`[environment.healthcheck]`: a command that succeeds once the sandbox can be used."""

    command: str = Field(min_length=1)
    interval_sec: float = Field(5.0, ge=0)
    timeout_sec: float = Field(30.0, gt=0)
    start_period_sec: float = Field(0.0, ge=0)
    start_interval_sec: float = Field(5.0, ge=0)
    retries: int = Field(3, ge=1, le=MOST_RETRIES)


class McpServerTable(TaskSection):
    """`[[environment.mcp_servers]]`: a server of the Model Context Protocol, whose tools the agent has."""

    name: str
    transport: Literal["stdio", "streamable-http", "sse"] = "sse"
    command: str | None = Field(None, min_length=1)
    args: tuple[str, ...] = ()
    url: str | None = None
    headers: dict[str, str] = {}

    @model_validator(mode="after")
    def _fits_its_transport(self) -> McpServerTable:
        if (self.command is not None) != (self.transport == "stdio") or (self.url is not None) == (
            self.transport == "stdio"
        ):
            raise ValueError('a server has `command` with transport = "stdio", and `url` with any other')
        return self


class EnvironmentTable(NetworkKeys):
    """`[environment]`, and `[verifier.environment]`."""

    build_timeout_sec: float = Field(600.0, gt=0)
    docker_image: str | None = Field(None, min_length=1)
    os: str = "linux"
    cpus: float | None = Field(None, gt=0)
    memory_mb: int | None = Field(None, ge=1, le=MOST_MIB)
    storage_mb: int | None = Field(None, ge=1, le=MOST_MIB)
    gpus: int = Field(0, ge=0)
    gpu_types: tuple[str, ...] | None = None
    tpu: Any = None
    env: dict[str, str] = {}
    mcp_servers: tuple[McpServerTable, ...] = ()
    skills_dir: str | None = None
    workdir: str | None = Field(None, pattern="^/")
    healthcheck: HealthcheckTable | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_old_keys(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        table = dict(table)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if old in table:
                _put(table, old, new, _mebibytes(old, table[old]))
        if "allow_internet" in table:
            allowed = table["allow_internet"]
            if not isinstance(allowed, bool):
                raise ValueError("`allow_internet` must be true or false")
            _put(table, "allow_internet", "network_mode", "public" if allowed else "no-network")
        return table


class CollectTable(TaskSection):
    """`[[verifier.collect]]`: a command in the agent's sandbox, after the agent and before a separate verifier."""

    command: str = Field(min_length=1)
    service: str | None = None
    timeout_sec: float = Field(60.0, gt=0)
    user: str | int | None = None


class VerifierTable(NetworkKeys):
    """`[verifier]`."""

    timeout_sec: float = Field(600.0, gt=0)
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: tuple[CollectTable, ...] = ()

    @property
    def is_separate(self) -> bool:
        return self.environment_mode == "separate" or (self.environment_mode is None and self.environment is not None)


class ArtifactTable(TaskSection):
    """An entry of `artifacts` that is more than a path."""

    source: str = Field(pattern="^/")
    destination: str | None = None
    exclude: tuple[str, ...] = ()
    service: str | None = None


class SolutionTable(TaskSection):
    """`[solution]`."""

    env: dict[str, str] = {}


class StepTable(TaskSection):
    """`[[steps]]`: one of several prompts to the same agent."""

    name: str = Field(pattern=STEP_NAME)
    agent: AgentTable = AgentTable()
    verifier: VerifierTable | None = None
    min_reward: float | dict[str, float] | None = None
    """The least reward, or the least value of each key, with which the task goes on."""
    healthcheck: HealthcheckTable | None = None
    artifacts: tuple[str | ArtifactTable, ...] = ()


class AboutTable(TaskSection):
    """`[task]`."""

    name: str | None = None
    version: str | None = None
    description: str = ""
    authors: tuple[Any, ...] = ()
    keywords: tuple[str, ...] = ()


class TaskToml(TaskSection):
    schema_version: str = Field("1.4", pattern=r"^1\.\d+$")
    source: str | None = None
    artifacts: tuple[str | ArtifactTable, ...] = ()
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"
    task: AboutTable = AboutTable()
    metadata: dict[str, Any] = {}
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    steps: tuple[StepTable, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _read_old_version(cls, table: Any) -> Any:
        if isinstance(table, dict) and "version" in table:
            table = dict(table)
            _put(table, "version", "schema_version", table["version"])
        return table

    @field_validator("steps")
    @classmethod
    def _names_differ(cls, steps: tuple[StepTable, ...]) -> tuple[StepTable, ...]:
        names = [step.name for step in steps]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two steps have the name {twice!r}")
        return steps


def read_task_toml(text: str, *, where: str) -> TaskToml:
    """
    Raises:
        ConfigurationError: The text is not valid; the message has a line for every key at fault, after `where`.
    """
    table = parse_toml(text, where=where)
    try:
        return TaskToml.model_validate(table)
    except ValidationError as error:
        lines = [f"{where}: {problem}" for problem in describe_problems(error, TaskToml)]
        raise ConfigurationError("\n".join(lines), hint="The keys are those of Harbor's task.toml.") from error


def _put(table: dict[str, Any], old: str, new: str, value: Any) -> None:
    del table[old]
    if new in table:
        raise ValueError(f"`{old}` is the old name of `{new}`: give one of them")
    table[new] = value


def _mebibytes(key: str, size: Any) -> int:
    if not isinstance(size, str) or not re.fullmatch(SIZE, size):
        raise ValueError(f'`{key}` must be a size such as "2G"')
    return max(1, parse_size(size) // MIB)
