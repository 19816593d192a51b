"""Trajectories for looking at, and as a file. Large answers are compressed in a thread, if the client accepts it."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated

import anyio.to_thread
import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel

from api_schemas.base import MAX_INT32, RolloutId
from api_schemas.rollouts import Rollout
from api_schemas.rollouts.tokens import RolloutMessages, TokenRange, TrajectoryOutline
from api_schemas.trajectories import Trajectory
from api_schemas.views.summaries import SummaryFilter, SummaryPage
from rollout_service import __version__
from rollout_service.base.errors import NotFoundError
from rollout_service.server.api.routes.support.route import ServiceDep, StrictRoute, media_response, raises
from rollout_service.server.dashboard.saved_page import saved_page
from rollout_service.server.lifecycle import Service
from rollout_service.server.trajectories import MAX_RANGE

router = APIRouter(prefix="/v1", tags=["rollouts"], route_class=StrictRoute)

COMPRESSED_FROM_BYTES = 4_096
FASTEST = 1
"""The other levels take several times as long for a tenth less."""
FILE_HEADERS = {
    "Content-Security-Policy": "sandbox",  # if a browser shows it after all: no script, not our origin
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

NodeQuery = Annotated[
    int | None, Query(ge=1, le=MAX_INT32, description="The number of a sub-agent, for its trajectory.")
]


@router.get("/rollouts/{rollout_id}/outline", response_model=TrajectoryOutline, responses=raises(NotFoundError))
async def get_outline(service: ServiceDep, http: Request, rollout_id: RolloutId, node: NodeQuery = None) -> Response:
    """Read a trajectory without its tokens: its segments, their turns, and where each one leaves its parent.

    A 404 means that the rollout is unknown, has not ended, or has no trajectory.
    """
    answer = await service.trajectories.outline(rollout_id, node)
    return await _compressed(http, lambda: answer.model_dump_json().encode())


@router.get("/rollouts/{rollout_id}/tokens", response_model=TokenRange, responses=raises(NotFoundError))
async def get_tokens(
    service: ServiceDep,
    http: Request,
    rollout_id: RolloutId,
    segment: Annotated[int, Query(ge=0, le=MAX_INT32, description="The segment's number.")] = 0,
    start: Annotated[int, Query(ge=0, le=MAX_INT32, description="The first token.")] = 0,
    count: Annotated[int, Query(ge=1, le=MAX_RANGE, description="The most tokens to return.")] = 2_000,
    node: NodeQuery = None,
) -> Response:
    """Read a range of a trajectory's tokens as columns: ids, text, mask, versions, turns and log-probabilities.

    The text is made from the tokens' bytes, and `ends` says where each token ends in it. It is null if the tokenizer of
    the rollout's pool is not known to this service. A range that begins behind the segment's end is empty.
    """
    answer = await service.trajectories.tokens(rollout_id, segment, start, count, node)
    return await _compressed(http, lambda: answer.model_dump_json().encode())


@router.get(
    "/rollouts/{rollout_id}/page",
    response_class=Response,
    responses=media_response("The file.", "text/html") | raises(NotFoundError),
)
async def get_page(service: ServiceDep, http: Request, rollout_id: RolloutId) -> Response:
    """Read the page of a rollout that has ended as one HTML file, to send or to keep.

    It shows the same as the service's own page, tokens and sub-agents included, without network and service.
    A 404 means that the rollout is unknown or has not ended.
    """
    content = await saved_rollout(service, rollout_id)
    answer = await _compressed(http, lambda: content, "text/html")
    answer.headers.update(FILE_HEADERS | {"Content-Disposition": f'attachment; filename="{rollout_id}.html"'})
    return answer


async def _compressed(http: Request, make: Callable[[], bytes], media_type: str = "application/json") -> Response:
    accepts = any(
        coding.strip().partition(";")[0] == "gzip" and "q=0" not in coding.replace(" ", "").split(";")[1:]
        for coding in http.headers.get("accept-encoding", "").lower().split(",")
    )

    def encode() -> tuple[bytes, bool]:
        content = make()
        if accepts and len(content) >= COMPRESSED_FROM_BYTES:
            return gzip.compress(content, FASTEST, mtime=0), True
        return content, False

    content, is_compressed = await anyio.to_thread.run_sync(encode)
    headers = {"Vary": "Accept-Encoding"} | ({"Content-Encoding": "gzip"} if is_compressed else {})
    return Response(content, media_type=media_type, headers=headers)


# The API's answers for the page of a rollout, for a file, under the paths by which the page asks for them.

Answers = dict[str, BaseModel]


async def saved_rollout(service: Service, rollout_id: str) -> bytes:
    """Return the page of a rollout that has ended as one HTML file.

    Raises:
        NotFoundError: There is no such rollout, or it has not ended.
    """
    rollout = await service.get(rollout_id)
    answers = await _answers(service, rollout)
    about = {"rollout_id": rollout_id, "saved_at": datetime.now(UTC), "version": __version__}

    def write() -> bytes:
        texts = {path: answer.model_dump_json().encode() for path, answer in answers.items()}
        return saved_page(f"Rollout {rollout_id}", {"about": orjson.dumps(about)} | texts)

    return await anyio.to_thread.run_sync(write)


async def _answers(service: Service, rollout: Rollout) -> Answers:
    path = f"v1/rollouts/{rollout.rollout_id}"
    tree = await service.tree(rollout.rollout_id, trajectories=True)
    without = [node.model_copy(update={"trajectory": None}) for node in tree.nodes]
    answers: Answers = {
        path: rollout,
        f"{path}/steps": await service.steps.of_rollout(rollout.rollout_id),
        f"{path}/nodes": tree.model_copy(update={"nodes": without}),
        "v1/summaries": await _row(service, rollout),
    }
    trajectory = await service.store.trajectory(rollout.rollout_id)
    shown: list[tuple[Trajectory | None, str, int | None]] = [(trajectory, rollout.pool, None)]
    shown += [(one.trajectory, one.pool, int(one.node_id.rpartition("/")[2])) for one in tree.nodes]
    for trajectory, pool, node in shown:
        if trajectory is not None:
            outline, tokens = await service.trajectories.whole(trajectory, rollout, pool, node)
            answers |= _trajectory(path, trajectory, outline, tokens)
    if rollout.session is not None and not rollout.turn_marks:
        with suppress(NotFoundError):
            session_id = rollout.session.session_id
            answers[f"v1/sessions/{session_id}"] = await service.live.sessions.get(session_id)
    return answers


def _trajectory(path: str, trajectory: Trajectory, outline: TrajectoryOutline, tokens: Sequence[TokenRange]) -> Answers:
    node = outline.node
    messages = RolloutMessages(
        rollout_id=outline.rollout_id,
        node=node,
        messages=trajectory.messages,
        finish_reasons=trajectory.finish_reasons,
    )
    query = "" if node is None else f"?node={node}"
    more = "" if node is None else f"&node={node}"
    ranges: Answers = {
        f"{path}/tokens?segment={part.segment}&start=0&count={part.count}{more}": part for part in tokens
    }
    return {f"{path}/messages{query}": messages, f"{path}/outline{query}": outline} | ranges


async def _row(service: Service, rollout: Rollout) -> SummaryPage:
    """Return the list with this rollout alone, by its time, which lists have to the millisecond."""
    created = rollout.created_at
    beside = timedelta(milliseconds=2)
    which = SummaryFilter(text=rollout.rollout_id, since=created - beside, until=created + beside)
    found = await service.store.summaries(which, order="newest", cursor=None, limit=100)
    rows = [row for row in found.rows if row.rollout_id == rollout.rollout_id]
    return SummaryPage(rows=rows)
