"""Routes that submit, read, wait for, and cancel rollouts."""

from __future__ import annotations

import uuid
from contextlib import suppress
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Body, Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from api_schemas.base import MAX_INT32, RolloutId
from api_schemas.exports import EXPORT_MEDIA_TYPE
from api_schemas.external import RolloutEnd
from api_schemas.inference import AbortRequest
from api_schemas.rollouts import (
    AbortAnswer,
    CancelAnswer,
    Rollout,
    RolloutPage,
    RolloutRequest,
    RolloutState,
)
from api_schemas.rollouts.steps import RolloutSteps
from api_schemas.rollouts.tokens import RolloutMessages
from api_schemas.rollouts.trees import AgentNode, RolloutNodes
from api_schemas.runs import RunId
from api_schemas.trajectories import Trajectory
from rollout_service.base.errors import ConflictError, InvalidFieldError, NotFoundError, StoreError, UnavailableError
from rollout_service.base.shutdown import ShuttingDownError
from rollout_service.engines.errors import NoBackendError
from rollout_service.http.keyring import Role
from rollout_service.http.requests import cancel_on_disconnect
from rollout_service.server.api.node_proxy import pass_on, wait_for_access
from rollout_service.server.api.routes.support.route import (
    ServiceDep,
    StrictRoute,
    as_json,
    extra_response,
    media_response,
    raises,
    role_of,
    trace_of,
)
from rollout_service.server.lifecycle import Service
from rollout_service.server.trajectories import NO_TRAJECTORY_HINT, find_node

router = APIRouter(prefix="/v1", tags=["rollouts"], route_class=StrictRoute)

MAX_WAIT_SECONDS = 3_600.0
CURSOR = r"^[0-9bx]{1,18}(\.[0-9bx]{1,18}){0,15}$"
_ATTEMPTS = media_response("One `RolloutAttempts` per line.", EXPORT_MEDIA_TYPE)


@router.post(
    "/rollouts",
    status_code=HTTPStatus.ACCEPTED,
    response_model=Rollout,
    response_description="The rollout is stored durably and has not ended.",
    responses=extra_response(HTTPStatus.OK, Rollout, "The rollout has ended.") | raises(ConflictError, NoBackendError),
)
async def submit_rollout(
    service: ServiceDep,
    http: Request,
    request: RolloutRequest,
    wait: Annotated[
        float, Query(ge=0, le=MAX_WAIT_SECONDS, description="Seconds to wait for the rollout to end.")
    ] = 0.0,
) -> Response:
    """Submit one attempt at one task.

    Answers 202 as soon as the rollout is stored durably: from then on it survives any crash. With `wait`, the request
    stays open, and answers 200 with the whole result, trajectory included, if the rollout ends in time.

    Idempotent by `rollout_id`: repeating the same request changes nothing, and a different request under the same id is
    a 409. Leave `rollout_id` out to get a generated one. An unknown environment, or an instance that the environment
    rejects, is a 422 that names the field. The rollout's trace continues that of the header `traceparent`.
    """
    rollout_id = request.rollout_id or uuid.uuid4().hex
    known = {"rollout_id": rollout_id, "trace": request.trace or trace_of(http)}
    rollout = await service.submit(request.model_copy(update=known))
    if wait and rollout.state.terminal:  # submitted before; reading it may take longer than the caller waits
        return as_json(await service.get(rollout_id, trajectory=True))
    if wait:
        with suppress(ShuttingDownError, StoreError):  # the rollout is stored already
            if ended := await cancel_on_disconnect(http.receive, lambda: service.wait(rollout_id, wait)):
                return as_json(ended)
            rollout = await service.get(rollout_id, trajectory=True)
            if rollout.state.terminal:  # just as the time was over
                return as_json(rollout)
    return as_json(rollout, HTTPStatus.ACCEPTED)


@router.get("/rollouts")
async def list_rollouts(
    service: ServiceDep,
    state: Annotated[RolloutState | None, Query(description="List only rollouts in this state.")] = None,
    cursor: Annotated[str | None, Query(pattern=CURSOR, description="The previous page's `next_cursor`.")] = None,
    limit: Annotated[int, Query(ge=1, le=1_000, description="Rollouts per page.")] = 100,
) -> RolloutPage:
    """List rollouts, oldest first, without their trajectories and sub-agents.

    To get the next page, pass `next_cursor` as `cursor`; it is null on the last page. `counts` has the number of
    rollouts in each state, whatever `state` selects.
    """
    return await service.store.list(state=state, cursor=cursor, limit=limit)


