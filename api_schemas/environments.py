"""Environments as the service describes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from api_schemas.base import StrEnum, WireModel


class EvaluationSandbox(StrEnum):
    """Where an agent's outcome is scored."""

    NONE = "none"
    """Without a sandbox; the agent's own is released when the agent ends."""
    SAME = "same"
    """In the agent's own sandbox."""
    FRESH = "fresh"
    """In a new sandbox that receives only the paths in `artifacts`."""


class EnvironmentLimits(WireModel):
    """The limits of an environment's rollouts; a request can override them."""

    max_turns: int
    max_tokens: int
    """The most sampled tokens over all turns."""
    max_turn_tokens: int
    """The most sampled tokens in one turn."""
    max_malformed: int
    """Consecutive turns with only malformed tool calls after which the agent is stopped."""
    agent_seconds: float
    """The wall-clock budget of the agent."""
    tool_seconds: float
    """The wall-clock limit of one tool call."""
    tool_output_chars: int
    """The characters of a tool result; a longer one is cut in the middle, with a note."""
    init_seconds: float
    """The deadline of the stage `init`."""
    rollout_seconds: float
    """The deadline of the stage `rollout`."""
    evaluate_seconds: float
    """The deadline of the stage `evaluate`."""


class EnvironmentSandbox(WireModel):
    """The resources that an environment's sandbox may use."""

    network: Literal["none", "full"] | list[str]
    """`none`, `full`, or a list of the reachable hosts."""
    memory: str
    """A number of bytes, optionally with a suffix K, M, G or T (powers of 1024)."""
    max_processes: int
    cpus: float | None
    """CPU time in processors, such as 1.5; null sets no limit."""
    disk: str | None
    """The bytes that may be written, in the format of `memory`; null means the provider's default."""
    lifetime: float | None
    """The seconds after which the sandbox ends; null means that it lives as long as its rollout."""
    pause: bool = True
    """Whether it may be paused while its agent waits for the engine."""
    env: dict[str, str]
    """Environment variables."""
    requires: list[str] = []
    """The labels that a node must have to take its rollouts."""


class SubagentView(WireModel):
    """The pool that serves a sub-agent, and the sub-agent's limits."""

    pool: str
    """The frozen pool that serves it."""
    version: int | None
    """The version of the weights that the pool must serve; null takes any."""
    max_turns: int
    max_tool_calls: int
    max_tokens: int
    max_turn_tokens: int
    seconds: float
    temperature: float
    tools: list[str]
    sandbox: Literal["shared", "own"]
    """Where its tools run: in the agent's sandbox, or in one of its own."""
    sees_task: bool
    """Whether the task's own prompt precedes its assignment."""
    needs_tool_call: bool
    """Whether a result is valid only if it called a tool."""


class ParallelView(WireModel):
    """How widely and how deeply an agent may hand on work."""

    max_agents: int
    max_assigns_per_turn: int
    max_assigns: int
    max_width: int | None
    """The most sub-agents of one turn that run at the same time; null sets no limit."""
    max_depth: int
    max_critical_steps: int | None
    """The most steps that may follow each other; null sets no limit."""
    charge_direct_calls: bool
    """Whether a turn costs as many steps as it has calls of other tools."""
    result_chars: int
    subagent: SubagentView


class EnvironmentView(WireModel):
    """An environment that tasks can name."""

    name: str
    """The name that tasks give as `environment`."""
    description: str
    """A short text for people."""
    image: str | None
    """The sandbox image as a name, a path or a reference; null if the agent needs no sandbox."""
    system: str | None
    """The system prompt: a template that is filled in from the task's instance."""
    prompt: str
    """The first user message: a template that is filled in from the task's instance."""
    tools: list[str]
    """The names of the built-in tools available to the agent."""
    harness: Annotated[str | None, Field(exclude_if=lambda harness: harness is None)] = None
    """The program that is the agent; left out of JSON if it is the built-in one."""
    mcp: Annotated[list[str], Field(exclude_if=lambda servers: not servers)] = []
    """The names of the MCP servers whose tools the agent has too; left out of JSON if there are none."""
    search: Annotated[str | None, Field(exclude_if=lambda search: search is None)] = None
    """The host of the service behind the tool `search`; left out of JSON if there is none."""
    parallel: Annotated[ParallelView | None, Field(exclude_if=lambda parallel: parallel is None)] = None
    """How the agent may hand on work to sub-agents; left out of JSON if it has none."""
    limits: EnvironmentLimits
    sandbox: EnvironmentSandbox
    evaluate_in: EvaluationSandbox
    artifacts: list[str]
    """The absolute paths that are copied from the agent's sandbox into a fresh one for the evaluation."""
    artifacts_size: str
    """The size limit of all artifacts together, in the format of `memory`."""
    agent_processes: Annotated[Literal["end", "keep"], Field(exclude_if=lambda kept: kept == "end")] = "end"
    """Whether processes that outlive the agent are ended before grading, or kept; left out of JSON if ended."""
    runs_submission: bool
    """Whether the agent's program is executed before the evaluation, in a sandbox with none of the grader's files."""
