"""Lists that stay fast however long. Answers are shared by readers who send `Cache-Control: max-age=SECONDS`."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from api_schemas.runs import RunId
from api_schemas.runs.history import GroupPage, RunHistory
from api_schemas.views.summaries import SummaryOrder, SummaryPage, SummaryQuery
from rollout_service.base.errors import InvalidFieldError, NotFoundError
from rollout_service.server.api.routes.support.route import ServiceDep, as_json, raises
from rollout_service.server.api.routes.support.shared_answers import SharedRoute
from rollout_service.store.lists_contract import GroupSelection

router = APIRouter(prefix="/v1", route_class=SharedRoute)

Order = Annotated[SummaryOrder, Query(description="Which end of the list comes first.")]
Cursor = Annotated[
    str | None, Query(max_length=32, description="The previous page's `next_cursor`, for the same order.")
]


@router.get("/summaries", tags=["rollouts"], response_model=SummaryPage)
async def list_summaries(service: ServiceDep, query: Annotated[SummaryQuery, Query()]) -> Response:
    """List rollouts as short rows, the newest first, with all that these filters select.

    A page costs the same however many rollouts there are. If few match, it can be short, or even empty, although there
    are more: go on while `next_cursor` is not null. `matching` is there for lists of everything and by state alone.
    """
    page = await service.store.summaries(query, order=query.order, cursor=query.cursor, limit=query.limit)
    return as_json(page)


@router.get("/runs/{run_id}/groups", tags=["runs"], response_model=GroupPage, responses=raises(NotFoundError))
async def list_groups(
    service: ServiceDep,
    run_id: RunId,
    state: Annotated[
        Literal["open", "ready", "batched", "acknowledged", "dropped"] | None,
        Query(description="Only groups in this state."),
    ] = None,
    reason: Annotated[
        str | None, Query(max_length=256, description="Only groups that were dropped for this reason.")
    ] = None,
    order: Order = "newest",
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=200, description="Groups per page.")] = 50,
) -> Response:
    """List the groups of a run with their samples, those that started last first.

    What is known of a group outlives its rollouts, which retention deletes: then it has no samples. If few match, a
    page can be short, or even empty, although there are more: go on while `next_cursor` is not null.
    """
    if reason is not None and state not in (None, "dropped"):
        raise InvalidFieldError.at(
            "query.reason", "only dropped groups have a reason", hint="Leave `state` or `reason` out."
        )
    which = GroupSelection(state="dropped" if reason is not None else state, reason=reason)
    page = await service.store.runs.group_page(run_id, which, order=order, cursor=cursor, limit=limit)
    return as_json(page)


@router.get("/runs/{run_id}/history", tags=["runs"], response_model=RunHistory, responses=raises(NotFoundError))
async def get_history(
    service: ServiceDep,
    run_id: RunId,
    points: Annotated[int, Query(ge=1, le=1_000, description="The most intervals to return.")] = 100,
) -> Response:
    """Read how a run went, as columns with one entry for each interval of closed groups, the oldest first.

    Each interval has about as many groups. A group is there from when it closes, for as long as the run is kept.
    """
    return as_json(await service.store.runs.history(run_id, points=points))
