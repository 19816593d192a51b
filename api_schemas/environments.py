"""Environments as the service shows them."""

from __future__ import annotations

from typing import Literal

from api_schemas.base import StrEnum, WireModel


class EvaluationSandbox(StrEnum):
    """Where an outcome is scored."""

    NONE = "none"
    """Without a sandbox; the agent's is released when the agent ends."""
    SAME = "same"
    """In the agent's own sandbox."""
    FRESH = "fresh"
    """In a new sandbox that receives only the paths in `artifacts`."""


class EnvironmentLimits(WireModel):
    """The limits of an environment's rollouts, unless a request overrides them."""

    max_turns: int
    max_tokens: int
    """Sampled tokens over all turns."""
    max_turn_tokens: int
    """Sampled tokens in one turn."""
    max_malformed: int
    """Consecutive turns whose tool calls are all malformed before the agent is stopped."""
    agent_seconds: float
    tool_seconds: float
    tool_output_chars: int
    """A longer tool result is cut in the middle, with a note."""
    init_seconds: float
    rollout_seconds: float
    evaluate_seconds: float


class EnvironmentSandbox(WireModel):
    """The resources that an environment's sandbox may use."""

    network: Literal["none", "full"] | list[str]
    """A list names the reachable hosts."""
    memory: str
    """Bytes, or with a suffix K, M, G or T (powers of 1024)."""
    max_processes: int
    cpus: float | None
    """Processors' worth of time; null sets no limit."""
    disk: str | None
    """The bytes that may be written, in the form of `memory`; null is the provider's default."""
    lifetime: float | None
    """Seconds after which the sandbox ends; null is as long as its rollout."""
    env: dict[str, str]
    """Environment variables."""


class EnvironmentView(WireModel):
    """An environment that tasks can name."""

    name: str
    description: str
    image: str | None
    """The sandbox image: a name, a path or a reference; null if the agent needs no sandbox."""
    system: str | None
    """The system prompt, a template over the task's instance."""
    prompt: str
    """The first user message, a template over the task's instance."""
    tools: list[str]
    """Names of the built-in tools available to the agent."""
    limits: EnvironmentLimits
    sandbox: EnvironmentSandbox
    evaluate_in: EvaluationSandbox
    artifacts: list[str]
    """Absolute paths that are copied from the agent's sandbox into a fresh one for the evaluation."""
    artifacts_size: str
    """The limit for all artifacts together, in the form of `memory`."""
    runs_submission: bool
    """Whether the agent's program is executed before the evaluation, in a sandbox that holds nothing of the grader."""
