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
    env: dict[str, str]
    """Environment variables."""
    requires: list[str] = []
    """The labels that a node must have to take its rollouts."""


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
    limits: EnvironmentLimits
    sandbox: EnvironmentSandbox
    evaluate_in: EvaluationSandbox
    artifacts: list[str]
    """The absolute paths that are copied from the agent's sandbox into a fresh one for the evaluation."""
    artifacts_size: str
    """The size limit of all artifacts together, in the format of `memory`."""
    runs_submission: bool
    """Whether the agent's program is executed before the evaluation, in a sandbox with none of the grader's files."""
