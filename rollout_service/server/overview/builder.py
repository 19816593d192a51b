"""Makes the overview. While the store fails or is slow, its last answers are shown; all else is current."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import anyio
import structlog
from fastapi.sse import format_sse_event

from api_schemas.inference import BackendState
from api_schemas.nodes import NodeState, NodeView
from api_schemas.rollouts import RolloutState
from api_schemas.runs import RunState
from api_schemas.views.overview import Overview, RunOverview
from rollout_service import __version__
from rollout_service.base.errors import StoreError
from rollout_service.cluster.membership import ClusterNodes
from rollout_service.pipeline.context import AttemptContext
from rollout_service.runs import ManagerOf
from rollout_service.server.hangs import HangWatch
from rollout_service.server.overview.bottleneck import StageLoads, bottleneck, next_node
from rollout_service.server.overview.outcomes import WINDOW_SECONDS, BackendFigures, Outcomes, success_share
from rollout_service.server.overview.stages import stage_overviews, stages_of_all
from rollout_service.store.rules import dropped_counts
from rollout_service.store.runs_contract import RunRecord

if TYPE_CHECKING:
    from rollout_service.server.lifecycle.service import Service

log = structlog.get_logger(__name__)

STORE_SECONDS = 1.0
"""If the store takes longer, its last answer is shown."""
MAX_RUNS = 20
REMEMBERED_EVENTS = 2_000
"""The most events read at the start, for the outcomes of the last five minutes."""
REMEMBERED_ERRORS = 40
"""The most failed rollouts read for them."""


@dataclass(frozen=True, slots=True)
class _Stored:
    counts: dict[RolloutState, int] = field(default_factory=dict)
    last_event: int = 0
    runs: Sequence[RunRecord] = ()
    nodes: Sequence[NodeView] = ()


@dataclass(slots=True)
class OverviewBuilder:
    context: AttemptContext
    manager_of: ManagerOf
    nodes: ClusterNodes
    node: str
    open_sessions: Callable[[], int]
    hangs: HangWatch
    readiness: Service | None = None
    """Set once the service is open."""
    figures: BackendFigures = field(default_factory=BackendFigures)
    outcomes: Outcomes = field(default_factory=Outcomes)
    _loads: StageLoads = field(default_factory=StageLoads)
    _stored: _Stored = field(default_factory=_Stored)
    _began: float = field(default_factory=time.monotonic)

    async def build(self) -> Overview:
        with anyio.move_on_after(STORE_SECONDS):
            await self._look()
        stored, now = self._stored, datetime.now(UTC)
        reasons = self.readiness.unready() if self.readiness is not None else []
        outcomes = self.outcomes.counts(now)
        views = self.context.policies.views()
        overview = Overview(
            at=now,
            version=__version__,
            node=self.node,
            uptime_seconds=round(time.monotonic() - self._began, 1),
            last_event=stored.last_event,
            ready=not reasons,
            reasons=reasons,
            warnings=self.readiness.warnings() if self.readiness is not None else [],
            counts={state: stored.counts.get(state, 0) for state in RolloutState},
            finished_per_second=self.outcomes.per_second(now),
            outcomes=outcomes,
            success_share=success_share(outcomes),
            stages=stage_overviews(self.context.stages, self.context.activities),
            nodes=list(stored.nodes),
            backends=[self.figures.of(view) for view in views],
            paused_pools=sorted({view.pool for view in views if view.state is BackendState.PAUSED}),
            runs=[self._run(record) for record in stored.runs],
            errors=self.outcomes.errors(now),
            findings=self.hangs.findings(),
            sessions_open=self.open_sessions(),
        )
        everywhere = stages_of_all(node for node in overview.nodes if node.state is not NodeState.DEAD)
        limit = bottleneck(overview, self._loads.add(time.monotonic(), everywhere or overview.stages))
        return overview.model_copy(update={"bottleneck": limit, "next_node": next_node(overview, limit)})

    async def remember(self) -> None:
        """Read from the store how rollouts ended just before this start; nothing depends on it."""
        since = datetime.now(UTC) - timedelta(seconds=WINDOW_SECONDS)
        try:
            (shard,) = self.context.store.shards
            newest = await shard.last_event()
            events = await shard.events(after=max(0, newest - REMEMBERED_EVENTS), limit=REMEMBERED_EVENTS)
            ended = [
                event
                for event in events
                if event.kind == "rollout.state"
                and event.time >= since
                and RolloutState(str(event.data["state"])).terminal
            ]
            failed = [event for event in ended if event.data["state"] == RolloutState.FAILED]
            for event in ended:
                self.outcomes.note(event.time, str(event.data.get("code") or event.data["state"]))
            for event in failed[-REMEMBERED_ERRORS:]:
                rollout = await self.context.store.get(event.subject)
                if rollout is not None:
                    self.outcomes.note_failure(event.time, rollout)
        except StoreError as error:
            log.warning("how the last rollouts ended could not be read", error=str(error), hint=error.hint)

    async def _look(self) -> None:
        """Ask the store; if it fails, `unready` says so."""
        try:
            counts = await self.context.store.counts()
            failing = self.context.store.failing
            asked = [shard for number, shard in enumerate(self.context.store.shards) if number not in failing]
            last_event = sum([await shard.last_event() for shard in asked])
            in_progress = (RunState.RUNNING, RunState.PAUSED)
            runs = [run for run in await self.context.store.runs.active() if run.state in in_progress]
            runs.sort(key=lambda run: run.created_at, reverse=True)
            nodes = await self.nodes.list()
        except StoreError as error:
            log.debug("the overview shows the store as it was", error=str(error))
        else:
            self._stored = _Stored(counts, last_event, runs[:MAX_RUNS], nodes)

    def _run(self, record: RunRecord) -> RunOverview:
        manager = self.manager_of(record.run_id)
        return RunOverview(
            run_id=record.run_id,
            state=record.state,
            pool=record.request.pool,
            version=record.version,
            acceptance_rate=round(manager.acceptance_rate(record), 4),
            open_groups=record.count("open"),
            ready_groups=record.count("ready"),
            acknowledged_groups=record.count("acknowledged"),
            dropped=dropped_counts(record.counters),
            staleness=manager.staleness(record),
            problem=record.problem.message if record.problem is not None else None,
        )


PERIOD_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Frame:
    number: int
    overview: Overview
    event: bytes


class OverviewFeed:
    """Shares overviews among readers: makes at most one a second, only while somebody asks, and encodes it once."""

    def __init__(self, build: Callable[[], Awaitable[Overview]], clock: Callable[[], float] = time.monotonic) -> None:
        self._build = build
        self._clock = clock
        self._lock = anyio.Lock()
        self._newest: Frame | None = None
        self._made_at = 0.0

    async def latest(self) -> Frame:
        async with self._lock:
            if self._newest is None or self._clock() - self._made_at >= PERIOD_SECONDS:
                return await self._make()
            return self._newest

    async def after(self, number: int) -> Frame:
        """Return the next overview, a second after this one at the earliest."""
        while self._newest is not None and self._newest.number <= number:
            await anyio.sleep(max(0.0, self._made_at + PERIOD_SECONDS - self._clock()))
            await self.latest()
        return await self.latest()

    async def _make(self) -> Frame:
        overview = await self._build()
        number = 1 if self._newest is None else self._newest.number + 1
        event = format_sse_event(data_str=overview.model_dump_json(), event="overview")
        self._newest = Frame(number, overview, event)
        self._made_at = self._clock()
        return self._newest
