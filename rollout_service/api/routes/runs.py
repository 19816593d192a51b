"""Runs: standing orders, and their batches by lease and acknowledgement."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response, StreamingResponse

from api_schemas.base import MAX_INT
from api_schemas.exports import (
    EXPORT_MEDIA_TYPE,
    Rescored,
    RescoreEnd,
    RescoreRollouts,
    RescoreRun,
)
from api_schemas.runs import (
    BINARY_MEDIA_TYPE,
    AppendTasks,
    Batch,
    BatchAnswer,
    BatchId,
    Run,
    RunId,
    RunPage,
    RunPatch,
    RunRequest,
)
from rollout_service.api.openapi.responses import extra_response, media_response, raises
from rollout_service.api.routes.buffered_response import BufferedResponse
from rollout_service.api.routes.dependencies import ServiceDep, as_json
from rollout_service.api.routes.disconnects import cancel_on_disconnect
from rollout_service.api.routes.strict import StrictRoute
from rollout_service.errors import ConflictError, NotFoundError
from rollout_service.inference.errors import NoBackendError
from rollout_service.runs.delivery import RunOverError
from rollout_service.store.runs_contract import BatchLease, BatchLeaseRequest

router = APIRouter(prefix="/v1", tags=["runs"], route_class=StrictRoute)

MAX_WAIT_SECONDS = 3_600.0
MAX_LEASE_SECONDS = 86_400.0
GZIP_MEDIA_TYPE = "application/gzip"

_LINES = {"type": "string"}
_EXPORT = media_response(EXPORT_MEDIA_TYPE, "The file.", schema=_LINES)
_EXPORT[200]["content"] |= media_response(GZIP_MEDIA_TYPE, "")[200]["content"]
_RESCORED = media_response(EXPORT_MEDIA_TYPE, "A `Rescored` a line, then a `RescoreEnd`.", schema=_LINES)


@router.post(
    "/runs",
    status_code=HTTPStatus.CREATED,
    response_model=Run,
    responses=extra_response(HTTPStatus.OK, Run, "The run was there already.")
    | raises(ConflictError, NoBackendError),
)
async def create_run(service: ServiceDep, request: RunRequest) -> Response:
    """Create a run: 201 once it is durable. Idempotent by `run_id`: 200 for the same again, 409 for another."""
    run_id = request.run_id or uuid.uuid4().hex
    run, new = await service.run_service.create(request.model_copy(update={"run_id": run_id}))
    return as_json(run, HTTPStatus.CREATED if new else HTTPStatus.OK)


@router.get("/runs")
async def list_runs(service: ServiceDep) -> RunPage:
    """All runs, oldest first."""
    return RunPage(runs=await service.run_service.list())


@router.get("/runs/{run_id}", responses=raises(NotFoundError))
async def get_run(service: ServiceDep, run_id: RunId) -> Run:
    """A run as it stands."""
    return await service.run_service.get(run_id)


@router.patch("/runs/{run_id}", responses=raises(NotFoundError, ConflictError))
async def patch_run(service: ServiceDep, run_id: RunId, patch: RunPatch) -> Run:
    """Pause, resume or end a run, tell it the trainer's version, or change its share of the service."""
    return await service.run_service.patch(run_id, patch)


@router.delete("/runs/{run_id}", responses=raises(NotFoundError))
async def end_run(service: ServiceDep, run_id: RunId) -> Run:
    """End a run: what is under way is cancelled, what is finished can still be leased. Idempotent."""
    return await service.run_service.end(run_id)


@router.post("/runs/{run_id}/tasks", responses=raises(NotFoundError, ConflictError))
async def append_tasks(service: ServiceDep, run_id: RunId, order: AppendTasks) -> Run:
    """Append tasks to an open run; idempotent when an `offset` is given."""
    return await service.run_service.append(run_id, order)


