"""Agents outside: where a program that runs elsewhere reaches a rollout's policy, and how it reports its end."""

from __future__ import annotations

from pydantic import Field, model_validator
from typing_extensions import Self

from api_schemas.base import Count, Integer, Real, StrEnum, WireModel


class AgentKind(StrEnum):
    """Who works on a task."""

    ENVIRONMENT = "environment"
    """The agent of the task's environment."""
    EXTERNAL = "external"
    """A program of the caller's, which runs elsewhere and calls the policy through the gateway."""


class RolloutAccess(WireModel):
    """Where a program outside reaches the policy of a rollout. It ends with the agent, and with the attempt."""

    url: str
    """The address of the gateway, without a path. Its model APIs are below `/v1` and `/v1beta`."""
    key: str
    """The key that names the rollout, to be sent as clients of each API send theirs. It is a secret."""
    model: str
    """The name of the model."""
    attempt: Integer
    """The attempt that this access belongs to."""


class RolloutEnd(WireModel):
    """The report of a program outside that its agent has ended."""

    reward: Real | None = None
    """The score; if left out, the task's environment scores the outcome."""
    reward_parts: dict[str, Real] = {}
    """The parts of the score, if there is one."""
    answer: str | None = None
    """The agent's final answer, which the environment may score; if left out, the policy's last text."""
    error: str | None = Field(None, min_length=1, max_length=10_000)
    """Why the program failed, if it did: the rollout then fails too, and has no reward."""
    attempt: Count | None = None
    """The attempt that the report is about; if it is over, the report is refused."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.reward_parts and self.reward is None:
            raise ValueError("reward_parts are those of a reward, and there is none")
        if self.error is not None and self.reward is not None:
            raise ValueError("a failed rollout has no reward")
        return self
