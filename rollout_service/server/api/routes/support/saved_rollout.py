"""The API's answers for the page of a rollout, collected for a file under the paths by which the page asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import anyio.to_thread
import orjson
from pydantic import BaseModel

from api_schemas.rollouts import Rollout
from api_schemas.rollouts.tokens import RolloutMessages, TokenRange, TrajectoryOutline
from api_schemas.trajectories import Trajectory
from api_schemas.views.summaries import SummaryFilter, SummaryPage
from rollout_service import __version__
from rollout_service.base.errors import NotFoundError
from rollout_service.server.dashboard.saved_page import saved_page
from rollout_service.server.lifecycle import Service

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
