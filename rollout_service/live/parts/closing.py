"""Puts the turns of sessions into parts, each turn once, for the run that takes the session.

Guarantees: `decision.decide` alone decides; a turn is in at most one part, whenever the service is killed; a store that
fails delays everything and loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog

from rollout_service.live.contract import LiveStore, SessionRecord, TurnFate
from rollout_service.live.parts.decision import Moment, decide
from rollout_service.live.parts.orders import TrainedPool, live_runs, order_of, run_of
from rollout_service.store.runs_contract import RunRecord, RunStore

log = structlog.get_logger(__name__)

SESSIONS_AT_ONCE = 100
"""The most sessions that one step looks at, so that turns being served wait for a few milliseconds at most; the others
follow in the next."""


class PartCloser:
    """Decides about the turns of sessions."""

    def __init__(
        self,
        store: LiveStore,
        runs: RunStore,
        *,
        judging_since: Callable[[], float | None] = lambda: 0.0,
        trained_pool: TrainedPool = lambda pool: pool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`judging_since` tells since when the judge is at work, None while it is not."""
        self._store = store
        self._runs = runs
        self._judging_since = judging_since
        self._trained_pool = trained_pool
        self._clock = clock

    async def step(self) -> int:
        """Look at the sessions that wait longest; return how many parts were made.

        Raises:
            StoreError: A store failed; what was decided before stays.
        """
        sessions = await self._store.undecided(SESSIONS_AT_ONCE)
        if not sessions:
            return 0
        runs = await live_runs(self._runs)
        fates = await self._store.fates([session.session_id for session in sessions])
        made = 0
        for session in sessions:
            made += await self._close(session, fates.get(session.session_id, ()), runs)
        return made

    async def _close(
        self, session: SessionRecord, turns: Sequence[TurnFate], runs: Sequence[RunRecord]
    ) -> bool:
        run = run_of(session, runs, self._trained_pool)
        decision = decide(
            session,
            turns,
            None if run is None else order_of(run),
            Moment(self._clock(), self._judging_since()),
            whole=run is not None and run.request.group_size > 1,
        )
        if decision is None:
            return False
        part = await self._store.take_part(
            session.session_id,
            None if run is None else run.run_id,
            decision.usable,
            decision.dropped,
            self._clock(),
        )
        if part is not None:
            log.info(
                "part of a session closed",
                session=session.session_id,
                part=part.part,
                run=part.run_id,
                usable=len(part.usable),
                dropped=len(decision.dropped),
            )
        return part is not None