@router.get("/rollouts/{rollout_id}", response_model=Rollout, responses=raises(NotFoundError))
async def get_rollout(
    service: ServiceDep,
    http: Request,
    rollout_id: RolloutId,
    trajectory: Annotated[
        bool, Query(description="Include the trajectory: every token with its log-probability.")
    ] = False,
    wait: Annotated[
        float, Query(ge=0, le=MAX_WAIT_SECONDS, description="Seconds to wait for what `until` says.")
    ] = 0.0,
    until: Annotated[
        Literal["ended", "access"],
        Query(description="What to wait for: the end, or also that an external agent may begin."),
    ] = "ended",
) -> Response:
    """Read a rollout: its state and, once it has ended, its reward, usage, timings, and error.

    With `wait`, the request stays open until the rollout ends or the time is up, and then answers with its current
    state. A `rollout_id` that was never submitted is a 404.

    While the agent of a rollout with `agent` set to `external` may work, `access` has the gateway's URL and key for it.
    It is shown to keys that may submit rollouts: by the node that runs the rollout, and with `until=access` by all.
    """
    rollout = await service.get(rollout_id, trajectory=trajectory)
    if wait and until == "access" and not rollout.state.terminal:
        elsewhere = await cancel_on_disconnect(http.receive, lambda: wait_for_access(service, http, rollout_id, wait))
        if elsewhere is not None:
            return elsewhere
        rollout = await service.get(rollout_id)
    elif wait and not rollout.state.terminal:
        ended = await cancel_on_disconnect(http.receive, lambda: service.wait(rollout_id, wait, trajectory=trajectory))
        rollout = ended or await service.get(rollout_id, trajectory=trajectory)
    if rollout.access is not None and not role_of(http).allows(Role.SUBMIT):
        rollout = rollout.model_copy(update={"access": None})
    return as_json(rollout)


@router.post(
    "/rollouts/{rollout_id}/end",
    status_code=HTTPStatus.ACCEPTED,
    response_model=Rollout,
    response_description="The report is taken; the rollout goes on to its evaluation.",
    responses=raises(NotFoundError, ConflictError, UnavailableError),
)
async def end_rollout(service: ServiceDep, http: Request, rollout_id: RolloutId, end: RolloutEnd) -> Response:
    """Report that the external agent of a rollout has ended.

    With a `reward`, that is the score. Without one, the environment scores the outcome: the `answer`, or the policy's
    last text. With an `error`, the rollout fails. Any node takes it. The same
    report may be sent again, to the same node also once the stage or the rollout has ended. Any other report about an
    attempt that is over, or one that contradicts an earlier one, is a 409.
    """
    try:
        return as_json(await service.end(rollout_id, end), HTTPStatus.ACCEPTED)
    except NotFoundError:
        elsewhere = await pass_on(service, http, rollout_id, body=end.model_dump_json().encode())
        if elsewhere is None:
            raise
        return elsewhere


@router.get("/rollouts/{rollout_id}/trajectory", response_model=Trajectory, responses=raises(NotFoundError))
async def get_trajectory(service: ServiceDep, rollout_id: RolloutId) -> Response:
    """Read the token-exact trajectory of a rollout that has ended.

    A 404 means that the rollout is unknown, still running, or failed before its first turn; the problem says which.
    """
    return as_json(await _trajectory(service, rollout_id))


async def _trajectory(service: Service, rollout_id: str) -> Trajectory:
    trajectory = await service.store.trajectory(rollout_id)
    if trajectory is None:
        rollout = await service.get(rollout_id)
        raise NotFoundError(
            f"rollout {rollout_id} has no trajectory; its state is {rollout.state}",
            hint=NO_TRAJECTORY_HINT,
        )
    return trajectory


@router.get("/rollouts/{rollout_id}/messages", response_model=RolloutMessages, responses=raises(NotFoundError))
async def get_messages(
    service: ServiceDep,
    rollout_id: RolloutId,
    node: Annotated[
        int | None,
        Query(ge=1, le=MAX_INT32, description="The number of the sub-agent whose messages to read."),
    ] = None,
) -> Response:
    """Read the conversation of a rollout that has ended, without its tokens.

    A 404 means the same as for its trajectory. With `node`, it also means that the rollout has no such sub-agent, or
    that the sub-agent's trajectory is not stored.
    """
    if node is None:
        trajectory = await _trajectory(service, rollout_id)
    else:
        trajectory = _stored(find_node(await service.tree(rollout_id, trajectories=True), node))
    return as_json(
        RolloutMessages(
            rollout_id=rollout_id,
            node=node,
            messages=trajectory.messages,
            finish_reasons=trajectory.finish_reasons,
        )
    )


