"""An environment with the built-in agent or with a harness; a subclass only has to score the outcome."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.agents.harnesses.agent import HarnessAgent
from rollout_service.agents.mcp.tools import open_servers
from rollout_service.agents.parallel.calls import ParallelAgent
from rollout_service.agents.tool_calling.agent import ToolCallingAgent
from rollout_service.agents.tool_calling.builtin_tools import NEEDS_SANDBOX, builtin_tools
from rollout_service.agents.tool_calling.tools import Tool
from rollout_service.agents.web.search import NAME as SEARCH
from rollout_service.agents.web.search import search_tool
from rollout_service.agents.web.tunnel import unreachable
from rollout_service.base.errors import ConfigurationError, InvalidFieldError
from rollout_service.base.templates import PromptTemplate
from rollout_service.environments.contract import Environment, EnvironmentSpec, EvaluateIn
from rollout_service.episodes import Episode
from rollout_service.tokens import ToolSpec
from sandboxes.errors import LimitExceededError, SandboxClosedError

RUNS_CODE = frozenset({"bash", "python"})
"""The tools with which an agent can end a server in its sandbox by itself."""
WORKDIR = "."
WHOLE_SYSTEM = frozenset({"/", "/etc"})
PROGRAMS = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr", "/proc", "/sys", "/dev", "/run"),
    *("/environment", "/.singularity.d", "/etc/ld.so.preload", "/etc/ld.so.cache", "/etc/ld.so.conf"),
    *("/etc/ld.so.conf.d", "/etc/profile", "/etc/profile.d", "/etc/bash.bashrc", "/etc/environment"),
)
"""Programs, and files that change how they start: never copied from an agent's sandbox."""


class AgentEnvironment(Environment):
    """Renders the prompts of its spec over the instance and runs the agent that it names.

    A spec that contradicts itself raises ConfigurationError.
    """

    def __init__(
        self, spec: EnvironmentSpec, *, extra_tools: Sequence[Tool] = (), subagent_tools: Sequence[Tool] = ()
    ) -> None:
        """The tools of `spec` come first."""
        self.spec = spec
        _check_spec(spec)
        if self.replayable == "answer" and spec.evaluate_in is not EvaluateIn.NONE:
            raise ConfigurationError(
                f"environment {spec.name!r} declares `replayable` as 'answer', and is scored in a sandbox",
                hint="Declare 'tools': the recorded tool calls then recreate what the evaluation looks at.",
            )
        self._prompt = PromptTemplate(spec.prompt, where=f"the prompt of {spec.name!r}")
        self._system = PromptTemplate(spec.system, where=f"the system prompt of {spec.name!r}") if spec.system else None
        self._agent: ToolCallingAgent | ParallelAgent | HarnessAgent
        try:
            if spec.harness is not None:
                self._agent = HarnessAgent(spec.harness, spec.mcp)
            else:
                self._tools = [*_named_tools(spec), *extra_tools]
                self._subagent_tools = [*_subagent_tools(spec), *subagent_tools]
                self._agent = self._with_tools(self._tools)
        except (ValueError, ConfigurationError) as error:
            hint = error.hint if isinstance(error, ConfigurationError) else ""
            raise ConfigurationError(f"environment {spec.name!r}: {error}", hint=hint) from error
        self.uses_gateway = spec.harness is not None
        elsewhere = any(server.url is not None for server in spec.mcp) or spec.search is not None
        delegates_tools = spec.parallel is not None and self.replayable == "tools"
        if self.uses_gateway or elsewhere or delegates_tools:
            self.replayable = "never"  # what a program, a server or a sub-agent did is not recorded

    def check(self, instance: dict[str, JsonValue]) -> None:
        """Reject an instance that lacks a field of the prompts, or whose prompt is empty or cannot be taken."""
        messages = self.messages(instance)
        if not any(message.content.strip() for message in messages if message.role == "user"):
            raise InvalidFieldError.at(
                "instance",
                f"makes the prompt of {self.spec.name!r} empty",
                hint="Give the fields that the prompt uses a text.",
            )
        if isinstance(self._agent, HarnessAgent):
            self._agent.check(messages)

    async def init(self, episode: Episode) -> None:
        if isinstance(self._agent, HarnessAgent):
            await self._agent.prepare(episode)

    def messages(self, instance: dict[str, JsonValue]) -> list[Message]:
        """Return the messages that begin the conversation.

        Raises:
            InvalidFieldError: The instance lacks a field which the prompts use, or one that they write is null.
        """
        prompt = Message(role="user", content=self._prompt.render(instance))
        if self._system is None:
            return [prompt]
        return [Message(role="system", content=self._system.render(instance)), prompt]

    def tool_definitions(self) -> list[ToolSpec]:
        return self._agent.definitions

    async def run(self, episode: Episode) -> StopReason:
        try:
            return await self._run_agent(episode, self.messages(episode.instance))
        except (SandboxClosedError, LimitExceededError) as error:
            if isinstance(error, LimitExceededError) and error.limit != "lifetime":
                raise
            episode.notes.append(f"the agent's sandbox ended while the agent was at work: {error}")
            return StopReason.SANDBOX_ENDED

    async def _run_agent(self, episode: Episode, messages: list[Message]) -> StopReason:
        if not self.spec.mcp or isinstance(self._agent, HarnessAgent):
            return await self._agent.run(episode, messages)
        parallel = self.spec.parallel
        beside = parallel.subagent.tools if parallel is not None and parallel.subagent.sandbox == "shared" else []
        runs_code = bool(RUNS_CODE.intersection([*self.spec.tools, *beside]))
        async with open_servers(self.spec.mcp, episode.require_sandbox(), agent_runs_code=runs_code) as tools:
            agent = self._with_tools([*self._tools, *tools])
            episode.policy.offer(agent.definitions)
            return await agent.run(episode, messages)

    def _with_tools(self, tools: Sequence[Tool]) -> ToolCallingAgent | ParallelAgent:
        if self.spec.parallel is None:
            return ToolCallingAgent(tools)
        return ParallelAgent(self.spec.parallel, tools, self._subagent_tools)


