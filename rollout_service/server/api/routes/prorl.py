"""The ProRL Agent server's own routes: a trainer written for it changes only its address.

`/process` blocks until the rollout has ended; `support.prorl_answers` has the form of its answer. The instance's
`data_source` names the environment. What that server says with a status and a `detail`, a problem says here.
"""

from __future__ import annotations

import math
import uuid
from functools import lru_cache
from http import HTTPStatus
from typing import Annotated, Literal

import anyio
import structlog
from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, FailFast, Field, HttpUrl, JsonValue, ValidationError

from api_schemas.base import MAX_INT32, Count, Flag, Name, Number, RolloutId, Signed
from api_schemas.inference import BackendSpec
from api_schemas.rollouts import RolloutRequest, RolloutState, Sampling
from api_schemas.tasks import Limits, Task
from rollout_service.base.errors import ConflictError, InvalidFieldError, RequestError, UnavailableError
from rollout_service.base.shutdown import ShuttingDownError
from rollout_service.engines.errors import (
    BackendProtocolError,
    BackendRejected,
    BackendUnreachable,
    NoBackendError,
)
from rollout_service.http.requests import CLIENT_CLOSED_REQUEST, cancel_on_disconnect
from rollout_service.server.api.routes.support.prorl_answers import ProcessAnswer, process_answer
from rollout_service.server.api.routes.support.route import ServiceDep, StrictRoute, raises
from rollout_service.server.lifecycle import Service
from rollout_service.tokens import ToolSpec
from rollout_service.tokens.errors import RendererMismatchError

log = structlog.get_logger(__name__)
STOP_SECONDS = 10.0

router = APIRouter(tags=["ProRL Agent"], route_class=StrictRoute)


class ProcessSampling(BaseModel):
    """The sampling parameters that such a trainer sends, with that server's defaults; others have no effect."""

    model_config = ConfigDict(extra="allow")

    temperature: Annotated[float, Number] = Field(0.0, ge=0.0, le=100.0)
    top_p: Annotated[float, Number] = Field(1.0, gt=0.0, le=1.0)
    top_k: Annotated[int, Number] = Field(-1, ge=-1, le=MAX_INT32)
    min_p: Annotated[float, Number] = Field(0.0, ge=0.0, le=1.0)
    seed: Signed | None = None
    stop: Annotated[list[str], FailFast()] = []
    max_iterations: Annotated[int, Number] = Field(2, ge=1, le=10_000)
    """The most turns."""
    max_output_tokens: Count | None = None
    """The most tokens of a turn, as are `max_tokens` and `max_new_tokens`."""
    max_tokens: Count | None = None
    max_new_tokens: Count | None = None
    token_level_generation: Flag = False
    """Whether `max_model_len` is the only limit on tokens, as with that server."""
    max_model_len: Count | None = None

    def sampling(self) -> Sampling:
        return Sampling(**self.model_dump(include=set(Sampling.model_fields)))

    def limits(self) -> Limits:
        tokens = self.max_new_tokens or self.max_output_tokens or self.max_tokens
        context = self.max_model_len if self.token_level_generation else None
        return Limits(max_turn_tokens=context or tokens, max_tokens=context, max_turns=self.max_iterations)


HARMLESS = {"model", "api_key", "modify_params", "log_completions", "native_tool_calling", "custom_tokenizer"}
HARMLESS |= {"strict_loop_detector", "ensure_thinking_end_properly"}
"""Sampling parameters that such a trainer always sends, but that engines and chat formats decide here."""


@lru_cache(maxsize=64)
def _note_ignored(names: tuple[str, ...]) -> None:
    log.warning("a trainer sends sampling parameters that have no effect here", ignored=names)


