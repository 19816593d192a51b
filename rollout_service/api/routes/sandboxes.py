"""Sandboxes and nodes: what is alive, how much more the host bears, and why not more."""

from __future__ import annotations

from fastapi import APIRouter

from api_schemas.nodes import NodeConcurrency, NodePatch, NodeView
from rollout_service.api.routes.dependencies import ServiceDep
from rollout_service.api.routes.strict import StrictRoute
from sandboxes import SandboxInfo

router = APIRouter(prefix="/v1", tags=["sandboxes"], route_class=StrictRoute)


@router.get("/sandboxes")
async def list_sandboxes(service: ServiceDep) -> list[SandboxInfo]:
    """The sandboxes that are alive; those of state `warm` wait for a rollout."""
    return service.sandboxes.live()


@router.get("/nodes")
async def list_nodes(service: ServiceDep) -> list[NodeView]:
    """The hosts that run sandboxes: this one."""
    return [service.node.view()]


@router.get("/node")
async def get_node(service: ServiceDep) -> NodeConcurrency:
    """How much this node does at once."""
    return service.concurrency.view()


@router.patch("/node")
async def patch_node(service: ServiceDep, patch: NodePatch) -> NodeConcurrency:
    """Change how much this node does at once, until its next start.

    A larger figure takes effect at once; after a smaller one, work under way goes on until it ends.
    """
    return service.concurrency.change(patch)
