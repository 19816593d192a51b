"""Runs with a problem: paused because they cannot go on, or running without delivering anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from api_schemas.errors import ErrorInfo
from api_schemas.runs import RunState
from api_schemas.views.hangs import HangFinding, HangVerdict
from rollout_service.server.hangs.waits import at
from rollout_service.store.runs_contract import RunRecord

RUN: Final = "run"


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
        return [_finding(run, problem, self._since[run.run_id], now) for run, problem in found]


def _finding(run: RunRecord, problem: ErrorInfo, since: float, now: float) -> HangFinding:
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
