"""Tasks: what an agent is asked to do, and the limits within which it is done."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from api_schemas.base import Count, Name, Number, Seconds, WireModel


class Task(WireModel):
    """An environment's name and an instance: the data of one problem."""

    environment: Name
    instance: dict[str, JsonValue] = {}


class Limits(WireModel):
    """How far a rollout may go; a field that is left out takes the environment's value.

    The stages' seconds are deadlines of the service: crossing one fails the rollout and keeps its partial
    trajectory. `agent_seconds` is the agent's own budget: crossing it ends the agent, and its work is scored.
    """

    max_turns: Annotated[int, Number] | None = Field(None, ge=1, le=10_000)
    """Turns of the policy."""
    max_tokens: Count | None = None
    """Sampled tokens over all turns."""
    max_turn_tokens: Count | None = None
    """Sampled tokens in one turn."""
    agent_seconds: Seconds | None = None
    """Wall clock of the agent."""
    tool_seconds: Seconds | None = None
    """Wall clock of one tool call."""
    init_seconds: Seconds | None = None
    rollout_seconds: Seconds | None = None
    evaluate_seconds: Seconds | None = None
