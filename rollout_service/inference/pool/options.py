"""The settings of a pool."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How a pool routes its requests, bounds them, and how patient it is."""

    router: Literal["cost", "least_loaded"] = "cost"
    """`cost` sends a request where it is expected to cost the least time; `least_loaded` only counts rollouts and
    requests."""
    hold_seconds: float = 120.0
    """How long a request waits while the pool is paused, or while no backend is in service."""
    max_failures: int = 6
    """Failed calls, or aborts that gave nothing, that one request survives in a row."""
    probe_interval: float = 2.0
    probe_timeout: float = 10.0
    unhealthy_after: int = 2
    """Failures in a row, of probes or requests, that take a backend out of service."""
    healthy_after: int = 2
    """Good probes in a row that bring it back."""
    slow_start: float = 10.0
    """Seconds over which a backend that has come into service takes up its fair share."""
    registration_timeout: float = 60.0
    max_in_flight: int | None = None
    """Requests that all backends together work on; further ones wait, those of the oldest rollouts first."""
    max_in_flight_per_backend: int | None = None
    """The same for each backend that was registered without a limit of its own."""
    load_interval: float = 1.0
    """Seconds between two questions to an engine how busy it is."""
    stall_seconds: float = 60.0
    """How long a call may be open at an engine that shows no progress before it goes elsewhere."""
