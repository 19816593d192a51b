"""Routes that open, list, end, judge and delete live sessions, and try a candidate's weights on a share of new ones.

The calls of their agents go to an app of their own.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Request

from api_schemas.base import Name
from api_schemas.sessions import (
    Canary,
    DeletedSessions,
    FeedbackAnswer,
    FeedbackByVersion,
    LiveSession,
    OpenedSession,
    SessionFeedback,
    SessionPage,
    SessionRequest,
)
from rollout_service.base.errors import ConflictError, InvalidFieldError, NotFoundError
from rollout_service.engines.errors import NoBackendError
from rollout_service.live.register import RateLimitedError
from rollout_service.server.api.routes.support.route import ServiceDep, StrictRoute, raises

router = APIRouter(prefix="/v1", tags=["sessions"], route_class=StrictRoute)

IdInPath = Annotated[str, Path(min_length=1, max_length=256, description="The session's id, escaped.")]


@router.post(
    "/sessions",
    response_description="The session, with its key if it is new.",
    responses=raises(ConflictError, NoBackendError, RateLimitedError),
)
async def open_session(service: ServiceDep, http: Request, request: SessionRequest) -> OpenedSession:
    """Open a live session for a user's own agent, and return its URL and key.

    The agent uses both in place of a model provider's: below the URL are the APIs of OpenAI (`<url>/v1`), Anthropic and
    Google. The key is shown only once. Sending the same `session_id` again returns the session, and null for the key.
    """
    session, key = await service.live.sessions.open(request)
    base = str(http.base_url).rstrip("/")
    return OpenedSession(session=session, url=f"{base}/v1/sessions/{quote(session.session_id, safe='')}", key=key)


@router.get("/sessions")
async def list_sessions(
    service: ServiceDep,
    cursor: Annotated[str | None, Query(max_length=2_000, description="The previous page's `next_cursor`.")] = None,
    limit: Annotated[int, Query(ge=1, le=1_000, description="Sessions per page.")] = 100,
    is_open: Annotated[
        bool | None, Query(alias="open", description="List only open sessions, or only closed ones.")
    ] = None,
) -> SessionPage:
    """List sessions, the newest first, without their turns; `counts` has the turns of all sessions."""
    return await service.live.sessions.page(cursor, limit, is_open=is_open)


@router.delete("/sessions")
async def delete_sessions(
    service: ServiceDep,
    user: Annotated[str, Query(min_length=1, max_length=256, description="The user's name, or its hash.")],
    tenant: Annotated[
        Name | None,
        Query(description="The user's tenant, which is needed if several have a user of this name."),
    ] = None,
) -> DeletedSessions:
    """Delete all sessions of a user, and everything that was recorded, judged, or not delivered yet.

    The answer lists the parts that a trainer had leased before.
    """
    return await service.live.sessions.delete(user=user, tenant=tenant)


@router.get("/sessions/canary")
async def list_canaries(service: ServiceDep) -> list[Canary]:
    """List the canaries of this node by pool."""
    return list(service.live.canaries.list())


@router.put("/sessions/canary", responses=raises(InvalidFieldError, NoBackendError))
async def set_canary(service: ServiceDep, canary: Canary) -> Canary:
    """Send a share of a pool's new sessions to the pool that serves a candidate for its weights.

    Each session stays where it began. Setting another share replaces the one before. While no engine serves the
    candidate, all new sessions go to the pool itself. Needs the role `admin`.
    """
    for pool in (canary.pool, canary.candidate):
        service.serving.check(pool)
    await service.live.canaries.set(canary)
    return canary


@router.delete("/sessions/canary", status_code=HTTPStatus.NO_CONTENT)
async def remove_canary(
    service: ServiceDep,
    pool: Annotated[Name, Query(description="The pool that sessions ask for.")] = "policy",
) -> None:
    """Send all new sessions of a pool to itself again. Open ones stay where they began. Idempotent.

    Needs the role `admin`.
    """
    await service.live.canaries.remove(pool)


@router.get("/sessions/feedback")
async def get_feedback(service: ServiceDep) -> list[FeedbackByVersion]:
    """Read how turns were judged, by the pool and the version that sampled them; removed sessions are included."""
    return list(await service.live.store.feedback())


@router.post("/sessions/{session_id:path}/end", responses=raises(NotFoundError))
async def end_session(service: ServiceDep, session_id: IdInPath) -> LiveSession:
    """End a session. Its requests are answered with 410 from now on; its last turns are judged and delivered."""
    return await service.live.sessions.end(session_id)


@router.post("/sessions/{session_id:path}/feedback", responses=raises(ConflictError, NotFoundError))
async def give_feedback(service: ServiceDep, session_id: IdInPath, feedback: SessionFeedback) -> FeedbackAnswer:
    """Say how good an answer was; this wins over the judge.

    Without `turn` it is the last main turn that was delivered. The same feedback again changes nothing, and another
    value for the same turn is a 409. Once a run has the turn, feedback is kept as a revision and changes no batch.
    """
    return await service.live.sessions.feedback(session_id, feedback)


@router.get("/sessions/{session_id:path}", responses=raises(NotFoundError))
async def get_session(service: ServiceDep, session_id: IdInPath) -> LiveSession:
    """Read a session with its turns: the value of each, and whether it is trained on."""
    return await service.live.sessions.get(session_id)


@router.delete("/sessions/{session_id:path}", responses=raises(NotFoundError))
async def delete_session(service: ServiceDep, session_id: IdInPath) -> DeletedSessions:
    """Delete a session, and everything that was recorded of it; the answer lists the parts that a trainer had leased
    before."""
    return await service.live.sessions.delete(session_id=session_id)
