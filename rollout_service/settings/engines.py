"""The settings of engines and of their pools."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field, field_validator

from rollout_service.settings.values import Models, Section


class DefaultEngine(StrEnum):
    """The engine that serves the policy when no backend is configured."""

    EMBEDDED = "embedded"
    """The small CPU engine, started and stopped with the service."""
    NONE = "none"
    """No engine: backends are registered over HTTP."""


class EmbeddedSettings(Section):
    """The embedded engines, each a process of its own."""

    model: str = "calc-tuned"
    """The model: a shipped policy (`calc-base`, `calc-tuned`, `live-base`, `parl-base`), or the folder of a Qwen3
    checkpoint."""
    pools: Models = {}
    """The models of further pools, by the pool's name, such as `frozen-1 = "parl-base"` for frozen sub-agents. Each
    gets an engine of its own, whatever serves the policy."""
    threads: int = Field(1, ge=1)
    """The number of threads that each engine computes with."""

    @field_validator("pools")
    @classmethod
    def _policy_has_its_own_key(cls, pools: dict[str, str]) -> dict[str, str]:
        if "policy" in pools:
            raise ValueError("the model of the pool 'policy' is the key `model`")
        return pools


class PoolSettings(Section):
    """A pool of engines."""

    router: Literal["cost", "least_loaded"] = "cost"
    """How a backend is chosen: `cost` estimates the time on each, prefix caches included; `least_loaded` only counts
    rollouts and requests, for engines that share no prefixes."""
    max_in_flight: int | None = Field(None, ge=1)
    """The most requests in flight at all backends together; more wait, and those of the oldest rollouts go first."""
    max_in_flight_per_backend: int | None = Field(None, ge=1)
    """The most requests in flight at each backend that was registered without a limit of its own."""
    stall_seconds: float = Field(60.0, gt=0)
    """How long a request may wait for an engine that shows no progress before it is sent to another."""
