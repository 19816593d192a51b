"""Routes for the waits of rollouts. They ask the store nothing about work at this node, so they work while it hangs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from api_schemas.base import RolloutId
from api_schemas.views.hangs import HangReport, RolloutActivity
from rollout_service.base.errors import ConflictError, NotFoundError, UnavailableError
from rollout_service.server.api.node_proxy import ask_node, pass_on
from rollout_service.server.api.routes.support.route import ServiceDep, StrictRoute, raises

router = APIRouter(prefix="/v1", tags=["hangs"], route_class=StrictRoute)


@router.get("/hangs", response_model=HangReport, responses=raises(NotFoundError, UnavailableError))
async def get_hangs(
    service: ServiceDep,
    http: Request,
    node: Annotated[
        str | None, Query(max_length=255, description="The node to ask; by default, the one that answers.")
    ] = None,
) -> HangReport | Response:
    """Read the steps that are stuck, slow or held back at a node, with stacks.

    Rollouts that wait for the same thing are one finding. If this does not answer, the service's own report is in its
    state folder: `rollout-service doctor --live` reads it.
    """
    if node is not None and (answer := await ask_node(service, http, node)) is not None:
        return answer
    return service.hangs.report()


@router.get(
    "/rollouts/{rollout_id}/activity",
    response_model=RolloutActivity,
    responses=raises(NotFoundError, ConflictError, UnavailableError),
)
async def get_activity(service: ServiceDep, http: Request, rollout_id: RolloutId) -> RolloutActivity | Response:
    """Read the current steps of a rollout under way, with the stack of the innermost one.

    The node that runs it answers. A rollout that is queued or has ended is a 409.
    """
    if (activity := service.hangs.activity(rollout_id)) is not None:
        return activity
    if (answer := await pass_on(service, http, rollout_id)) is not None:
        return answer
    rollout = await service.get(rollout_id)
    raise ConflictError(
        f"rollout {rollout_id} is not under way here; it is {rollout.state}",
        hint="Its spans and steps say what it did: GET /v1/rollouts/{id} and /v1/rollouts/{id}/steps.",
    )
