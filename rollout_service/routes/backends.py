"""Backends and weights: which engines serve which pool, and what they serve."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Body, Response

from api_schemas.base import Name
from api_schemas.inference import (
    BackendSpec,
    BackendView,
    PauseRequest,
    PoolOutcome,
    ResumeRequest,
    WeightsGroupRequest,
    WeightsRequest,
)
from rollout_service.routes.dependencies import ServiceDep

router = APIRouter(prefix="/v1", tags=["inference"])


@router.post("/backends", status_code=HTTPStatus.CREATED)
async def register(service: ServiceDep, spec: BackendSpec) -> BackendView:
    """Register an engine after checking that it gives what exact trajectories need."""
    return await service.serving.register(spec)


@router.get("/backends")
async def list_backends(service: ServiceDep) -> list[BackendView]:
    """All backends of all pools."""
    return service.serving.views()


@router.delete("/backends/{backend_id}", status_code=HTTPStatus.NO_CONTENT, response_class=Response)
async def remove(service: ServiceDep, backend_id: str) -> None:
    """Take an engine out; its requests in flight are sent elsewhere."""
    await service.serving.remove(backend_id)


@router.post("/backends/{backend_id}/drain")
async def drain(service: ServiceDep, backend_id: str) -> BackendView:
    """Let an engine finish what it has and send it nothing new."""
    return service.serving.drain(backend_id)


@router.post("/weights")
async def update_weights(service: ServiceDep, request: WeightsRequest) -> PoolOutcome:
    """Load new weights into every backend of a pool; each token carries the version that sampled it.

    Once begun it is carried to its end, whether or not the caller waits for the answer.
    """
    return await service.serving.update_weights(request)


@router.post("/weights/group")
async def join_group(service: ServiceDep, request: WeightsGroupRequest) -> PoolOutcome:
    """Let the backends of a pool join the trainer's process group, over which weights will come."""
    return await service.serving.join_group(request)


@router.delete("/weights/group")
async def leave_group(
    service: ServiceDep, pool: Name = "policy", group_name: Name = "weights"
) -> PoolOutcome:
    """Let the backends of a pool leave a process group."""
    return await service.serving.leave_group(pool, group_name)


@router.post("/pause")
async def pause(
    service: ServiceDep, request: Annotated[PauseRequest, Body()] = PauseRequest()
) -> PoolOutcome:
    """Pause the generation of a pool; rollouts wait and go on where they were."""
    return await service.serving.pause(request)


@router.post("/resume")
async def resume(
    service: ServiceDep, request: Annotated[ResumeRequest, Body()] = ResumeRequest()
) -> PoolOutcome:
    """Let a paused pool go on."""
    return await service.serving.resume(request)
