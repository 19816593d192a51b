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

import structlog
from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, JsonValue, ValidationError

from api_schemas.base import MAX_INT32, Count, Flag, Name, Number, RolloutId, Signed
from api_schemas.errors import FieldError
from api_schemas.inference import BackendSpec
from api_schemas.rollouts import RolloutRequest, RolloutState, Sampling, Stage
from api_schemas.tasks import Limits, Task
from rollout_service.base.errors import ConflictError, InvalidFieldError
from rollout_service.base.shutdown import ShuttingDownError
from rollout_service.engines.errors import (
    BackendProtocolError,
    BackendRejected,
    BackendUnreachable,
    NoBackendError,
)
from rollout_service.http.requests import CLIENT_CLOSED_REQUEST, cancel_on_disconnect
from rollout_service.server.api.openapi_responses import raises
from rollout_service.server.api.routes.support.dependencies import ServiceDep
from rollout_service.server.api.routes.support.prorl_answers import ProcessAnswer, process_answer
from rollout_service.server.api.routes.support.strict import StrictRoute
from rollout_service.server.lifecycle import Service
from rollout_service.tokens import ToolSpec
from rollout_service.tokens.errors import RendererMismatchError

log = structlog.get_logger(__name__)

router = APIRouter(tags=["ProRL Agent"], route_class=StrictRoute)


class ProcessSampling(BaseModel):
    """The sampling parameters that such a trainer sends, with that server's defaults; others have no effect."""

    model_config = ConfigDict(extra="allow")

    temperature: Annotated[float, Number] = Field(0.0, ge=0.0, le=100.0)
    top_p: Annotated[float, Number] = Field(1.0, gt=0.0, le=1.0)
    top_k: Annotated[int, Number] = Field(-1, ge=-1, le=MAX_INT32)
    min_p: Annotated[float, Number] = Field(0.0, ge=0.0, le=1.0)
    seed: Signed | None = None
    stop: list[str] = []
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
        """Return them as a rollout's sampling parameters."""
        return Sampling(**self.model_dump(include=set(Sampling.model_fields)))

    def limits(self) -> Limits:
        """Return the limits on tokens and on turns as a rollout's limits."""
        tokens = self.max_new_tokens or self.max_output_tokens or self.max_tokens
        context = self.max_model_len if self.token_level_generation else None
        return Limits(max_turn_tokens=context or tokens, max_tokens=context, max_turns=self.max_iterations)


HARMLESS = {"model", "api_key", "modify_params", "log_completions", "native_tool_calling", "custom_tokenizer"}
HARMLESS |= {"strict_loop_detector", "ensure_thinking_end_properly"}
"""Sampling parameters that such a trainer always sends, and which engines and chat formats settle here."""


@lru_cache(maxsize=64)
def _note_ignored(names: tuple[str, ...]) -> None:
    """Log, once, that sampling parameters have no effect."""
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
    """The command was carried out."""

    status: Literal["success"] = "success"


class CancelJobAnswer(Answer):
    """The job, and the state that it was in; null if the job is not known yet."""

    job_id: str
    was: RolloutState | None


class AddServerAnswer(Answer):
    """The engine that was added."""

    address: str
    backend_id: str


class ClearServersAnswer(Answer):
    """The number of engines that were removed."""

    removed: int


class StopAnswer(Answer):
    """The jobs that will be cancelled."""

    cancelled: list[str]


class StatusAnswer(BaseModel):
    """The number of jobs in each stage."""

    status: Literal["running", "stopped"]
    running: bool
    pending_jobs: int
    jobs: int
    init: int
    run: int
    eval: int


@router.post(
    "/process",
    response_model=ProcessAnswer,
    responses=raises(ConflictError, NoBackendError),
)
async def process(service: ServiceDep, http: Request, request: ProcessRequest) -> Response:
    """Roll out one instance, and answer once it has ended: a failure too with a 200, a cancelled job with a 500.

    The rollout continues if you hang up: sending the same `job_id` again waits for it. Without a `job_id` one is
    generated. The instance's `data_source` names the environment.
    """
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
        # A caller that named no job needs this id to ask for the same job again.
        raise ShuttingDownError(context={"job_id": rollout_id}) from error
    if ended is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if ended.state is RolloutState.CANCELLED:
        raise HTTPException(HTTPStatus.INTERNAL_SERVER_ERROR, f"job {rollout_id} was cancelled")
    return JSONResponse(process_answer(ended, _tools(service, ended.task)))


@router.post("/cancel")
async def cancel_job(service: ServiceDep, request: JobRequest) -> CancelJobAnswer:
    """Cancel a job; one that has not been submitted yet is cancelled when it arrives."""
    was = await service.store.cancel(request.job_id)
    return CancelJobAnswer(job_id=request.job_id, was=was)


@router.post(
    "/add_llm_server",
    responses=raises(BackendUnreachable, BackendRejected, BackendProtocolError, RendererMismatchError),
)
async def add_llm_server(service: ServiceDep, request: ServerRequest) -> AddServerAnswer:
    """Add an engine to the default pool, after checking it as `POST /v1/backends` does.

    Its address may end with `/v1`, as that of its OpenAI-compatible API.
    """
    address = request.address.rstrip("/").removesuffix("/v1")
    try:
        spec = BackendSpec(url=HttpUrl(address if "://" in address else f"http://{address}"))
    except ValidationError as error:
        message = f"{address!r} is not a valid address"
        raise InvalidFieldError(
            [FieldError(path="body.address", message=message)], hint="Send HOST:PORT or a URL."
        ) from error
    view = await service.serving.register(spec)
    return AddServerAnswer(address=request.address, backend_id=view.backend_id)


@router.post("/clear_llm_server")
async def clear_llm_server(service: ServiceDep) -> ClearServersAnswer:
    """Remove all engines of the default pool."""
    return ClearServersAnswer(removed=await service.serving.clear("policy"))


@router.post("/start")
async def start_jobs(service: ServiceDep) -> Answer:
    """Start queued jobs, after a `/stop`."""
    service.pipeline.start()
    return Answer()


@router.post("/stop")
async def stop_jobs(service: ServiceDep) -> StopAnswer:
    """Start no more jobs, and cancel those that run or wait."""
    service.pipeline.stop()
    return StopAnswer(cancelled=await service.abort(None))


@router.get("/status")
async def get_status(service: ServiceDep) -> StatusAnswer:
    """Read whether jobs are started, and how many are in each stage."""
    counts = await service.store.counts()
    stages = {stage.value: counts.get(RolloutState(stage.value), 0) for stage in Stage}
    return StatusAnswer(
        status="running" if service.pipeline.started else "stopped",
        running=service.pipeline.started,
        pending_jobs=counts.get(RolloutState.QUEUED, 0),
        jobs=service.pipeline.live(),
        init=stages["init"],
        run=stages["rollout"],
        eval=stages["evaluate"],
    )


def _tools(service: Service, task: Task) -> list[ToolSpec]:
    """Return the definitions of a task's tools; none for an environment that only other nodes have."""
    if task.environment not in service.environments:
        return []
    return service.environments.get(task.environment).for_instance(task.instance).tool_definitions()
