"""Routers, which decide which backend of a pool serves a request, behind a small protocol."""

from typing import Literal

from rollout_service.engines.routing.contract import (
    Candidate,
    Cost,
    Decision,
    LeastLoaded,
    Observer,
    Reason,
    RequestEnd,
    Router,
)
from rollout_service.engines.routing.cost_router import CostRouter

__all__ = [
    "Candidate",
    "Cost",
    "CostRouter",
    "Decision",
    "LeastLoaded",
    "Observer",
    "Reason",
    "RequestEnd",
    "Router",
    "make_router",
]


def make_router(name: Literal["cost", "least_loaded"]) -> Router:
    """Make a router; each pool needs its own."""
    return CostRouter() if name == "cost" else LeastLoaded()