@router.post(
    "/runs/{run_id}/lease",
    response_model=Batch,
    responses=extra_response(HTTPStatus.NO_CONTENT, None, "No batch in time.")
    | media_response(BINARY_MEDIA_TYPE, "A batch.")
    | raises(NotFoundError, RunOverError),
)
async def lease_batch(
    service: ServiceDep,
    http: Request,
    run_id: RunId,
    timeout: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, description="seconds to wait")] = 0.0,
    seconds: Annotated[
        float, Query(gt=0, le=MAX_LEASE_SECONDS, description="how long the batch is this caller's")
    ] = 600.0,
    key: Annotated[
        str | None, Query(max_length=128, description="the same key gets the batch again that it holds")
    ] = None,
    version: Annotated[int | None, Query(ge=0, le=MAX_INT, description="the trainer's version")] = None,
    allow_stale: Annotated[bool, Query(description="also groups older than the run's bound")] = False,
    accept: Annotated[str, Header()] = "*/*",
) -> Response:
    """Lease the next batch: one that was given back or whose lease ran out before a new one.

    With `Accept: application/vnd.rollout.batch+safetensors` it comes as arrays.
    """
    order = BatchLeaseRequest(run_id, key or uuid.uuid4().hex, seconds, allow_stale)

    def lease() -> Awaitable[BatchLease | None]:
        return service.delivery.lease(order, version=version, timeout=timeout)

    leased = await cancel_on_disconnect(http, lambda: service.shutdown.until_begun(lease))
    if leased is None:
        return Response(status_code=HTTPStatus.NO_CONTENT)
    if BINARY_MEDIA_TYPE not in accept:
        return StreamingResponse(service.delivery.as_json(leased), media_type="application/json")
    file = await service.delivery.as_arrays(leased)
    return BufferedResponse(file.write, length=file.length, media_type=BINARY_MEDIA_TYPE)


@router.get(
    "/runs/{run_id}/export",
    response_class=StreamingResponse,
    responses=_EXPORT | raises(NotFoundError),
)
async def export_run(
    service: ServiceDep,
    run_id: RunId,
    compression: Annotated[
        Literal["none", "gzip"], Query(description="of the file, not of the transfer")
    ] = "none",
) -> StreamingResponse:
    """The rollouts of all closed groups as JSON Lines; see `api_schemas.exports`."""
    pieces = await service.run_exporter.begin(run_id, compressed=compression == "gzip")
    kind = GZIP_MEDIA_TYPE if compression == "gzip" else EXPORT_MEDIA_TYPE
    return StreamingResponse(pieces, media_type=kind)


@router.post(
    "/runs/{run_id}/rescore",
    response_class=StreamingResponse,
    responses=_RESCORED | raises(NotFoundError),
)
async def rescore_run(service: ServiceDep, run_id: RunId, order: RescoreRun) -> StreamingResponse:
    """Evaluate rollouts of a run again, without inference: a `Rescored` a line, then a `RescoreEnd`."""
    return StreamingResponse(
        _rescored(await service.rescorer.rescore_run(run_id, order)), media_type=EXPORT_MEDIA_TYPE
    )


@router.post("/rescore", response_class=StreamingResponse, responses=_RESCORED)
async def rescore_rollouts(service: ServiceDep, order: RescoreRollouts) -> StreamingResponse:
    """Evaluate rollouts again that come with the request, as those of an export."""
    return StreamingResponse(
        _rescored(await service.rescorer.rescore_rollouts(order)), media_type=EXPORT_MEDIA_TYPE
    )


async def _rescored(results: AsyncIterator[Rescored]) -> AsyncIterator[bytes]:
    count = failed = 0
    async for result in results:
        count += 1
        failed += result.error is not None
        yield result.model_dump_json().encode() + b"\n"
    yield RescoreEnd(rescored=count, failed=failed).model_dump_json().encode() + b"\n"


@router.post("/runs/{run_id}/batches/{batch_id}/ack", responses=raises(NotFoundError, ConflictError))
async def acknowledge_batch(service: ServiceDep, run_id: RunId, batch_id: BatchId) -> BatchAnswer:
    """Settle a batch: it never comes again. Idempotent, also after the lease ran out."""
    await service.delivery.acknowledge(run_id, batch_id)
    return BatchAnswer(batch_id=batch_id, state="acknowledged")


@router.post("/runs/{run_id}/batches/{batch_id}/renew", responses=raises(NotFoundError, ConflictError))
async def renew_batch(
    service: ServiceDep,
    run_id: RunId,
    batch_id: BatchId,
    seconds: Annotated[float, Query(gt=0, le=MAX_LEASE_SECONDS, description="from now on")] = 600.0,
    key: Annotated[str | None, Query(max_length=128, description="that it was leased with")] = None,
) -> BatchAnswer:
    """Keep a leased batch for longer; 409 once it is somebody else's."""
    until = await service.delivery.renew(run_id, batch_id, key=key, seconds=seconds)
    return BatchAnswer(batch_id=batch_id, state="leased", lease_until=until)


@router.post("/runs/{run_id}/batches/{batch_id}/nack", responses=raises(NotFoundError, ConflictError))
async def give_back_batch(service: ServiceDep, run_id: RunId, batch_id: BatchId) -> BatchAnswer:
    """Give a batch back: it is leased again at once. Idempotent."""
    await service.delivery.give_back(run_id, batch_id)
    return BatchAnswer(batch_id=batch_id, state="returned")
