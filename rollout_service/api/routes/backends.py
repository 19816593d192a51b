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
from rollout_service.api.openapi.responses import raises
from rollout_service.api.routes.dependencies import ServiceDep
from rollout_service.api.routes.strict import StrictRoute
from rollout_service.inference.errors import (
    BackendProtocolError,
    BackendRejected,
    BackendUnreachable,
    NoBackendError,
    OrderFailed,
    UnknownBackend,
    WeightsConflict,
    WeightsNotLoaded,
    WeightsPartlyLoaded,
    WeightsRefused,
)
from rollout_service.tokens.errors import RendererMismatchError

router = APIRouter(prefix="/v1", tags=["inference"], route_class=StrictRoute)


@router.post(
    "/backends",
    status_code=HTTPStatus.CREATED,
    responses=raises(BackendUnreachable, BackendRejected, BackendProtocolError, RendererMismatchError),
)
async def register_backend(service: ServiceDep, spec: BackendSpec) -> BackendView:
    """Register an engine after checking that it gives what exact trajectories need."""
    return await service.serving.register(spec)


@router.get("/backends")
async def list_backends(service: ServiceDep) -> list[BackendView]:
    """All backends of all pools."""
    return service.serving.views()


@router.delete(
    "/backends/{backend_id:path}",
    status_code=HTTPStatus.NO_CONTENT,
    response_class=Response,
    responses=raises(UnknownBackend),
)
async def remove_backend(service: ServiceDep, backend_id: str) -> None:
    """Take an engine out; its requests in flight are sent elsewhere."""
    await service.serving.remove(backend_id)


@router.post("/backends/{backend_id:path}/drain", responses=raises(UnknownBackend))
async def drain_backend(service: ServiceDep, backend_id: str) -> BackendView:
    """Let an engine finish what it has and send it nothing new."""
    return service.serving.drain(backend_id)


@router.post(
    "/weights",
    responses=raises(NoBackendError, WeightsConflict, WeightsRefused, WeightsNotLoaded, WeightsPartlyLoaded),
)
async def update_weights(service: ServiceDep, request: WeightsRequest) -> PoolOutcome:
    """Load new weights into every backend of a pool; each token carries the version that sampled it.

    Once begun it is carried to its end, whether or not the caller waits for the answer.
    """
    return await service.serving.update_weights(request)


@router.post(
    "/weights/group", responses=raises(NoBackendError, WeightsConflict, BackendRejected, OrderFailed)
)
async def join_weights_group(service: ServiceDep, request: WeightsGroupRequest) -> PoolOutcome:
    """Let the backends of a pool join the trainer's process group, over which weights will come."""
    return await service.serving.join_group(request)


@router.delete("/weights/group", responses=raises(NoBackendError, OrderFailed))
async def leave_weights_group(
    service: ServiceDep, pool: Name = "policy", group_name: Name = "weights"
) -> PoolOutcome:
    """Let the backends of a pool leave a process group."""
    return await service.serving.leave_group(pool, group_name)


@router.post("/pause", responses=raises(NoBackendError, OrderFailed))
async def pause_pool(
    service: ServiceDep, request: Annotated[PauseRequest, Body()] = PauseRequest()
) -> PoolOutcome:
    """Pause the generation of a pool; rollouts wait and go on where they were."""
    return await service.serving.pause(request)


@router.post("/resume", responses=raises(NoBackendError, OrderFailed))
async def resume_pool(
    service: ServiceDep, request: Annotated[ResumeRequest, Body()] = ResumeRequest()
) -> PoolOutcome:
    """Let a paused pool go on."""
    return await service.serving.resume(request)
