"""The settings of an agent with sub-agents: `[parallel]` in `environment.toml`.

Limits that contradict each other are refused when the environment is loaded.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from api_schemas.base import Name
from api_schemas.inference import FROZEN_NAMES, is_frozen


class SubagentSettings(BaseModel):
    """`[parallel.subagent]`: the pool that serves a sub-agent, and its limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pool: Name = "frozen-1"
    """The pool whose engines serve it: a frozen one, whose name is `frozen` or begins with `frozen-`."""
    version: int | None = Field(None, ge=0)
    """The version of the weights that the pool must serve; None takes any, as long as it does not change."""
    max_turns: int = Field(8, ge=1)
    max_tool_calls: int = Field(10, ge=0)
    """Calls of its tools, over all turns."""
    max_tokens: int = Field(8_192, ge=1)
    """Sampled tokens, over all turns."""
    max_turn_tokens: int = Field(1_024, ge=1)
    seconds: float = Field(300.0, gt=0)
    """The time from its slot to its result; the wait for a slot does not count."""
    temperature: float = Field(1.0, ge=0)
    tools: list[str] = []
    """Names of the built-in tools available to it. At a depth below `max_depth`, it has the two of this module too."""
    sandbox: Literal["shared", "own"] = "shared"
    """Where its tools run: in the agent's sandbox, or in a new one of the same image, which ends with it."""
    sees_task: bool = False
    """Whether the task's own prompt precedes its assignment."""
    needs_tool_call: bool = True
    """Whether a result is valid only if it called a tool, so that guesses do not count."""

    @field_validator("pool")
    @classmethod
    def _pool_is_frozen(cls, pool: str) -> str:
        if not is_frozen(pool):
            raise ValueError(f"sub-agents need a frozen pool, whose name is {FROZEN_NAMES}")
        return pool


class ParallelSettings(BaseModel):
    """`[parallel]`: how widely and how deeply an agent may hand on work."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_agents: int = Field(8, ge=1)
    """Different sub-agents that one agent may create."""
    max_assigns_per_turn: int = Field(8, ge=1)
    """Assigned tasks of one turn; those beyond it are refused with a text."""
    max_assigns: int = Field(100, ge=1)
    """Assigned tasks of the whole tree."""
    max_width: int | None = Field(None, ge=1)
    """Sub-agents of one turn that run at the same time; more take several waves. None runs all at once."""
    max_depth: int = Field(1, ge=1, le=8)
    """1: sub-agents cannot hand on work; 2: they can, and theirs cannot; and so on."""
    max_critical_steps: int | None = Field(None, ge=2)
    """The most steps that may follow each other, counted with the waves; None sets no limit."""
    charge_direct_calls: bool = False
    """Whether a turn costs as many steps as it has calls of other tools, at least one; otherwise it costs one."""
    result_chars: int = Field(4_096, ge=64)
    """A longer result of a sub-agent is cut in the middle."""
    subagent: SubagentSettings = SubagentSettings()

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        if self.max_assigns < self.max_assigns_per_turn:
            raise ValueError("max_assigns may not be less than max_assigns_per_turn")
        if self.max_width is not None and self.max_width > self.max_assigns_per_turn:
            raise ValueError("max_width may not exceed max_assigns_per_turn")
        if self.subagent.sandbox == "own" and self.max_depth > 1:
            raise ValueError("sub-agents with a sandbox of their own cannot hand on work: max_depth must be 1")
        return self
