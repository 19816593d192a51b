"""Problems that no step waits for: runs that cannot go on or deliver nothing, and engines with unexpected weights."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from api_schemas.errors import ErrorInfo
from api_schemas.inference import BackendView
from api_schemas.runs import RunState
from api_schemas.views.hangs import HangFinding, HangVerdict
from rollout_service.engines.pool.backend_handle import OTHER_VERSION_HINT
from rollout_service.store.runs_contract import RunRecord

RUN: Final = "run"
WEIGHTS: Final = "weights"


def problem_of_run(run: RunRecord, problem: ErrorInfo) -> HangFinding:
    goes_on = run.state is RunState.RUNNING
    said = "delivers nothing, but goes on" if goes_on else "cannot go on"
    return HangFinding(
        finding_id="",
        verdict=HangVerdict.SLOW if goes_on else HangVerdict.STUCK,
        kind=RUN,
        subject=run.run_id,
        since=datetime.now(UTC),
        seconds=0.0,
        message=f"the run {run.run_id} {said}: {problem.message}",
        hint=problem.hint or "Resume it once that is mended, or end it.",
        detail={"code": problem.code, "boundary": problem.boundary},
    )


def problem_of_engine(view: BackendView) -> HangFinding:
    return HangFinding(
        finding_id="",
        verdict=HangVerdict.SLOW,
        kind=WEIGHTS,
        subject=view.backend_id,
        since=datetime.now(UTC),
        seconds=0.0,
        responds=True,
        message=f"the engine {view.backend_id} samples with version {view.sampled_version} of the weights, but was "
        f"given version {view.weight_version}",
        hint=OTHER_VERSION_HINT,
        detail={"pool": view.pool, "version": view.sampled_version, "given": view.weight_version},
    )
