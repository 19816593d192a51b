"""Trajectories for looking at: what segments there are, and any range of their tokens with its text.

Guarantee: large answers are compressed for clients that accept it, in a thread.
"""

from __future__ import annotations

import gzip
from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel

from api_schemas.base import MAX_INT32, RolloutId
from api_schemas.rollouts.tokens import TokenRange, TrajectoryOutline
from rollout_service.api.openapi.responses import raises
from rollout_service.api.routes.support.dependencies import ServiceDep
from rollout_service.api.routes.support.strict import StrictRoute
from rollout_service.errors import NotFoundError
from rollout_service.service.trajectories import MAX_RANGE

router = APIRouter(prefix="/v1", tags=["rollouts"], route_class=StrictRoute)

COMPRESSED_FROM_BYTES = 4_096
FASTEST = 1
"""The level of compression: the others take several times as long for a tenth less."""

NodeQuery = Annotated[
    int | None, Query(ge=1, le=MAX_INT32, description="The number of a sub-agent, for its trajectory.")
]


@router.get(
    "/rollouts/{rollout_id}/outline", response_model=TrajectoryOutline, responses=raises(NotFoundError)
)
async def get_outline(
    service: ServiceDep, http: Request, rollout_id: RolloutId, node: NodeQuery = None
) -> Response:
    """Read a trajectory without its tokens: its segments, their turns, and where each one leaves its parent.

    A 404 means that the rollout is unknown, has not ended, or has no trajectory.
    """
    return await _compressed(http, await service.trajectories.outline(rollout_id, node))


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
    return await _compressed(http, await service.trajectories.tokens(rollout_id, segment, start, count, node))


async def _compressed(http: Request, answer: BaseModel) -> Response:
    """Return a valid model as JSON, compressed if it is large and the client accepts that."""
    accepts = any(
        coding.strip().partition(";")[0] == "gzip" and "q=0" not in coding.replace(" ", "").split(";")[1:]
        for coding in http.headers.get("accept-encoding", "").lower().split(",")
    )

    def encode() -> tuple[bytes, bool]:
        content = answer.model_dump_json().encode()
        if accepts and len(content) >= COMPRESSED_FROM_BYTES:
            return gzip.compress(content, FASTEST, mtime=0), True
        return content, False

    content, is_compressed = await anyio.to_thread.run_sync(encode)
    headers = {"Vary": "Accept-Encoding"} | ({"Content-Encoding": "gzip"} if is_compressed else {})
    return Response(content, media_type="application/json", headers=headers)
