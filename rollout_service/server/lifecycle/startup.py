"""Opens the parts of the service in order, and closes them in reverse.

Guarantees: the leftovers of a crash are swept before any rollout starts; once `open_service` is left, nothing of this
service lives on: no task, no sandbox, no engine that it started.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from rollout_service.base.shutdown import Shutdown
from rollout_service.cluster.membership import Membership
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.pipeline.context import AttemptContext
from rollout_service.runs import Delivery
from rollout_service.runs.api import RunService
from rollout_service.runs.export import RunExporter
from rollout_service.runs.rescore import Rescorer
from rollout_service.server.events import EventTail
from rollout_service.server.hangs import HangWatch
from rollout_service.server.lifecycle.attempts import Attempts, open_attempts
from rollout_service.server.lifecycle.engines import EngineContext, open_engines
from rollout_service.server.lifecycle.foundation import Foundation, open_foundation
from rollout_service.server.lifecycle.membership import ClusterMember, Suitability
from rollout_service.server.lifecycle.node import begin_work, make_concurrency, make_member
from rollout_service.server.lifecycle.service import Service, check_environment_here
from rollout_service.server.overview import OverviewBuilder, OverviewFeed
from rollout_service.server.trajectories import TrajectoryViewer
from rollout_service.settings import Settings


@asynccontextmanager
async def open_service(settings: Settings, metrics: Metrics, shutdown: Shutdown) -> AsyncIterator[Service]:
    """Open the service, sweep what a crash left, and work until the block is left.

    Every part goes onto one stack, so what is opened later is closed earlier: the leader's work on runs, the pipeline,
    which hands back what it holds, and the membership; then what attempts recorded is written; then sessions, the
    gateway and the engines close, then the sandboxes, and at the very end the store, which all of them write.
    """
    async with AsyncExitStack() as stack:
        foundation = await open_foundation(stack, settings, metrics)
        engines = await open_engines(stack, foundation)
        attempts = await open_attempts(stack, foundation, engines, shutdown)
        context, serving = attempts.context, engines.serving
        member = await make_member(foundation, serving, context)
        manager = member.manager
        hangs = HangWatch(
            foundation.node.name,
            context,
            serving,
            foundation.state_dir,
            troubled_runs=lambda: manager.troubled,
        )
        overview = await _make_overview(context, engines, member, hangs)
        membership = await begin_work(stack, foundation, serving, member, hangs)
        service = _service(foundation, engines, attempts, hangs, member, membership, overview, shutdown)
        overview.readiness = service
        yield service


async def _make_overview(
    context: AttemptContext, engines: EngineContext, member: ClusterMember, hangs: HangWatch
) -> OverviewBuilder:
    """Make the overview, which is told of everything that ends from now on."""
    live = engines.live
    overview = OverviewBuilder(
        store=context.store,
        stages=context.stages,
        serving=engines.serving,
        manager=member.manager,
        nodes=member.nodes(),
        board=context.activities,
        node=member.node.name,
        open_sessions=lambda: live.sessions.open_sessions,
        hangs=hangs,
    )
    context.activities.observe(overview.figures)
    member.pipeline.on_finished(overview.outcomes.ended)
    if not context.store.cluster.is_shared:
        await overview.remember()
    return overview


def _service(
    foundation: Foundation,
    engines: EngineContext,
    attempts: Attempts,
    hangs: HangWatch,
    member: ClusterMember,
    membership: Membership,
    overview: OverviewBuilder,
    shutdown: Shutdown,
) -> Service:
    """Make the operations that the routes call, all over parts that are open."""
    store, serving, manager = foundation.store, engines.serving, member.manager
    suitability = Suitability(member.placement, membership)
    check_environment = partial(
        check_environment_here, foundation.environments, foundation.sandboxes, suitability
    )
    run_service = RunService(
        store.runs,
        manager,
        check_environment=check_environment,
        check_pool=serving.check,
        data_dirs=foundation.settings.data_dirs,
    )
    return Service(
        settings=foundation.settings,
        store=store,
        pipeline=member.pipeline,
        environments=foundation.environments,
        sandboxes=foundation.sandboxes,
        node=foundation.node,
        nodes=member.nodes(),
        suitability=suitability,
        claims=member.claims,
        concurrency=make_concurrency(foundation, attempts.context.stages, manager),
        serving=serving,
        external=attempts.context.external,
        live=engines.live,
        overview=OverviewFeed(overview.build),
        event_tail=EventTail(store),
        trajectories=TrajectoryViewer(store, serving),
        hangs=hangs,
        metrics=foundation.metrics,
        run_service=run_service,
        delivery=Delivery(store.runs, manager),
        run_exporter=RunExporter(store.runs, run_service),
        rescorer=Rescorer(attempts.context, check_environment),
        steps=attempts.steps,
        clock=foundation.clock,
        shutdown=shutdown,
    )
