"""Tasks: what an agent is asked to do, and the limits within which it is done."""

from __future__ import annotations

from pydantic import Field, JsonValue

from api_schemas.base import Name, WireModel


class Task(WireModel):
    """An environment's name and an instance: the data of one problem."""

    environment: Name
    instance: dict[str, JsonValue] = {}


class Limits(WireModel):
    """How far a rollout may go; a field that is left out takes the environment's value.

    The stages' seconds are deadlines of the service: crossing one fails the rollout and keeps its partial
    trajectory. `agent_seconds` is the agent's own budget: crossing it ends the agent, and its work is scored.
    """

    max_turns: int | None = Field(None, ge=1, le=10_000)
    """Turns of the policy."""
    max_tokens: int | None = Field(None, ge=1)
    """Sampled tokens over all turns."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Sampled tokens in one turn."""
    agent_seconds: float | None = Field(None, gt=0)
    """Wall clock of the agent."""
    tool_seconds: float | None = Field(None, gt=0)
    """Wall clock of one tool call."""
    init_seconds: float | None = Field(None, gt=0)
    rollout_seconds: float | None = Field(None, gt=0)
    evaluate_seconds: float | None = Field(None, gt=0)
