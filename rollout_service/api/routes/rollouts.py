"""Rollouts: order them, look at them, wait for them, cancel them."""

from __future__ import annotations

import uuid
from contextlib import suppress
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Body, Query, Request
from fastapi.responses import Response

from api_schemas.base import RolloutId
from api_schemas.inference import AbortRequest
from api_schemas.rollouts import (
    AbortAnswer,
    CancelAnswer,
    Rollout,
    RolloutPage,
    RolloutRequest,
    RolloutState,
)
from api_schemas.trajectories import Trajectory
from rollout_service.api.openapi.responses import extra_response, raises
from rollout_service.api.routes.dependencies import ServiceDep, as_json
from rollout_service.api.routes.disconnects import cancel_on_disconnect
from rollout_service.api.routes.strict import StrictRoute
from rollout_service.errors import ConflictError, NotFoundError
from rollout_service.inference.errors import NoBackendError
from rollout_service.shutdown import ShuttingDownError

router = APIRouter(prefix="/v1", tags=["rollouts"], route_class=StrictRoute)

MAX_WAIT_SECONDS = 3_600.0
CURSOR = r"^[0-9]{1,18}$"


@router.post(
    "/rollouts",
    status_code=HTTPStatus.ACCEPTED,
    response_model=Rollout,
    response_description="The rollout is durable, and has not ended.",
    responses=extra_response(HTTPStatus.OK, Rollout, "The rollout has ended.")
    | raises(ConflictError, NoBackendError),
)
async def submit_rollout(
    service: ServiceDep,
    http: Request,
    request: RolloutRequest,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, description="seconds to wait for its end")] = 0.0,
) -> Response:
    """Order a rollout: 202 once it is durable; with `wait`, 200 and the whole result if it ends in time.

    Idempotent by `rollout_id`: the same order again changes nothing, another order under the same id is a 409.
    """
    rollout_id = request.rollout_id or uuid.uuid4().hex
    rollout = await service.submit(request.model_copy(update={"rollout_id": rollout_id}))
    if wait:
        with suppress(ShuttingDownError):  # the order stands
            if ended := await cancel_on_disconnect(http, lambda: service.wait(rollout_id, wait)):
                return as_json(ended)
    return as_json(rollout, HTTPStatus.ACCEPTED)


@router.get("/rollouts")
async def list_rollouts(
    service: ServiceDep,
    state: RolloutState | None = None,
    cursor: Annotated[
        str | None, Query(pattern=CURSOR, description="`next_cursor` of the page before")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
) -> RolloutPage:
    """A page of rollouts, oldest first, without trajectories."""
    return await service.store.list(state=state, cursor=cursor, limit=limit)


@router.get("/rollouts/{rollout_id}", response_model=Rollout, responses=raises(NotFoundError))
async def get_rollout(
    service: ServiceDep,
    http: Request,
    rollout_id: RolloutId,
    trajectory: bool = False,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, description="seconds to wait for its end")] = 0.0,
) -> Response:
    """A rollout as it stands; with `trajectory=true` with all its tokens."""
    rollout = await service.get(rollout_id, trajectory=trajectory)
    if wait and not rollout.state.terminal:
        ended = await cancel_on_disconnect(http, lambda: service.wait(rollout_id, wait))
        if ended is not None:
            return as_json(ended if trajectory else ended.model_copy(update={"trajectory": None}))
    return as_json(rollout)


@router.get("/rollouts/{rollout_id}/trajectory", response_model=Trajectory, responses=raises(NotFoundError))
async def get_trajectory(service: ServiceDep, rollout_id: RolloutId) -> Response:
    """The token-exact trajectory of a rollout that has ended."""
    trajectory = await service.store.trajectory(rollout_id)
    if trajectory is None:
        rollout = await service.get(rollout_id)
        raise NotFoundError(
            f"rollout {rollout_id} has no trajectory: its state is {rollout.state}",
            hint="Wait until it has ended; one that failed before its first turn has none.",
        )
    return as_json(trajectory)


@router.delete(
    "/rollouts/{rollout_id}",
    status_code=HTTPStatus.ACCEPTED,
    response_model=CancelAnswer,
    response_description="It will be cancelled.",
    responses=extra_response(HTTPStatus.OK, CancelAnswer, "It had ended already."),
)
async def cancel_rollout(service: ServiceDep, rollout_id: RolloutId) -> Response:
    """Cancel a rollout, also one that is yet to be submitted. Idempotent; what has ended stays as it is."""
    state = await service.store.cancel(rollout_id)
    ended = state is not None and state.terminal
    answer = CancelAnswer(rollout_id=rollout_id, was=state)
    return as_json(answer, HTTPStatus.OK if ended else HTTPStatus.ACCEPTED)


@router.post("/abort", status_code=HTTPStatus.ACCEPTED)
async def abort_rollouts(
    service: ServiceDep, request: Annotated[AbortRequest, Body()] = AbortRequest()
) -> AbortAnswer:
    """Cancel the rollouts named, or all that have not ended."""
    return AbortAnswer(cancelled=await service.abort(request.rollout_ids))
