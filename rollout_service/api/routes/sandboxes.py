"""Routes for live sandboxes, and for how much each host runs at once."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter

from api_schemas.nodes import NodeConcurrency, NodePatch, NodeView
from api_schemas.sandboxes import SandboxView
from rollout_service.api.routes.dependencies import ServiceDep
from rollout_service.api.routes.strict import StrictRoute

router = APIRouter(prefix="/v1", tags=["sandboxes"], route_class=StrictRoute)


@router.get("/sandboxes")
async def list_sandboxes(service: ServiceDep) -> list[SandboxView]:
    """List the sandboxes that are alive. Those in state `warm` were started ahead and wait for a rollout."""
    return [SandboxView.model_validate(asdict(info)) for info in service.sandboxes.live()]


@router.get("/nodes")
async def list_nodes(service: ServiceDep) -> list[NodeView]:
    """List the hosts that run sandboxes, with how many each runs and what holds new ones back: today, this host."""
    return [service.node.view()]


@router.get("/node")
async def get_node(service: ServiceDep) -> NodeConcurrency:
    """Read how much this node runs at once: the workers and queues of each stage, and the ceiling of sandboxes."""
    return service.concurrency.view()


@router.patch("/node")
async def patch_node(service: ServiceDep, patch: NodePatch) -> NodeConcurrency:
    """Change how much this node runs at once, until the service restarts.

    Only the fields that are sent change. An increase takes effect at once. After a decrease, work under way runs to its
    end, and new work waits. To make a change permanent, put it in `rollout.toml`.
    """
    return service.concurrency.change(patch)
