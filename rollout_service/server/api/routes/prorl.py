"""The ProRL Agent server's own routes: a trainer written for it changes only its address.

`/process` blocks until the rollout has ended and answers with `resolved`, `report`, `timing`, and the messages. Their
assistant turns carry `input_ids`, `output_ids`, and `logprobs` as they were sampled, but not those of a rollout without
a reward. The instance's `data_source` names the environment.
"""

from __future__ import annotations

import math
import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, JsonValue, ValidationError

from api_schemas.base import MAX_INT32, Count, Name, Number, RolloutId
from api_schemas.errors import FieldError
from api_schemas.inference import BackendSpec
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Sampling, Stage
from api_schemas.tasks import Limits, Task
from api_schemas.trajectories import Trajectory
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
from rollout_service.server.api.routes.support.strict import StrictRoute
from rollout_service.tokens.errors import RendererMismatchError

router = APIRouter(tags=["ProRL Agent"], route_class=StrictRoute)


class ProcessSampling(BaseModel):
    """The sampling parameters that such a trainer sends; others are ignored, as the ProRL Agent server does."""

    model_config = ConfigDict(extra="ignore")

    temperature: Annotated[float, Number] = Field(1.0, ge=0.0, le=100.0)
    top_p: Annotated[float, Number] = Field(1.0, gt=0.0, le=1.0)
    top_k: Annotated[int, Number] = Field(-1, ge=-1, le=MAX_INT32)
    min_p: Annotated[float, Number] = Field(0.0, ge=0.0, le=1.0)
    max_tokens: Count | None = None
    max_new_tokens: Count | None = None
    max_output_tokens: Count | None = None
    max_iterations: Annotated[int, Number] | None = Field(None, ge=1, le=10_000)
    """The most turns."""

    def sampling(self) -> Sampling:
        """Return them as a rollout's sampling parameters."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)

    def limits(self) -> Limits:
        """Return the limits on a turn's tokens and on turns as a rollout's limits."""
        tokens = self.max_new_tokens or self.max_output_tokens or self.max_tokens
        return Limits(max_turn_tokens=tokens, max_turns=self.max_iterations)


class ProcessInstance(BaseModel):
    """An environment's name, and the data of one problem as further fields."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    __pydantic_extra__: dict[str, JsonValue]

    data_source: Name


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


class ProcessTiming(BaseModel):
    """The seconds that each stage took."""

    init: float
    run: float
    eval: float
    others: float
    timeout: bool


class ProcessAnswer(BaseModel):
    """The outcome of an instance."""

    job_id: str
    resolved: bool
    reward: float | None
    report: dict[str, JsonValue]
    timing: ProcessTiming
    messages: list[dict[str, Any]]
    """Assistant messages carry `input_ids`, `output_ids` and `logprobs`, unless the rollout has no reward."""


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


@router.post("/process", response_model=ProcessAnswer, responses=raises(ConflictError, NoBackendError))
async def process(service: ServiceDep, http: Request, request: ProcessRequest) -> Response:
    """Roll out one instance, and answer once it has ended.

    The rollout continues if you hang up: sending the same `job_id` again waits for it. Without a `job_id` one is
    generated. The instance's `data_source` names the environment.
    """
    instance = request.instance.model_extra or {}
    rollout_id = request.job_id or uuid.uuid4().hex
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
    return JSONResponse(_result(ended))  # without validating every token again, which takes long


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


def _result(rollout: Rollout) -> dict[str, Any]:
    seconds = {stage: sum(s.seconds for s in rollout.spans if s.stage is stage) for stage in Stage}
    queued = sum(span.queued_seconds for span in rollout.spans)
    return {
        "job_id": rollout.rollout_id,
        "resolved": rollout.reward is not None and rollout.reward >= 1.0,
        "reward": rollout.reward,
        "report": {
            "state": rollout.state,
            "stop_reason": rollout.stop_reason,
            "parts": rollout.reward_parts,
            "error": rollout.error.model_dump(mode="json") if rollout.error else None,
        },
        "timing": {
            "init": seconds[Stage.INIT],
            "run": seconds[Stage.ROLLOUT],
            "eval": seconds[Stage.EVALUATE],
            "others": queued,
            "timeout": rollout.error is not None and rollout.error.code == "stage_timeout",
        },
        "messages": _messages(rollout.trajectory, rollout.reward) if rollout.trajectory else [],
    }


def _messages(trajectory: Trajectory, reward: float | None) -> list[dict[str, Any]]:
    """Return the conversation, with the token ids of turn k on its k-th assistant message.

    Without a reward there are no ids: such a trainer reads `resolved`, and would train on them with a reward of zero.
    """
    messages: list[dict[str, Any]] = [message.model_dump(mode="json") for message in trajectory.messages]
    if reward is None:
        return messages
    assistants = iter([message for message in messages if message["role"] == "assistant"])
    for segment in trajectory.segments:
        turns = sorted({turn for turn in segment.turn_ids if turn >= 0})
        for turn, message in zip(turns, assistants, strict=False):
            start = segment.turn_ids.index(turn)
            end = start + segment.turn_ids.count(turn)
            message["input_ids"] = segment.token_ids[:start]
            message["output_ids"] = segment.token_ids[start:end]
            message["logprobs"] = segment.logprobs[start:end]
    return messages