def _subagent_tools(spec: EnvironmentSpec) -> list[Tool]:
    return [] if spec.parallel is None else builtin_tools(spec.parallel.subagent.tools)


def _named_tools(spec: EnvironmentSpec) -> list[Tool]:
    if spec.search is None:
        return builtin_tools(spec.tools)
    found = search_tool(spec.search)
    return [found if name == found.name else builtin_tools([name])[0] for name in spec.tools]


def _check_spec(spec: EnvironmentSpec) -> None:
    needing = sorted(NEEDS_SANDBOX.intersection(spec.tools))
    if spec.image is None and (needing or spec.evaluate_in is not EvaluateIn.NONE):
        what = f"the tools {', '.join(needing)}" if needing else f"evaluation in a {spec.evaluate_in} sandbox"
        raise ConfigurationError(
            f"environment {spec.name!r} has no image, and {what} needs a sandbox",
            hint="Name an image, such as image = 'base'.",
        )
    _check_parallel(spec)
    if spec.harness is not None and (spec.tools or spec.system is not None or spec.image is None):
        what = "tools" if spec.tools else "a system prompt" if spec.system is not None else "no image"
        raise ConfigurationError(
            f"environment {spec.name!r} has {what} and the harness {spec.harness.name!r}",
            hint="A harness brings its own tools and its own system prompt, and runs in a sandbox.",
        )
    _check_mcp(spec)
    _check_search(spec)
    for path in spec.artifacts:
        if path != WORKDIR:
            check_artifact(spec.name, path)


def _check_parallel(spec: EnvironmentSpec) -> None:
    if (parallel := spec.parallel) is None:
        return
    where = f"environment {spec.name!r}: [parallel]"
    if spec.harness is not None:
        raise ConfigurationError(
            f"{where} is for the built-in agent, and the agent is the harness {spec.harness.name!r}",
            hint="Remove one of the two: a harness has sub-agents of its own.",
        )
    needing = sorted(NEEDS_SANDBOX.intersection(parallel.subagent.tools))
    if spec.image is None and (needing or parallel.subagent.sandbox == "own"):
        raise ConfigurationError(
            f"{where}: its sub-agents need a sandbox, and there is no image",
            hint="Name an image, such as image = 'base'.",
        )


def _check_mcp(spec: EnvironmentSpec) -> None:
    where = f"environment {spec.name!r}: [[mcp]]"
    if spec.mcp and spec.image is None:
        raise ConfigurationError(f"{where} needs a sandbox", hint="Name an image, such as image = 'base'.")
    names = [server.name for server in spec.mcp]
    for server in spec.mcp:
        if names.count(server.name) > 1:
            raise ConfigurationError(f"{where}: two servers are named {server.name!r}", hint="Rename one.")
        if server.url is not None and (why := unreachable(server.url, spec.sandbox.network)):
            raise ConfigurationError(
                f"{where}: the server {server.name!r} cannot be reached: {why}",
                hint='Add its host to `network` of `[sandbox]`, such as network = ["mcp.example.com"].',
            )


def _check_search(spec: EnvironmentSpec) -> None:
    named = SEARCH in spec.tools
    if named is (spec.search is not None):
        return
    what = "the tool `search` and no [search]" if named else "[search], and `tools` does not name `search`"
    raise ConfigurationError(
        f"environment {spec.name!r} has {what}",
        hint='Give both: "search" in `tools`, and a table [search] with the `url` of a search service.',
    )


def check_artifact(name: str, path: str) -> None:
    """Check that a path may be copied from an agent's sandbox to its grader's.

    Raises:
        ConfigurationError: It is not absolute, or it holds programs or settings of the system.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not path.startswith("/") or ".." in parts:
        raise ConfigurationError(
            f"environment {name!r}: the artifact {path!r} is not an absolute path without '..'",
            hint='Name a folder as the agent sees it, such as "/workspace"; "." is the working folder.',
        )
    place = "/" + "/".join(parts)
    if place in WHOLE_SYSTEM or any(f"{place}/".startswith(f"{folder}/") for folder in PROGRAMS):
        raise ConfigurationError(
            f"environment {name!r}: the artifact {path!r} would copy the agent's programs and settings to the grader",
            hint="Name the folders that hold the agent's work, such as /workspace.",
        )
