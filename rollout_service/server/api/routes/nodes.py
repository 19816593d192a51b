"""Routes for the nodes that share the store, and for how much this one runs at once."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter

from api_schemas.nodes import NodeConcurrency, NodePatch, NodeView
from rollout_service.base.errors import ConflictError, NotFoundError
from rollout_service.server.api.routes.support.route import ServiceDep, StrictRoute, raises

router = APIRouter(prefix="/v1", tags=["nodes"], route_class=StrictRoute)


@router.get("/nodes")
async def list_nodes(service: ServiceDep) -> list[NodeView]:
    """List the nodes that share the store, with how many sandboxes each runs and the reasons that hold new ones back.

    A node that died stays in the list, with no work, until a node of its name joins or it is removed.
    """
    return await service.nodes.list()


@router.post("/nodes/{node}/drain", responses=raises(NotFoundError, ConflictError))
async def drain_node(service: ServiceDep, node: str) -> NodeView:
    """Let a node end its rollouts and begin no more, until it is resumed or restarted.

    Its API still serves everything. `rollouts` says how many it still works on.
    """
    return await service.nodes.drain(node)


@router.post("/nodes/{node}/resume", responses=raises(NotFoundError, ConflictError))
async def resume_node(service: ServiceDep, node: str) -> NodeView:
    """Let a drained node begin rollouts again."""
    return await service.nodes.resume(node)


@router.delete("/nodes/{node}", status_code=HTTPStatus.NO_CONTENT, responses=raises(NotFoundError, ConflictError))
async def remove_node(service: ServiceDep, node: str) -> None:
    """Remove a dead node from the list. A live one removes itself when it stops."""
    await service.nodes.remove(node)


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
