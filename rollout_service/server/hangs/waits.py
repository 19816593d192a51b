"""The waits of the attempts under way. Of nested steps only the innermost counts, since it is the one that waits."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import OpenWait, StageWait
from rollout_service.activity import Activity, OpenStep
from sandboxes import Sandbox

_CONTAINERS = frozenset({StepKind.SETUP, StepKind.AGENT, StepKind.GRADER, StepKind.JUDGE})
_IN_SANDBOX = frozenset({StepKind.SESSION, StepKind.SETUP, StepKind.AGENT, StepKind.ARTIFACTS, StepKind.GRADER})
"""The attempt's sandbox works on these; tools say themselves whether they use it."""


@dataclass(eq=False, slots=True)
class StepWait:
    activity: Activity
    step: OpenStep
    now: float

    @property
    def seconds(self) -> float:
        return self.now - self.step.started

    @property
    def quiet(self) -> float:
        """The seconds since it made progress, or began."""
        moved = max(self.step.started, self.step.moved or 0.0)
        if self._contains:
            moved = max(moved, self.activity.moved or 0.0)
        return max(0.0, self.now - moved)

    @property
    def _contains(self) -> bool:
        """Whether other steps are part of it; those of a tool are in lanes of their own."""
        lane, started = self.step.lane, self.step.started
        inside = any(each.lane != lane and each.started > started for each in self.activity.open)
        return self.step.kind in _CONTAINERS or inside

    @property
    def sandbox(self) -> Sandbox | None:
        if self.step.sandbox is None and self.step.kind in _IN_SANDBOX:
            return self.activity.sandbox
        return self.step.sandbox


def waits_of(activities: Iterable[Activity], now: float) -> Iterator[StepWait]:
    """Yield the innermost open step of each lane of each attempt."""
    for activity in activities:
        innermost = {step.lane: step for step in activity.open}
        for step in innermost.values():
            yield StepWait(activity, step, now)


def oldest_of_stages(waits: Iterable[StepWait]) -> list[StageWait]:
    """Return the wait of each stage that has been without progress for longest."""
    oldest: dict[Stage, StepWait] = {}
    for wait in waits:
        stage = wait.step.stage
        if stage is not None and (stage not in oldest or wait.quiet > oldest[stage].quiet):
            oldest[stage] = wait
    return [
        StageWait(
            stage=stage,
            kind=found.step.kind,
            name=found.step.name,
            seconds=found.seconds,
            quiet_seconds=found.quiet,
            rollout_id=found.activity.rollout_id,
        )
        for stage in Stage
        if (found := oldest.get(stage)) is not None
    ]


def at(moment: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=time.perf_counter() - moment)


def view(step: OpenStep, now: float) -> OpenWait:
    return OpenWait(
        kind=step.kind,
        name=step.name,
        lane=step.lane,
        stage=step.stage,
        since=at(step.started),
        seconds=now - step.started,
        progress_seconds=None if step.moved is None else now - step.moved,
        detail=dict(step.detail),
    )
