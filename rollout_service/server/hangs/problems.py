"""Problems that no step waits for: of runs that cannot go on or deliver nothing, and of engines with other weights than
this service gave them.

Guarantee: each is one finding for as long as it lasts, since it was first seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from api_schemas.errors import ErrorInfo
from api_schemas.inference import BackendView
from api_schemas.runs import RunState
from api_schemas.views.hangs import HangFinding, HangVerdict
from rollout_service.engines.pool.backend_handle import OTHER_VERSION_HINT
from rollout_service.server.hangs.waits import at
from rollout_service.store.runs_contract import RunRecord

RUN: Final = "run"
WEIGHTS: Final = "weights"


class TroubledRuns:
    """The runs with a problem, and since when they are seen to have it."""

    def __init__(self, troubled: Callable[[], Iterable[RunRecord]]) -> None:
        """Watch the runs that `troubled` returns. It is called at every look, and must not wait."""
        self._troubled = troubled
        self._since: dict[str, float] = {}

    def findings(self) -> Sequence[HangFinding]:
        now = time.perf_counter()
        found = [(run, problem) for run in self._troubled() if (problem := run.problem) is not None]
        self._since = {run.run_id: self._since.get(run.run_id, now) for run, _ in found}
        return [_finding_of_run(run, problem, self._since[run.run_id], now) for run, problem in found]


def _finding_of_run(run: RunRecord, problem: ErrorInfo, since: float, now: float) -> HangFinding:
    goes_on = run.state is RunState.RUNNING
    said = "delivers nothing, but goes on" if goes_on else "cannot go on"
    return HangFinding(
        finding_id="",
        verdict=HangVerdict.SLOW if goes_on else HangVerdict.STUCK,
        kind=RUN,
        subject=run.run_id,
        since=at(since),
        seconds=now - since,
        message=f"the run {run.run_id} {said}: {problem.message}",
        hint=problem.hint or "Resume it once that is mended, or end it.",
        detail={"code": problem.code, "boundary": problem.boundary},
    )


class OtherVersions:
    """The engines with other weights, and since when they are seen to have them."""

    def __init__(self, views: Callable[[], Iterable[BackendView]]) -> None:
        """Watch the engines that `views` returns. It is called at every look, and must not wait."""
        self._views = views
        self._since: dict[str, float] = {}

    def findings(self) -> Sequence[HangFinding]:
        now = time.perf_counter()
        found = [view for view in self._views() if view.sampled_version is not None]
        self._since = {view.backend_id: self._since.get(view.backend_id, now) for view in found}
        return [_finding_of_engine(view, self._since[view.backend_id], now) for view in found]


def _finding_of_engine(view: BackendView, since: float, now: float) -> HangFinding:
    return HangFinding(
        finding_id="",
        verdict=HangVerdict.SLOW,
        kind=WEIGHTS,
        subject=view.backend_id,
        since=at(since),
        seconds=now - since,
        responds=True,
        message=f"the engine {view.backend_id} samples with version {view.sampled_version} of the weights, but was "
        f"given version {view.weight_version}",
        hint=OTHER_VERSION_HINT,
        detail={"pool": view.pool, "version": view.sampled_version, "given": view.weight_version},
    )