class ProcessInstance(BaseModel):
    """An environment's name, and the data of one problem as further fields."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    __pydantic_extra__: dict[str, JsonValue]

    data_source: Name = "swebench"


class ProcessRequest(BaseModel):
    """An instance to roll out."""

    instance: ProcessInstance
    sampling_params: ProcessSampling = ProcessSampling()
    job_id: RolloutId | None = None


class JobRequest(BaseModel):
    """A job to cancel."""

    job_id: RolloutId


class ServerRequest(BaseModel):
    """An engine to add."""

    address: str = Field(min_length=1)


class Answer(BaseModel):
    """The outcome of a command, in words."""

    status: str


class StatusAnswer(BaseModel):
    """The number of unfinished jobs, and of those that wait for each phase and are in it."""

    status: Literal["running"] = "running"
    pending_jobs: int
    init_queue: int
    run_queue: int
    eval_queue: int
    active_init: int
    active_run: int
    active_eval: int
    total: int


@router.post(
    "/process",
    response_model=ProcessAnswer,
    responses=raises(ConflictError, NoBackendError, UnavailableError),
)
async def process(service: ServiceDep, http: Request, request: ProcessRequest) -> Response:
    """Roll out one instance, and answer once it has ended: a failure too with a 200, a cancelled job with a 500.

    The rollout continues if you hang up: sending the same `job_id` again waits for it. Without a `job_id` one is
    generated. The instance's `data_source` names the environment.
    """
    _require_running(service)
    instance = request.instance.model_extra or {}
    rollout_id = request.job_id or uuid.uuid4().hex
    if ignored := (request.sampling_params.model_extra or {}).keys() - HARMLESS:
        _note_ignored(tuple(sorted(ignored)))
    await service.submit(
        RolloutRequest(
            rollout_id=rollout_id,
            task=Task(environment=request.instance.data_source, instance=instance),
            sampling=request.sampling_params.sampling(),
            limits=request.sampling_params.limits(),
        )
    )
    try:
        ended = await cancel_on_disconnect(http.receive, lambda: service.wait(rollout_id, math.inf))
    except ShuttingDownError as error:
        # A caller that named no job needs this id to ask for it again.
        raise ShuttingDownError(context={"job_id": rollout_id}) from error
    if ended is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if ended.state is RolloutState.CANCELLED:
        raise HTTPException(HTTPStatus.INTERNAL_SERVER_ERROR, f"job {rollout_id} was cancelled")
    return JSONResponse(process_answer(ended, _tools(service, ended.task)))


@router.post("/cancel", responses=raises(UnavailableError))
async def cancel_job(service: ServiceDep, request: JobRequest) -> Answer:
    """Cancel a job. One that is not known, or has ended, is no error, and can be sent later."""
    _require_running(service)
    if await service.store.get(request.job_id) is not None:
        await service.store.cancel(request.job_id)
    return Answer(status=f"Cancel requested for job {request.job_id}")


@router.post(
    "/add_llm_server",
    responses=raises(BackendUnreachable, BackendRejected, BackendProtocolError, RendererMismatchError),
)
async def add_llm_server(service: ServiceDep, request: ServerRequest) -> Answer:
    """Add an engine to the default pool, after checking it as `POST /v1/backends` does.

    Its address may end with `/v1`, as that of its OpenAI-compatible API. Adding it again changes nothing.
    """
    address = request.address.rstrip("/").removesuffix("/v1")
    try:
        spec = BackendSpec(url=HttpUrl(address if "://" in address else f"http://{address}"))
    except ValidationError as error:
        message = f"{address!r} is not a valid address"
        raise InvalidFieldError.at("body.address", message, hint="Send HOST:PORT or a URL.") from error
    await service.serving.register(spec)
    verb = "Added" if service.pipeline.started else "Buffered"
    return Answer(status=f"{verb} LLM server address: {request.address}")


@router.post("/clear_llm_server")
async def clear_llm_server(service: ServiceDep) -> Answer:
    """Remove all engines of the default pool."""
    await service.serving.clear("policy")
    which = "all" if service.pipeline.started else "buffered"
    return Answer(status=f"Cleared {which} LLM server addresses")


@router.post("/start", responses=raises(RequestError))
async def start_jobs(service: ServiceDep) -> Answer:
    """Start jobs; a second call without a `/stop` between is refused. A new service starts jobs before the first."""
    if not service.pipeline.start():
        raise RequestError("the server is already running", hint="Send POST /stop first.")
    return Answer(status="Server started successfully")


@router.post("/stop", responses=raises(UnavailableError))
async def stop_jobs(service: ServiceDep) -> Answer:
    """Start no more jobs, cancel all that have not ended, those of other trainers included, and wait for their ends."""
    _require_running(service)
    service.pipeline.stop()
    with anyio.move_on_after(STOP_SECONDS):
        for rollout_id in await service.abort(None):
            await service.store.wait_for_result(rollout_id)
    return Answer(status="Server stopped successfully")


@router.get("/status", responses=raises(UnavailableError))
async def get_status(service: ServiceDep) -> StatusAnswer:
    """Read how many jobs have not ended, and where they are; a stopped server answers 503."""
    _require_running(service)
    counts = await service.store.counts()
    unfinished = sum(count for state, count in counts.items() if not state.terminal)
    stages = service.concurrency.stages
    there = {
        "run_queue": stages.rollout.places.in_use,
        "eval_queue": stages.evaluate.places.in_use,
        "active_init": stages.init.workers.in_use,
        "active_run": stages.rollout.workers.in_use,
        "active_eval": stages.evaluate.workers.in_use,
    }
    waiting = max(0, unfinished - sum(there.values()))  # most of them in the store
    total = waiting + sum(there.values())
    return StatusAnswer(pending_jobs=unfinished, init_queue=waiting, total=total, **there)


def _require_running(service: Service) -> None:
    if not service.pipeline.started:
        raise UnavailableError("the server is not running", hint="Send POST /start first.")


def _tools(service: Service, task: Task) -> list[ToolSpec]:
    if task.environment not in service.environments:
        return []
    return service.environments.get(task.environment).for_instance(task.instance).tool_definitions()
