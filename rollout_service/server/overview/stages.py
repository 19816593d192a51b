"""The present stages of the pipeline: how full they are, and the steps that hold up their rollouts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from api_schemas.nodes import NodeView, StageOverview
from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import Activity, ActivityBoard
from rollout_service.pipeline.context import Stages
from rollout_service.pipeline.stage import StageLimiter


def stage_overviews(stages: Stages, board: ActivityBoard) -> list[StageOverview]:
    working: dict[str, list[Activity]] = {}
    for activity in board.all():
        if activity.stage is not None:
            working.setdefault(activity.stage, []).append(activity)
    limiters = (stages.init, stages.rollout, stages.evaluate)
    return [_stage(limiter, working.get(limiter.stage, [])) for limiter in limiters]


def stages_of_all(nodes: Iterable[NodeView]) -> list[StageOverview]:
    """Add up the stages of several nodes; empty if none reports any."""
    reported = [node.stages for node in nodes if node.stages]
    return [_sum(same_stage) for same_stage in zip(*reported, strict=True)]


def _stage(limiter: StageLimiter, activities: Sequence[Activity]) -> StageOverview:
    now = time.perf_counter()
    waits = Counter(activity.open[-1].kind for activity in activities if activity.open)
    oldest = min((activity.stage_since for activity in activities), default=now)
    return StageOverview(
        stage=limiter.stage,
        working=limiter.workers.in_use,
        workers=limiter.workers.size,
        waiting=waits[StepKind.WORKER],
        places=limiter.places.size,
        oldest_seconds=round(now - oldest, 3),
        waits_for=dict(waits.most_common()),
    )


def _sum(same_stage: Sequence[StageOverview]) -> StageOverview:
    waits: Counter[StepKind] = Counter()
    for one in same_stage:
        waits.update(one.waits_for)
    return StageOverview(
        stage=same_stage[0].stage,
        working=sum(one.working for one in same_stage),
        workers=sum(one.workers for one in same_stage),
        waiting=sum(one.waiting for one in same_stage),
        places=sum(one.places for one in same_stage),
        oldest_seconds=max(one.oldest_seconds for one in same_stage),
        waits_for=dict(waits.most_common()),
    )
