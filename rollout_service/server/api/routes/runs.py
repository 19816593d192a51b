"""Routes for runs, which keep producing groups of rollouts, and for the batches that a trainer leases from them."""

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
    COMPRESSED_MEDIA_TYPE,
    DECODED_LENGTH,
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
from rollout_service.base.errors import ConflictError, NotFoundError
from rollout_service.engines.errors import NoBackendError
from rollout_service.http.requests import cancel_on_disconnect
from rollout_service.runs.delivery import RunOverError, RunWithoutBatchesError
from rollout_service.runs.planning import RunStoppedError
from rollout_service.server.api.routes.support.route import (
    BINARY,
    ServiceDep,
    StrictRoute,
    as_json,
    extra_response,
    media_response,
    raises,
    role_of,
    trace_of,
)
from rollout_service.server.api.routes.support.shared_answers import BufferedResponse
from rollout_service.store.runs_contract import BatchLease, BatchLeaseRequest

router = APIRouter(prefix="/v1", tags=["runs"], route_class=StrictRoute)

MAX_WAIT_SECONDS = 3_600.0
MAX_LEASE_SECONDS = 86_400.0
GZIP_MEDIA_TYPE = "application/gzip"

_EXPORT = media_response("The rollouts, one JSON document per line.", EXPORT_MEDIA_TYPE)
_EXPORT[200]["content"] |= media_response("", GZIP_MEDIA_TYPE, schema=BINARY)[200]["content"]
_ARRAYS = media_response("The batch.", BINARY_MEDIA_TYPE, COMPRESSED_MEDIA_TYPE, schema=BINARY)
_RESCORED = media_response("One `Rescored` per line, then a `RescoreEnd`.", EXPORT_MEDIA_TYPE)


@router.post(
    "/runs",
    status_code=HTTPStatus.CREATED,
    response_model=Run,
    responses=extra_response(HTTPStatus.OK, Run, "The same run already exists.")
    | raises(ConflictError, NoBackendError),
)
async def create_run(service: ServiceDep, http: Request, request: RunRequest) -> Response:
    """Create a run: a standing request for groups of rollouts over a source of tasks.

    The run starts groups by itself, filters them, and collects them into batches until it ends; lease the batches with
    `POST /v1/runs/{run_id}/lease`. Answers 201 once the run is stored durably.

    Idempotent by `run_id`: repeating the same request answers 200, and a different request under the same id is a 409.
    """
    run_id = request.run_id or uuid.uuid4().hex
    known = {"run_id": run_id, "trace": request.trace or trace_of(http)}
    run, new = await service.run_service.create(request.model_copy(update=known), role_of(http))
    return as_json(run, HTTPStatus.CREATED if new else HTTPStatus.OK)


@router.get("/runs")
async def list_runs(service: ServiceDep) -> RunPage:
    """List all runs, oldest first."""
    return RunPage(runs=await service.run_service.list())


@router.get("/runs/{run_id}", responses=raises(NotFoundError))
async def get_run(
    service: ServiceDep,
    run_id: RunId,
    parallel: Annotated[bool, Query(description="Whether to add figures on the use of sub-agents.")] = False,
) -> Run:
    """Read a run: its state, its counts of groups, and why it has stopped, if it has."""
    return await service.run_service.get(run_id, parallel=parallel)


@router.patch("/runs/{run_id}", responses=raises(NotFoundError, ConflictError))
async def patch_run(service: ServiceDep, run_id: RunId, patch: RunPatch) -> Run:
    """Change a run: pause, resume, or end it, tell it the trainer's version, or change its limits and its share.

    Only the fields that are sent change. A run that has ended cannot be resumed: that is a 409.
    """
    return await service.run_service.patch(run_id, patch)


@router.delete("/runs/{run_id}", responses=raises(NotFoundError))
async def end_run(service: ServiceDep, run_id: RunId) -> Run:
    """End a run for good.

    Rollouts under way are cancelled. Groups that are finished can still be leased and acknowledged. Idempotent.
    """
    return await service.run_service.end(run_id)


