"""Which run takes a session: the oldest running one that trains on its pool and takes its tenant."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from api_schemas.runs import RunState
from api_schemas.runs.live import LiveDelivery
from rollout_service.live.contract import SessionRecord
from rollout_service.store.runs_contract import RunRecord, RunStore

TrainedPool = Callable[[str], str]
"""Returns the pool whose runs train on what a pool serves: its own, or the one that it is a candidate for."""


async def live_runs(runs: RunStore) -> list[RunRecord]:
    """Return the runs of live sessions that are not over, the oldest first."""
    return [
        run
        for run in await runs.active()
        if run.request.live is not None and run.state in (RunState.RUNNING, RunState.PAUSED)
    ]


def run_of(session: SessionRecord, runs: Sequence[RunRecord], trained_pool: TrainedPool) -> RunRecord | None:
    """Return the run that takes a session now; None if there is none.

    A run with groups of several takes only sessions of a group.
    """
    pool = trained_pool(session.pool)
    for run in runs:
        is_apt = run.request.group_size == 1 or session.group is not None
        is_its_own = run.request.pool == pool and session.tenant in order_of(run).tenants
        if run.state is RunState.RUNNING and is_apt and is_its_own:
            return run
    return None


def order_of(run: RunRecord) -> LiveDelivery:
    """Return a run's order for live sessions; the default for a run that has none."""
    return run.request.live or LiveDelivery()
