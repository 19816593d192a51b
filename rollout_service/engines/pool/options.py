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
    """How many failed calls, or aborts without a token, in a row one request survives."""
    probe_interval: float = 2.0
    """Seconds between two probes of a backend's health."""
    probe_timeout: float = 10.0
    """Seconds that a backend may take to answer a probe."""
    unhealthy_after: int = 2
    """How many failed probes or requests in a row take a backend out of service."""
    healthy_after: int = 2
    """How many successful probes in a row bring it back."""
    slow_start: float = 10.0
    """Seconds over which a backend that has joined grows to its fair share."""
    registration_timeout: float = 60.0
    """Seconds that a backend may take to answer the checks of its registration."""
    max_in_flight: int | None = None
    """The most requests in flight on all backends together; the others wait, oldest rollouts first."""
    max_in_flight_per_backend: int | None = None
    """The same for each backend that was registered without its own limit."""
    load_interval: float = 1.0
    """Seconds between two polls of an engine's load."""
    stall_seconds: float = 60.0
    """Seconds that a call may be open on an engine without progress before it continues elsewhere."""
