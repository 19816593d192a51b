"""Routes for the engines of each pool, and for the weights that they serve."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Body, Query, Response

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
from rollout_service.base.errors import ConfigurationError, InvalidFieldError
from rollout_service.engines.errors import (
    BackendProtocolError,
    BackendRejected,
    BackendUnreachable,
    NoBackendError,
    OrderFailed,
    PoolFrozen,
    UnknownBackend,
    UnknownPool,
    WeightsConflict,
    WeightsNotLoaded,
    WeightsPartlyLoaded,
    WeightsRefused,
    WeightsUnusable,
)
from rollout_service.server.api.routes.support.route import ServiceDep, StrictRoute, raises
from rollout_service.tokens.errors import RendererMismatchError

router = APIRouter(prefix="/v1", tags=["inference"], route_class=StrictRoute)


@router.post(
    "/backends",
    status_code=HTTPStatus.CREATED,
    responses=raises(
        ConfigurationError, BackendUnreachable, BackendRejected, BackendProtocolError, RendererMismatchError
    ),
)
async def register_backend(service: ServiceDep, spec: BackendSpec) -> BackendView:
    """Register an engine with a pool, and start sending it requests.

    The engine is probed first: it must return token ids with log-probabilities, and its tokenizer and chat format must
    be known. An engine that cannot be reached, or that fails a check, is not registered, and the problem says why.
    Registering the same engine again checks it again, ends a drain, and sets its limit. Engines registered here come
    back after a restart of the service.
    """
    try:
        return await service.serving.register(spec)
    except InvalidFieldError as error:
        raise error.under("body") from error


@router.get("/backends")
async def list_backends(service: ServiceDep) -> list[BackendView]:
    """List the engines of all pools, with their state, load, weight version, and last error."""
    return service.serving.views()


@router.delete(
    "/backends/{backend_id:path}",
    status_code=HTTPStatus.NO_CONTENT,
    response_class=Response,
    responses=raises(UnknownBackend),
)
async def remove_backend(service: ServiceDep, backend_id: str) -> None:
    """Remove an engine at once; its requests in flight continue on other engines of the pool."""
    await service.serving.remove(backend_id)


@router.post(
    "/backends/{backend_id:path}/renew",
    status_code=HTTPStatus.NO_CONTENT,
    response_class=Response,
    responses=raises(UnknownBackend),
)
async def renew_backend(service: ServiceDep, backend_id: str) -> None:
    """Extend an engine's lease by its `lease_seconds` from now. After a 404, register the engine again."""
    await service.serving.renew(backend_id)


@router.post("/backends/{backend_id:path}/drain", responses=raises(UnknownBackend))
async def drain_backend(service: ServiceDep, backend_id: str) -> BackendView:
    """Stop sending an engine new requests, and let it finish those it has. Remove it when `in_flight` is 0."""
    return await service.serving.drain(backend_id)


@router.post(
    "/weights",
    responses=raises(
        UnknownPool,
        NoBackendError,
        WeightsConflict,
        PoolFrozen,
        WeightsRefused,
        WeightsNotLoaded,
        WeightsPartlyLoaded,
        WeightsUnusable,
    ),
)
async def update_weights(service: ServiceDep, request: WeightsRequest) -> PoolOutcome:
    """Load new weights into every engine of a pool while rollouts run.

    No token is lost: interrupted requests continue after the tokens that they had sampled, and every token carries the
    version that sampled it. Once started, an update runs to its end, even if you hang up. A version older than the
    pool's is a 409, unless `force` is set. A frozen pool refuses all weights with a 409.
    """
    return await service.serving.orders.update_weights(request)


@router.post(
    "/weights/group",
    responses=raises(UnknownPool, NoBackendError, WeightsConflict, PoolFrozen, BackendRejected, OrderFailed),
)
async def join_weights_group(service: ServiceDep, request: WeightsGroupRequest) -> PoolOutcome:
    """Have the engines of a pool join the trainer's process group, so that it can broadcast weights to them."""
    return await service.serving.orders.join_group(request)


@router.delete("/weights/group", responses=raises(UnknownPool, NoBackendError, OrderFailed))
async def leave_weights_group(
    service: ServiceDep,
    pool: Annotated[Name, Query(description="The pool whose engines leave.")] = "policy",
    group_name: Annotated[Name, Query(description="The name that the group was joined under.")] = "weights",
) -> PoolOutcome:
    """Have the engines of a pool leave a process group that they joined."""
    return await service.serving.orders.leave_group(pool, group_name)


@router.post("/pause", responses=raises(UnknownPool, NoBackendError, OrderFailed))
async def pause_pool(service: ServiceDep, request: Annotated[PauseRequest, Body()] = PauseRequest()) -> PoolOutcome:
    """Pause generation in a pool; rollouts wait, and later continue where they were.

    While a pool is paused, an agent's request waits for at most the setting `hold_seconds`.
    """
    return await service.serving.orders.pause(request)


@router.post("/resume", responses=raises(UnknownPool, NoBackendError, OrderFailed))
async def resume_pool(service: ServiceDep, request: Annotated[ResumeRequest, Body()] = ResumeRequest()) -> PoolOutcome:
    """Resume generation in a paused pool."""
    return await service.serving.orders.resume(request)
