"""Which backend serves a request: a pool's one decision, behind a small protocol."""

from rollout_service.inference.routing.contract import Candidate, Cost, Decision, Observer, Reason, Router
from rollout_service.inference.routing.cost_options import CostRouterOptions
from rollout_service.inference.routing.cost_router import CostRouter
from rollout_service.inference.routing.least_loaded import LeastLoaded

__all__ = [
    "Candidate",
    "Cost",
    "CostRouter",
    "CostRouterOptions",
    "Decision",
    "LeastLoaded",
    "Observer",
    "Reason",
    "Router",
]
