"""The background work that turns served sessions into batches: it closes parts and hands them to runs.

A store that fails for a while delays this work, and ends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Self

import anyio
import structlog

from api_schemas.rollouts.sessions import MaskReason, TurnKind
from api_schemas.runs.live import LiveDelivery
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.live.contract import PendingTurn, SessionRecord
from rollout_service.live.judging.teacher import TeacherReader
from rollout_service.live.metrics import LiveMetrics
from rollout_service.live.parts.deletion import SessionDeletion
from rollout_service.live.parts.delivery import PartDelivery, TrainedPool, live_runs, order_of, run_of
from rollout_service.live.parts.environment import SessionEnvironment, SessionParts
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.settings.live import LiveJudgeSettings
from rollout_service.store.contract import Store
from rollout_service.store.retrying import retry_until_stored
from rollout_service.store.runs_contract import RunRecord, RunStore
from rollout_service.tokens import ChatRenderer

LOOK_SECONDS = 0.2
"""Each look for sessions to close and parts to hand over is a few short reads."""
IDLE_SECONDS = 1.0
"""While there is neither a turn to decide nor a run that trains on turns."""


class InService:
    def __init__(self, serving: PolicyServing, pool: str) -> None:
        self._serving = serving
        self._pool = pool
        self._since: float | None = None

    def since(self) -> float | None:
        """Return a Unix time, as far as it was looked at; None while the pool is not in service."""
        pools, _ = self._serving.in_service()
        if self._pool not in pools:
            self._since = None
        elif self._since is None:
            self._since = time.time()
        return self._since


log = structlog.get_logger(__name__)

SESSIONS_AT_ONCE = 100
"""Limits the sessions that one step looks at, so that turns being served wait for a few milliseconds at most."""


@dataclass(eq=False)
class PartCloser:
    """Puts turns into parts, each turn once, for the run that takes their session; `decide` alone decides."""

    store: SqliteLiveStore
    runs: RunStore
    _: KW_ONLY
    judging_since: Callable[[], float | None] = lambda: 0.0
    """Returns None while the judge is not at work."""
    trained_pool: TrainedPool = lambda pool: pool
    clock: Callable[[], float] = time.time
    is_idle: bool = False
    """The last step found no turn to decide."""

    async def step(self) -> int:
        """Look at the sessions that wait longest; return the number of parts made."""
        sessions = await self.store.undecided(SESSIONS_AT_ONCE)
        self.is_idle = not sessions
        if not sessions:
            return 0
        runs = await live_runs(self.runs)
        fates = await self.store.fates([session.session_id for session in sessions])
        made = 0
        for session in sessions:
            made += await self._close(session, fates.get(session.session_id, ()), runs)
        return made

    async def _close(self, session: SessionRecord, turns: Sequence[PendingTurn], runs: Sequence[RunRecord]) -> bool:
        run = run_of(session, runs, self.trained_pool)
        decision = decide(
            session,
            turns,
            None if run is None else order_of(run),
            DecisionTime(self.clock(), self.judging_since()),
            whole=run is not None and run.request.group_size > 1,
        )
        if decision is None:
            return False
        part = await self.store.take_part(
            session.session_id,
            None if run is None else run.run_id,
            decision.usable,
            decision.dropped,
            self.clock(),
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


@dataclass(frozen=True, slots=True)
class TurnDecision:
    usable: tuple[int, ...] = ()
    dropped: Mapping[int, MaskReason] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DecisionTime:
    now: float
    judging_since: float | None
    """None while the judge is not at work, so that no turn fails for want of it."""


def decide(
    session: SessionRecord,
    turns: Sequence[PendingTurn],
    order: LiveDelivery | None,
    moment: DecisionTime,
    *,
    whole: bool = False,
) -> TurnDecision | None:
    """Return the decision on a session's undecided turns; None if nothing is to be decided now. Pure.

    A turn is usable if its client got it, it has a value, and nothing rules it out; none is left out because it is bad.
    An open session is closed for training from time to time, up to its newest judged turn; once it has ended, all of
    its turns are decided together. A turn whose fate may still change is decided only then, or when its time is up.

    `order` is that of the run which takes the session, None if none does. With `whole`, nothing is decided before the
    session has ended.
    """
    if order is None:
        return _without_run(session, turns, moment)
    due = [turn for turn in turns if _is_due(turn)]
    if session.closed_at is not None:
        if any(not _is_late(turn, session, order, moment) for turn in due):
            return None
        return _decision(session, turns, order)
    judged = [turn for turn in turns if _is_judged(turn)]
    if whole or not judged or not _closes(judged, order, moment.now):
        return None
    taken = [turn for turn in turns if turn.turn <= judged[-1].turn and not _may_change(turn)]
    waiting = [turn for turn in due if turn.turn < judged[-1].turn]
    if any(not _is_late(turn, session, order, moment) for turn in waiting):
        return None
    return _decision(session, sorted([*taken, *waiting], key=lambda turn: turn.turn), order)


def _without_run(session: SessionRecord, turns: Sequence[PendingTurn], moment: DecisionTime) -> TurnDecision | None:
    """Decide turns that can never be trained on, or were kept too long."""
    old = {
        turn.turn: _reason(session, turn) or MaskReason.NO_RUN
        for turn in turns
        if turn.recorded_at + session.retention_seconds <= moment.now
    }
    if session.closed_at is not None:
        certain = ((turn.turn, _reason(session, turn)) for turn in turns if not _is_due(turn))
        old |= {turn: reason for turn, reason in certain if reason is not None}
    return TurnDecision(dropped=old) if old else None


def _decision(session: SessionRecord, turns: Sequence[PendingTurn], order: LiveDelivery) -> TurnDecision | None:
    dropped = {turn.turn: reason for turn in turns if (reason := _reason(session, turn)) is not None}
    judged = [turn for turn in turns if turn.turn not in dropped]
    zeros = [turn.turn for turn in judged if turn.value == 0 and order.zeros != "keep"]
    if order.zeros == "at_least_one" and len(zeros) == len(judged):
        zeros = zeros[:-1]  # the last has the most judged turns before it
    dropped |= dict.fromkeys(zeros, MaskReason.ZERO)
    usable = tuple(turn.turn for turn in judged if turn.turn not in dropped)
    return TurnDecision(usable, dropped) if usable or dropped else None


def _reason(session: SessionRecord, turn: PendingTurn) -> MaskReason | None:
    """Return why a turn is not usable, whatever its value; None if it is judged."""
    if turn.kind is TurnKind.SIDE:
        return MaskReason.SIDE
    if turn.mask is not None:
        return turn.mask
    if not turn.delivered:
        return MaskReason.UNDELIVERED
    if turn.value is None:
        is_unanswered = turn.followed_at is None and turn.marked_at is None
        return MaskReason.NO_NEXT_STATE if is_unanswered else MaskReason.JUDGE_FAILED
    return MaskReason.QUARANTINED if session.quarantined else None


def _is_judged(turn: PendingTurn) -> bool:
    return turn.value is not None and turn.delivered and turn.mask is None and turn.kind is TurnKind.MAIN


def _is_due(turn: PendingTurn) -> bool:
    is_open = turn.kind is TurnKind.MAIN and turn.mask is None and turn.delivered
    return is_open and turn.followed_at is not None and turn.marked_at is None


def _may_change(turn: PendingTurn) -> bool:
    """Return whether a turn of an open session may still be delivered, followed or judged."""
    if turn.kind is TurnKind.SIDE or turn.mask is not None:
        return False
    return not turn.delivered or turn.marked_at is None


def _is_late(turn: PendingTurn, session: SessionRecord, order: LiveDelivery, moment: DecisionTime) -> bool:
    """Return whether a due turn has waited long enough for the judge."""
    if moment.now >= turn.recorded_at + session.retention_seconds:
        return True
    if moment.judging_since is None:
        return False
    since = max(turn.followed_at or 0.0, moment.judging_since)
    return moment.now >= since + order.judge_seconds


def _closes(judged: Sequence[PendingTurn], order: LiveDelivery, now: float) -> bool:
    first = min(turn.marked_at or 0.0 for turn in judged)
    return len(judged) >= order.close_turns or now >= first + order.close_seconds


@dataclass(frozen=True, slots=True)
class SessionTraining:
    closer: PartCloser
    delivery: PartDelivery
    environment: SessionEnvironment
    deletion: SessionDeletion

    @classmethod
    def make(
        cls,
        live: SqliteLiveStore,
        store: Store,
        serving: PolicyServing,
        *,
        judging: LiveJudgeSettings,
        trained_pool: TrainedPool,
        node: str,
        metrics: LiveMetrics,
    ) -> Self:
        """`node` names this node."""
        shared_by = node if store.cluster.is_shared else None
        judge, teacher = InService(serving, judging.pool), TeacherReader(serving, judging.teacher_pool)

        def renderer_of(pool: str) -> ChatRenderer:
            # A candidate's pool may be gone, and has the format of the pool that it was for.
            return serving.connect(pool if serving.expects(pool) else trained_pool(pool))[0].renderer

        parts = SessionParts(live, store.runs, renderer_of, teacher, shared_by, store.cluster)
        return cls(
            closer=PartCloser(live, store.runs, judging_since=judge.since, trained_pool=trained_pool),
            delivery=PartDelivery(live, store.runs, node=shared_by, handed_over=metrics.handed_over),
            environment=SessionEnvironment(parts),
            deletion=SessionDeletion(live, store),
        )

    async def run(self) -> None:
        while True:
            await retry_until_stored("make parts of sessions", self.closer.step)
            await retry_until_stored("hand parts of sessions to runs", self.delivery.step)
            is_idle = self.closer.is_idle and self.delivery.is_idle
            await anyio.sleep(IDLE_SECONDS if is_idle else LOOK_SECONDS)
