"""From a task's `task.toml` to the description of an environment."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from rollout_service.agents.harnesses.preset import HarnessSettings
from rollout_service.agents.mcp.settings import McpSettings
from rollout_service.base.errors import ConfigurationError
from rollout_service.environments.contract import EnvironmentSpec, EvaluateIn, SandboxSettings
from rollout_service.environments.harbor import FILE_NAME, compose
from rollout_service.environments.harbor.task_folder import HarborTask, artifact_paths
from rollout_service.environments.harbor.task_toml import (
    EnvironmentTable,
    HealthcheckTable,
    McpServerTable,
    NetworkKeys,
)
from rollout_service.episodes import EpisodeLimits
from rollout_service.settings.pipeline import HarborSettings

TOOLS = ["bash", "read", "write", "edit", "finish"]
LOGS = "/logs/artifacts"
DEFAULT_AGENT_SECONDS = 900.0
GRACE_SECONDS = 120.0
"""Beyond a task's limits: for the sandbox, files, and the last turn."""
MAX_TURNS = 100
MAX_TOKENS = 131_072
MAX_PROCESSES = 1024


def spec_of(task: HarborTask, name: str, settings: HarborSettings) -> EnvironmentSpec:
    """Describe a task's environment; `name` is its name in tasks.

    Raises:
        ConfigurationError: A value cannot be had here; the message has its path.
    """
    toml, where = task.toml, task.folder / FILE_NAME
    unset = [
        *compose.missing(toml.environment.env, "environment.env", settings.variables),
        *compose.missing(toml.verifier.env, "verifier.env", settings.variables),
        *(
            problem
            for number, step in enumerate(toml.steps)
            if step.verifier is not None
            for problem in compose.missing(step.verifier.env, f"steps.{number}.verifier.env", settings.variables)
        ),
    ]
    if unset:
        raise ConfigurationError("\n".join(f"{where}: {problem}" for problem in unset))
    fresh = toml.verifier.is_separate or len(task.steps) > 1 or settings.shared_verifier == "fresh"
    agents = _network(toml.environment, settings) if toml.agent.network_mode is None else _network(toml.agent, settings)
    sandbox = _sandbox(f"{where}: environment", toml.environment, agents, settings)
    if task.compose is not None:
        sandbox = sandbox.model_copy(update={"env": {**sandbox.env, **task.compose.environment}})
    return EnvironmentSpec(
        name=name,
        description=toml.task.description,
        image=task.image,
        tools=TOOLS if settings.harness is None else [],
        harness=None if settings.harness is None else HarnessSettings(name=settings.harness),
        limits=_limits(task),
        sandbox=sandbox,
        mcp=_servers(f"{where}: environment.mcp_servers", toml.environment.mcp_servers),
        evaluate_in=EvaluateIn.FRESH if fresh else EvaluateIn.SAME,
        artifacts=_artifacts(task, settings) if fresh else [],
        agent_processes="end" if fresh else settings.agent_processes,
        workdir=toml.environment.workdir or "",
        grader_image=task.verifier_image,
        grader_sandbox=_grader(task, settings) if fresh else None,
    )


def _servers(where: str, tables: Sequence[McpServerTable]) -> list[McpSettings]:
    found = []
    for number, table in enumerate(tables):
        command = [] if table.command is None else [table.command, *table.args]
        try:
            found.append(McpSettings(name=table.name, command=command, url=table.url, headers=table.headers))
        except ValidationError as error:
            item = error.errors(include_url=False)[0]
            path = ".".join([where, str(number), *map(str, item["loc"])])
            raise ConfigurationError(f"{path}: {item['msg'].removeprefix('Value error, ')}") from error
    return found


def _artifacts(task: HarborTask, settings: HarborSettings) -> list[str]:
    named = artifact_paths(task.toml)
    if task.toml.verifier.is_separate:
        return list(dict.fromkeys([*named, LOGS]))
    return list(dict.fromkeys([".", *named, *settings.artifacts, LOGS]))


def _limits(task: HarborTask) -> EpisodeLimits:
    seconds = [step.agent.timeout_sec or DEFAULT_AGENT_SECONDS for step in task.steps]
    verifying = [step.verifier.timeout_sec for step in task.steps]
    first, *later = [step.healthcheck for step in task.steps]
    return EpisodeLimits(
        max_turns=MAX_TURNS,
        max_tokens=MAX_TOKENS,
        agent_seconds=max(seconds),
        init_seconds=GRACE_SECONDS
        + _waits(task.toml.environment.healthcheck, first)
        + (task.compose.seconds if task.compose is not None else 0.0),
        rollout_seconds=sum(seconds) + GRACE_SECONDS * len(seconds) + _waits(*later),
        evaluate_seconds=sum(verifying) + GRACE_SECONDS * len(verifying),
    )


def _waits(*checks: HealthcheckTable | None) -> float:
    return sum(
        check.start_period_sec + check.retries * (check.timeout_sec + check.interval_sec)
        for check in checks
        if check is not None
    )


def _network(keys: NetworkKeys, settings: HarborSettings) -> str | tuple[str, ...]:
    if keys.network_mode == "no-network":
        return "none"
    if keys.network_mode == "allowlist":
        return keys.allowed_hosts
    public = settings.public_network
    return public if isinstance(public, str) else tuple(public)


def _grader(task: HarborTask, settings: HarborSettings) -> SandboxSettings:
    """Give the verifier its own resources and network, if it has any."""
    table, where = task.toml.environment, f"{task.folder / FILE_NAME}: environment"
    if task.toml.verifier.is_separate and task.toml.verifier.environment is not None:
        table, where = task.toml.verifier.environment, f"{task.folder / FILE_NAME}: verifier.environment"
    keys: NetworkKeys = table if task.toml.verifier.network_mode is None else task.toml.verifier
    return _sandbox(where, table, _network(keys, settings), settings)


def _sandbox(
    where: str, table: EnvironmentTable, network: str | tuple[str, ...], settings: HarborSettings
) -> SandboxSettings:
    given = {
        "network": network,
        "memory": None if table.memory_mb is None else f"{table.memory_mb}M",
        "disk": None if table.storage_mb is None else f"{table.storage_mb}M",
        "cpus": table.cpus,
        "max_processes": MAX_PROCESSES,
        "env": compose.resolve(table.env, settings.variables),
    }
    try:
        return SandboxSettings.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigurationError(f"{where}.allowed_hosts: {problem}") from error
