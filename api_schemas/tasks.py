"""Tasks for agents, and the limits of a rollout."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from api_schemas.base import Count, Name, Number, Seconds, WireModel


class Task(WireModel):
    """An environment's name and an instance: the data of one problem."""

    environment: Name
    instance: dict[str, JsonValue] = {}


class Limits(WireModel):
    """The limits of a rollout; a field that is left out takes the environment's value.

    The seconds of the stages are deadlines: a rollout that misses one fails, and keeps its partial trajectory.
    `agent_seconds` is the agent's own budget: an agent that exceeds it is stopped, and its work is scored.
    """

    max_turns: Annotated[int, Number] | None = Field(None, ge=1, le=10_000)
    """The most turns of the policy."""
    max_tokens: Count | None = None
    """The most sampled tokens over all turns."""
    max_turn_tokens: Count | None = None
    """The most sampled tokens in one turn."""
    agent_seconds: Seconds | None = None
    """The wall-clock budget of the agent."""
    tool_seconds: Seconds | None = None
    """The wall-clock limit of one tool call."""
    init_seconds: Seconds | None = None
    """The deadline of the stage `init`."""
    rollout_seconds: Seconds | None = None
    """The deadline of the stage `rollout`."""
    evaluate_seconds: Seconds | None = None
    """The deadline of the stage `evaluate`."""