@router.post("/runs/{run_id}/tasks", responses=raises(NotFoundError, ConflictError))
async def append_tasks(service: ServiceDep, run_id: RunId, order: AppendTasks) -> Run:
    """Append tasks to a run that was created with an open list of tasks.

    With `offset`, the number of tasks that the run has before these, a request is safe to repeat: tasks that are
    already there change nothing, and a wrong offset is a 409 that tells the right one. `close` says that no more tasks
    will come.
    """
    return await service.run_service.append(run_id, order)


@router.post(
    "/runs/{run_id}/lease",
    response_model=Batch,
    responses=extra_response(HTTPStatus.NO_CONTENT, None, "No batch became ready in time.")
    | _ARRAYS
    | raises(NotFoundError, RunOverError, RunWithoutBatchesError, RunStoppedError),
)
async def lease_batch(
    service: ServiceDep,
    http: Request,
    run_id: RunId,
    timeout: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, description="Seconds to wait for a batch.")] = 0.0,
    seconds: Annotated[
        float,
        Query(gt=0, le=MAX_LEASE_SECONDS, description="How long the batch is leased to you, in seconds."),
    ] = 600.0,
    key: Annotated[
        str | None, Query(max_length=128, description="Repeating a key gets the batch that it already holds.")
    ] = None,
    version: Annotated[int | None, Query(ge=0, le=MAX_INT, description="The trainer's current weight version.")] = None,
    allow_stale: Annotated[bool, Query(description="Include groups that are older than `max_staleness`.")] = False,
    accept: Annotated[str, Header()] = "*/*",
) -> Response:
    """Lease the run's next batch, waiting up to `timeout` seconds for it.

    Batches that were returned, or whose lease expired, come before new ones. The batch is yours for `seconds`: train on
    it and acknowledge it, renew the lease, or return it. A batch that is not acknowledged in time is delivered again.
    Pass a `key` of your own to make the request safe to repeat.

    The batch is JSON; with `Accept: application/vnd.rollout.batch+safetensors` it is binary arrays, which are much
    faster to read, and with `application/vnd.rollout.batch+safetensors+zstd` these are compressed, in the frames of
    zstd in which they are stored. 204 means that no batch became ready in time. If none will before a person solves the
    run's `problem`, that is a 409 with the code `run_stopped`. A run that is over, with every batch acknowledged, is a
    410 with the code `run_over`, or `run_without_batches` if it took all its tasks and delivered none.
    """
    order = BatchLeaseRequest(run_id, key or uuid.uuid4().hex, seconds, allow_stale)

    def lease() -> Awaitable[BatchLease | None]:
        return service.delivery.lease(order, version=version, timeout=timeout)

    leased = await cancel_on_disconnect(http.receive, lambda: service.shutdown.until_begun(lease))
    if leased is None:
        return Response(status_code=HTTPStatus.NO_CONTENT)
    if BINARY_MEDIA_TYPE not in accept:
        return StreamingResponse(service.delivery.as_json(leased), media_type="application/json")
    file = await service.delivery.as_arrays(leased, compressed=COMPRESSED_MEDIA_TYPE in accept)
    return BufferedResponse(
        file.write,
        {DECODED_LENGTH if file.compressed else "Content-Length": str(file.length)},
        media_type=COMPRESSED_MEDIA_TYPE if file.compressed else BINARY_MEDIA_TYPE,
    )


@router.get(
    "/runs/{run_id}/export",
    response_class=StreamingResponse,
    responses=_EXPORT | raises(NotFoundError),
)
async def export_run(
    service: ServiceDep,
    run_id: RunId,
    compression: Annotated[
        Literal["none", "gzip"], Query(description="Compression of the file itself, not of the transfer.")
    ] = "none",
) -> StreamingResponse:
    """Export the rollouts of all closed groups as JSON Lines, with requests, trajectories, and rewards.

    Exporting changes nothing; acknowledged and dropped groups are included for as long as they are retained.
    """
    pieces = await service.run_exporter.start(run_id, compressed=compression == "gzip")
    kind = GZIP_MEDIA_TYPE if compression == "gzip" else EXPORT_MEDIA_TYPE
    return StreamingResponse(pieces, media_type=kind)


