"""An environment with the built-in agent; a subclass only has to score the outcome."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.agents.tool_calling.agent import ToolCallingAgent
from rollout_service.agents.tool_calling.builtin_tools import NEEDS_SANDBOX, builtin_tools
from rollout_service.agents.tool_calling.tools import Tool
from rollout_service.environments.contract import Environment, EnvironmentSpec, EvaluateIn
from rollout_service.environments.templates import PromptTemplate
from rollout_service.episodes import Episode
from rollout_service.errors import ConfigurationError
from rollout_service.tokens import ToolSpec
from sandboxes.errors import LimitExceededError, SandboxClosedError

WHOLE_SYSTEM = frozenset({"/", "/etc"})
PROGRAMS = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr", "/proc", "/sys", "/dev", "/run"),
    *("/environment", "/.singularity.d", "/etc/ld.so.preload", "/etc/ld.so.cache", "/etc/ld.so.conf"),
    *("/etc/ld.so.conf.d", "/etc/profile", "/etc/profile.d", "/etc/bash.bashrc", "/etc/environment"),
)
"""A system's programs, and the files that change how they start: never copied from an agent's sandbox."""


class AgentEnvironment(Environment):
    """Renders the prompts of its spec over the instance and runs the built-in agent."""

    def __init__(self, spec: EnvironmentSpec, *, extra_tools: Sequence[Tool] = ()) -> None:
        """Take the spec, and `extra_tools` in addition to the built-in tools that it names.

        Raises:
            ConfigurationError: The spec contradicts itself.
        """
        self.spec = spec
        _check_spec(spec)
        if self.replayable == "answer" and spec.evaluate_in is not EvaluateIn.NONE:
            raise ConfigurationError(
                f"environment {spec.name!r} declares `replayable` as 'answer', and is scored in a sandbox",
                hint="Declare 'tools': the recorded tool calls then recreate what the evaluation looks at.",
            )
        self._prompt = PromptTemplate(spec.prompt, where=f"the prompt of {spec.name!r}")
        self._system = (
            PromptTemplate(spec.system, where=f"the system prompt of {spec.name!r}") if spec.system else None
        )
        try:
            self._agent = ToolCallingAgent([*builtin_tools(spec.tools), *extra_tools])
        except (ValueError, ConfigurationError) as error:
            raise ConfigurationError(f"environment {spec.name!r}: {error}") from error

    def check(self, instance: dict[str, JsonValue]) -> None:
        """Reject an instance that lacks a field which the prompts use."""
        self.messages(instance)

    def messages(self, instance: dict[str, JsonValue]) -> list[Message]:
        """Return the messages that begin the conversation.

        Raises:
            InvalidFieldError: The instance lacks a field which the prompts use.
        """
        prompt = Message(role="user", content=self._prompt.render(instance))
        if self._system is None:
            return [prompt]
        return [Message(role="system", content=self._system.render(instance)), prompt]

    def tool_definitions(self) -> list[ToolSpec]:
        return self._agent.definitions

    async def run(self, episode: Episode) -> StopReason:
        try:
            return await self._agent.run(episode, self.messages(episode.instance))
        except (SandboxClosedError, LimitExceededError) as error:
            if isinstance(error, LimitExceededError) and error.limit != "lifetime":
                raise
            episode.notes.append(f"the agent's sandbox ended while the agent was at work: {error}")
            return StopReason.SANDBOX_ENDED


def _check_spec(spec: EnvironmentSpec) -> None:
    needing = sorted(NEEDS_SANDBOX.intersection(spec.tools))
    if spec.image is None and (needing or spec.evaluate_in is not EvaluateIn.NONE):
        what = f"the tools {', '.join(needing)}" if needing else f"evaluation in a {spec.evaluate_in} sandbox"
        raise ConfigurationError(
            f"environment {spec.name!r} has no image, and {what} needs a sandbox",
            hint="Name an image, such as image = 'base'.",
        )
    for path in spec.artifacts:
        _check_artifact(spec.name, path)


def _check_artifact(name: str, path: str) -> None:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not path.startswith("/") or ".." in parts:
        raise ConfigurationError(
            f"environment {name!r}: the artifact {path!r} is not an absolute path without '..'"
        )
    place = "/" + "/".join(parts)
    if place in WHOLE_SYSTEM or any(f"{place}/".startswith(f"{folder}/") for folder in PROGRAMS):
        raise ConfigurationError(
            f"environment {name!r}: the artifact {path!r} would copy the agent's programs and settings to the grader",
            hint="Name the folders that hold the agent's work, such as /workspace.",
        )
