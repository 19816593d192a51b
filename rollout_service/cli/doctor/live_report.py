"""The data of `doctor --live`: a service's report of hangs, and its overview if it answers.

Guarantee: `is_wrong` holds exactly if there is something that a person on call has to look at.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from api_schemas.inference import BackendState, BackendView
from api_schemas.nodes import HoldView
from api_schemas.rollouts import RolloutState
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangFinding, HangReport, HangVerdict
from api_schemas.views.overview import Overview

FLAPPING = timedelta(minutes=5)
"""For how long an engine that serves again is shown for a failure; errors are kept for as long."""
FRESH = timedelta(minutes=1)
"""For how long its failure counts as one of now."""


@dataclass(frozen=True, slots=True)
class LiveReport:
    """The state of a service, as far as it answers."""

    hangs: HangReport
    overview: Overview | None = None
    """None if the service does not answer."""

    @property
    def is_wrong(self) -> bool:
        """Whether a person has to look at something."""
        if any(map(is_wrong, self.hangs.findings)):
            return True
        return self.overview is not None and (
            not self.overview.ready
            or bool(self.overview.warnings)
            or any(self._is_failing(view) for view in self._backends())
            or any(hold.resource == "disk" for hold in self.holds())
            or _mostly_fails(self.overview.outcomes)
        )

    def failing(self) -> list[BackendView]:
        """Return the engines that are out of service, or failed within the last minutes."""
        return [view for view in self._backends() if self._is_failing(view, FLAPPING)]

    def _is_failing(self, view: BackendView, within: timedelta = FRESH) -> bool:
        has_failed = view.failed_at is not None and self.hangs.at - view.failed_at < within
        return has_failed or view.state is BackendState.FAILED

    def _backends(self) -> list[BackendView]:
        return [] if self.overview is None else [one.backend for one in self.overview.backends]

    def holds(self) -> list[HoldView]:
        """Return why nodes start no further sandbox."""
        return [] if self.overview is None else [hold for node in self.overview.nodes for hold in node.holds]

    def disks(self) -> dict[str, int]:
        """Return the free bytes of the file systems of all nodes, by node and folder."""
        nodes = [] if self.overview is None else self.overview.nodes
        return {
            f"{node.node}:{folder}": free
            for node in nodes
            if node.pressure is not None
            for folder, free in node.pressure.disk_free_bytes.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON: the report of hangs with `wrong`, and `service`, null if it does not answer."""
        return self.hangs.model_dump(mode="json") | {"wrong": self.is_wrong, "service": self._service()}

    def _service(self) -> dict[str, Any] | None:
        if self.overview is None:
            return None
        names = {"ready", "reasons", "warnings", "outcomes", "errors"}
        return self.overview.model_dump(mode="json", include=names) | {
            "engines": [view.model_dump(mode="json") for view in self.failing()],
            "holds": [hold.model_dump(mode="json") for hold in self.holds()],
            "disk_free_bytes": self.disks(),
        }


def _mostly_fails(outcomes: dict[str, int]) -> bool:
    """Return whether more rollouts failed than completed."""
    completed = outcomes.get(RolloutState.COMPLETED, 0)
    return sum(outcomes.values()) - outcomes.get(RolloutState.CANCELLED, 0) > 2 * completed


def is_wrong(finding: HangFinding) -> bool:
    """Return whether a finding needs a person: not if it moves, is meant to wait, or may be a command that sleeps."""
    if finding.verdict is HangVerdict.IDLE:
        return finding.kind is StepKind.GRADER
    return finding.verdict is HangVerdict.STUCK or finding.kind not in tuple(StepKind)