@router.post(
    "/runs/{run_id}/rescore",
    response_class=StreamingResponse,
    responses=_RESCORED | raises(NotFoundError),
)
async def rescore_run(service: ServiceDep, run_id: RunId, order: RescoreRun) -> StreamingResponse:
    """Evaluate the run's rollouts again, without an engine.

    Use it after a grader was fixed, or to compare graders: the recorded answers, or the recorded tool calls, are
    replayed and scored anew. Stored rewards do not change. The answer streams one `Rescored` per line, with the old and
    the new reward, and ends with a `RescoreEnd`; a stream without it was cut off.
    """
    return StreamingResponse(_rescored(await service.rescorer.rescore_run(run_id, order)), media_type=EXPORT_MEDIA_TYPE)


@router.post("/rescore", response_class=StreamingResponse, responses=_RESCORED)
async def rescore_rollouts(service: ServiceDep, order: RescoreRollouts) -> StreamingResponse:
    """Evaluate rollouts that come with the request, such as those of an export, without an engine.

    Answers like `POST /v1/runs/{run_id}/rescore`. The rollouts need not be known to this service.
    """
    return StreamingResponse(_rescored(await service.rescorer.rescore_rollouts(order)), media_type=EXPORT_MEDIA_TYPE)


async def _rescored(results: AsyncIterator[Rescored]) -> AsyncIterator[bytes]:
    count = failed = 0
    async for result in results:
        count += 1
        failed += result.error is not None
        yield result.model_dump_json().encode() + b"\n"
    yield RescoreEnd(rescored=count, failed=failed).model_dump_json().encode() + b"\n"


BatchKey = Annotated[str | None, Query(max_length=128, description="The key that the batch was leased with.")]


@router.post("/runs/{run_id}/batches/{batch_id}/ack", responses=raises(NotFoundError, ConflictError))
async def acknowledge_batch(service: ServiceDep, run_id: RunId, batch_id: BatchId) -> BatchAnswer:
    """Acknowledge a batch: you have trained on it, and it is never delivered again.

    Idempotent. A late acknowledgment, after the lease expired, still counts, unless the batch was dissolved in the
    meantime because one of its groups had grown too old: that is a 409, and you should not count it as trained.
    """
    await service.delivery.acknowledge(run_id, batch_id)
    return BatchAnswer(batch_id=batch_id, state="acknowledged")


@router.post("/runs/{run_id}/batches/{batch_id}/renew", responses=raises(NotFoundError, ConflictError))
async def renew_batch(
    service: ServiceDep,
    run_id: RunId,
    batch_id: BatchId,
    seconds: Annotated[
        float, Query(gt=0, le=MAX_LEASE_SECONDS, description="Seconds from now until the lease expires.")
    ] = 600.0,
    key: BatchKey = None,
) -> BatchAnswer:
    """Extend the lease of a batch; a 409 means that it is no longer yours."""
    until = await service.delivery.renew(run_id, batch_id, key=key, seconds=seconds)
    return BatchAnswer(batch_id=batch_id, state="leased", lease_until=until)


@router.post("/runs/{run_id}/batches/{batch_id}/nack", responses=raises(NotFoundError, ConflictError))
async def give_back_batch(service: ServiceDep, run_id: RunId, batch_id: BatchId, key: BatchKey = None) -> BatchAnswer:
    """Return a batch without having trained on it: the next lease gets it at once. Idempotent.

    With the `key`, a 409 means that it is no longer yours: without it, the batch is taken from whoever has it.
    """
    await service.delivery.give_back(run_id, batch_id, key=key)
    return BatchAnswer(batch_id=batch_id, state="returned")
