"""How long steps usually take, learned from those that have ended at this node.

Guarantees: it remembers the last `KEPT` durations of each kind of step in each environment and stage, for at most
`MAX_KEYS` of them; those that were not seen for longest are forgotten. A step that failed or was cancelled counts for
nothing, since it says nothing about how long a good one takes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import NamedTuple

from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import UsualTimes
from rollout_service.activity import Activity, OpenStep, StepObserver

KEPT = 500
MAX_KEYS = 500
ENOUGH = 20
"""How many durations make a history."""
NAMED = frozenset(
    {StepKind.TOOL, StepKind.SANDBOX_START, StepKind.SESSION, StepKind.STORE, StepKind.ARTIFACTS}
)
"""The kinds whose name tells how long they take: an image does, the id of an engine does not."""


class StepClass(NamedTuple):
    """Steps that may be compared with each other."""

    environment: str
    stage: Stage | None
    kind: StepKind
    name: str


class _Recent:
    """The last durations of a class of steps."""

    __slots__ = ("next", "seconds")

    def __init__(self) -> None:
        self.seconds = array("d")
        self.next = 0

    def add(self, seconds: float) -> None:
        """Add one, in place of the oldest if there are enough."""
        if len(self.seconds) < KEPT:
            self.seconds.append(seconds)
        else:
            self.seconds[self.next] = seconds
            self.next = (self.next + 1) % KEPT


class StepDurations(StepObserver):
    """The usual durations of steps."""

    def __init__(self) -> None:
        self._recent: OrderedDict[StepClass, _Recent] = OrderedDict()

    def closed(self, activity: Activity, step: OpenStep) -> None:
        """Remember how long a good step took."""
        if step.error is not None or step.ended is None:
            return
        key = class_of(activity, step)
        recent = self._recent.get(key)
        if recent is None:
            recent = self._recent[key] = _Recent()
            if len(self._recent) > MAX_KEYS:
                self._recent.popitem(last=False)
        self._recent.move_to_end(key)
        recent.add(step.ended - step.started)

    def usual(self, key: StepClass) -> UsualTimes | None:
        """Return how long such steps take; None if fewer than `ENOUGH` of them have ended."""
        recent = self._recent.get(key)
        if recent is None or len(recent.seconds) < ENOUGH:
            return None
        ordered = sorted(recent.seconds)
        p50, p95, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.95, 0.99))
        return UsualTimes(count=len(ordered), p50=p50, p95=p95, p99=p99)


def class_of(activity: Activity, step: OpenStep) -> StepClass:
    """Return the class of a step."""
    name = step.name if step.kind in NAMED else ""
    return StepClass(activity.environment, step.stage, step.kind, name)
