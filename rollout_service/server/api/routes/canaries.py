"""Routes that try a candidate's weights on a share of a pool's new live sessions, and that say how users took them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query

from api_schemas.base import Name
from api_schemas.sessions import Canary, FeedbackByVersion
from rollout_service.base.errors import InvalidFieldError
from rollout_service.engines.errors import NoBackendError
from rollout_service.server.api.routes.support.route import ServiceDep, StrictRoute, raises

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=StrictRoute)


@router.get("/canary")
async def list_canaries(service: ServiceDep) -> list[Canary]:
    """List the canaries of this node by pool."""
    return list(service.live.canaries.list())


@router.put("/canary", responses=raises(InvalidFieldError, NoBackendError))
async def set_canary(service: ServiceDep, canary: Canary) -> Canary:
    """Send a share of a pool's new sessions to the pool that serves a candidate for its weights.

    Each session stays where it began. Setting another share replaces the one before. While no engine serves the
    candidate, all new sessions go to the pool itself. Needs the role `admin`.
    """
    for pool in (canary.pool, canary.candidate):
        service.serving.check(pool)
    await service.live.canaries.set(canary)
    return canary


@router.delete("/canary", status_code=HTTPStatus.NO_CONTENT)
async def remove_canary(
    service: ServiceDep,
    pool: Annotated[Name, Query(description="The pool that sessions ask for.")] = "policy",
) -> None:
    """Send all new sessions of a pool to itself again. Open ones stay where they began. Idempotent.

    Needs the role `admin`.
    """
    await service.live.canaries.remove(pool)


@router.get("/feedback")
async def get_feedback(service: ServiceDep) -> list[FeedbackByVersion]:
    """Read how turns were judged, by the pool and the version that sampled them; removed sessions are included."""
    return list(await service.live.store.feedback())
