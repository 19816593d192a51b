"""The waits of attempts, and when one is stuck, idle, slow or held back: pure decisions.

Of nested steps only the innermost counts, since it is the one that waits. Elapsed time alone would miss hangs and give
false alarms. So a wait is stuck once it takes longer than its history says *and* nothing moves. Evidence shortens the
wait: a thing that does not answer, or is seen to do nothing, is stuck long before a deadline; one that works is slow at
most. A command without a history may mean to sleep: until half of its own time limit is over, it is idle at most. So is
a grader at rest, since it may wait for another service.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangVerdict, OpenWait, StageWait, UsualTimes
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


FACTOR = 4.0
"""How many times its 99th percentile a step may take."""
GONE_SECONDS = 8.0
"""How long something may not answer before the step that waits for it is stuck."""
OVERRUN_SECONDS = 6.0
"""How much longer than its own limit a command may take."""
IDLE_SECONDS = 10.0
"""How long something may be idle while a step waits for it."""
REST_SECONDS = 30.0
"""How long a grader without a history may be at rest before it is idle."""
LOOK_SECONDS = 2.0
"""Seconds without progress after which a probe begins."""

HELD_KINDS = frozenset(
    {StepKind.PLACE, StepKind.WORKER, StepKind.HOST} | {StepKind.POOL_QUEUE, StepKind.PAUSED_POOL, StepKind.SUBAGENT}
)
"""The waits that something is meant to cause."""

FLOORS = {
    StepKind.PLACE: 30.0,
    StepKind.WORKER: 30.0,
    StepKind.HOST: 15.0,
    StepKind.SANDBOX_START: 30.0,
    StepKind.SESSION: 15.0,
    StepKind.SETUP: 20.0,
    StepKind.POOL_QUEUE: 20.0,
    StepKind.PAUSED_POOL: 10.0,
    StepKind.ENGINE: 20.0,
    StepKind.TOOL: 20.0,
    StepKind.AGENT: 60.0,
    StepKind.SUBAGENT: 30.0,
    StepKind.ARTIFACTS: 20.0,
    StepKind.GRADER: 20.0,
    StepKind.JUDGE: 30.0,
    StepKind.SANDBOX_END: 15.0,
    StepKind.STORE: 5.0,
}
"""Seconds within which no wait is remarkable, however short it usually is."""

_CONCLUSIVE = frozenset({StepKind.ENGINE})
"""Kinds where standing still says more than the time: a working engine changes its report with every token."""

_SEEN_TO_WORK = frozenset({StepKind.ENGINE, StepKind.TOOL, StepKind.SESSION})
"""Kinds whose work is all done by the thing that is probed; a grader, for example, may wait for another service."""


@dataclass(frozen=True, slots=True)
class Signs:
    responds: bool | None = None
    """Whether the thing that a step waits for answers; None if it cannot be asked."""
    still_seconds: float | None = None
    """How long it has been seen to do nothing; None if that cannot be seen."""
    is_idle: bool = False
    """Whether it says that it has nothing to do."""


UNSEEN = Signs()


def patience(kind: StepKind, usual: UsualTimes | None, limit: float | None) -> float:
    """Return the seconds after which a wait is too long; `limit` is that of the step or of its stage."""
    floor = FLOORS[kind]
    if usual is not None:
        return max(floor, FACTOR * usual.p99)
    if kind in HELD_KINDS or limit is None:
        return floor
    return max(floor, limit / 2)


def judge(
    kind: StepKind,
    *,
    seconds: float,
    quiet: float,
    usual: UsualTimes | None = None,
    limit: float | None = None,
    own_limit: float | None = None,
    signs: Signs = UNSEEN,
) -> HangVerdict | None:
    """Return the verdict on a wait; None if it is unremarkable.

    Args:
        kind: The kind of the step.
        seconds: How long it has waited.
        quiet: How long ago the step itself made progress; at most `seconds`.
        usual: How long such steps take.
        limit: The limit of the stage.
        own_limit: The limit of the step itself.
        signs: Those of the thing that it waits for.
    """
    if kind in HELD_KINDS:
        return HangVerdict.HELD if seconds > patience(kind, usual, limit) else None
    if own_limit is not None and seconds > own_limit + OVERRUN_SECONDS:
        return HangVerdict.STUCK
    is_proven = _is_proven(kind, seconds, quiet, usual, signs)
    is_long = seconds > patience(kind, usual, own_limit if own_limit is not None else limit)
    if is_proven:
        may_sleep = usual is None and own_limit is not None and kind not in _CONCLUSIVE
        return HangVerdict.IDLE if may_sleep and not is_long and signs.responds else HangVerdict.STUCK
    if not is_long:
        return HangVerdict.IDLE if usual is None and _is_resting_grader(kind, quiet, signs) else None
    return HangVerdict.SLOW if _moves(kind, quiet, signs) else HangVerdict.STUCK


def _is_proven(kind: StepKind, seconds: float, quiet: float, usual: UsualTimes | None, signs: Signs) -> bool:
    if signs.responds is False:
        return quiet >= min(GONE_SECONDS, FLOORS[kind])
    if kind not in _SEEN_TO_WORK:
        return False
    still = min(quiet, signs.still_seconds or 0.0)
    allowed = IDLE_SECONDS if signs.is_idle else FLOORS[kind]
    usually = 0.0 if usual is None else usual.p99 * (1.0 if kind in _CONCLUSIVE else FACTOR)
    return still >= allowed and seconds > usually


def _is_resting_grader(kind: StepKind, quiet: float, signs: Signs) -> bool:
    return kind is StepKind.GRADER and min(quiet, signs.still_seconds or 0.0) >= REST_SECONDS


def _moves(kind: StepKind, quiet: float, signs: Signs) -> bool:
    floor = FLOORS[kind]
    return quiet < floor or (signs.still_seconds is not None and signs.still_seconds < floor)