@router.get("/rollouts/{rollout_id}/nodes", response_model=RolloutNodes, responses=raises(NotFoundError))
async def get_rollout_nodes(service: ServiceDep, rollout_id: RolloutId) -> Response:
    """Read the sub-agents of a rollout that has ended, and how the work was divided among them.

    They are without their trajectories, and do not depend on the exports of the rollout's request. A rollout whose
    agent assigned nothing has none. A 404 means that the rollout is unknown or has not ended.
    """
    return as_json(await service.tree(rollout_id))


@router.get("/rollouts/{rollout_id}/nodes/{number}", response_model=AgentNode, responses=raises(NotFoundError))
async def get_rollout_node(
    service: ServiceDep,
    rollout_id: RolloutId,
    number: Annotated[int, Path(ge=1, le=MAX_INT32, description="The number at the end of the sub-agent's `node_id`.")],
) -> Response:
    """Read one sub-agent of a rollout that has ended.

    Its trajectory is there if the request asked for it (`exports.nodes` is `tokens`) and the rollout's tokens are still
    stored. A 404 means that the rollout is unknown, has not ended, or has no such sub-agent.
    """
    return as_json(find_node(await service.tree(rollout_id, trajectories=True), number))


def _stored(node: AgentNode) -> Trajectory:
    if node.trajectory is None:
        raise NotFoundError(
            f"the trajectory of sub-agent {node.node_id} is not stored",
            hint="Set exports.nodes to `tokens` in the request to keep it.",
        )
    return node.trajectory


@router.get("/rollouts/{rollout_id}/steps", response_model=RolloutSteps, responses=raises(NotFoundError))
async def get_rollout_steps(service: ServiceDep, http: Request, rollout_id: RolloutId) -> Response:
    """Read the steps of a rollout, over all its attempts.

    For a rollout under way, the node that runs it answers with the steps that have ended so far. Each engine's step
    names the request in the engine's log. A 404 means that the rollout is unknown. One that has not begun has no steps,
    nor has one whose content was deleted on a user's demand.
    """
    rollout = await service.get(rollout_id)
    if not rollout.state.terminal and (elsewhere := await pass_on(service, http, rollout_id)) is not None:
        return elsewhere
    return as_json(await service.steps.of_rollout(rollout_id))


@router.get("/steps", response_class=StreamingResponse, responses=_ATTEMPTS | raises(NotFoundError))
async def get_steps(
    service: ServiceDep,
    run: Annotated[RunId | None, Query(description="The run whose rollouts to read.")] = None,
    rollout: Annotated[
        list[RolloutId] | None,
        Query(max_length=1_000, description="The ids of the rollouts to read, each as a parameter of its own."),
    ] = None,
) -> StreamingResponse:
    """Read the steps of many rollouts: those of a run, or those that are named.

    The answer streams one `RolloutAttempts` per line, with the steps as columns. Rollouts without steps have no line;
    of rollouts under way at another node, it has only their earlier attempts.
    """
    if (run is None) == (rollout is None):
        raise InvalidFieldError.at(
            "query.run", "name either a run or rollouts", hint="Pass run=RUN, or rollout=ID once for each rollout."
        )
    ids = await service.steps.of_run(run) if run is not None else list(dict.fromkeys(rollout or ()))
    return StreamingResponse(service.steps.lines(ids), media_type=EXPORT_MEDIA_TYPE)


@router.delete(
    "/rollouts/{rollout_id}",
    status_code=HTTPStatus.ACCEPTED,
    response_model=CancelAnswer,
    response_description="The rollout will be cancelled.",
    responses=extra_response(HTTPStatus.OK, CancelAnswer, "The rollout had already ended; nothing changes."),
)
async def cancel_rollout(service: ServiceDep, rollout_id: RolloutId) -> Response:
    """Cancel a rollout, whatever stage it is in.

    Answers 202 if the rollout will be cancelled, and 200 if it had already ended; a rollout that has ended keeps its
    result. Cancelling an id before it is submitted is allowed: the rollout then ends as `cancelled` when it arrives.
    Idempotent.
    """
    state = await service.store.cancel(rollout_id)
    ended = state is not None and state.terminal
    answer = CancelAnswer(rollout_id=rollout_id, was=state)
    return as_json(answer, HTTPStatus.OK if ended else HTTPStatus.ACCEPTED)


@router.post("/abort", status_code=HTTPStatus.ACCEPTED)
async def abort_rollouts(service: ServiceDep, request: Annotated[AbortRequest, Body()] = AbortRequest()) -> AbortAnswer:
    """Cancel several rollouts at once: those in `rollout_ids`, or, without a list, all that have not ended.

    Answers with the ids of the rollouts that will be cancelled.
    """
    return AbortAnswer(cancelled=await service.abort(request.rollout_ids))
