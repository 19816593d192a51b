"""Opens the parts of the service in order, and closes them in reverse.

The leftovers of a crash are swept before any rollout starts. Once `open_service` is left, no task, sandbox or engine of
this service lives on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import anyio.to_thread
import structlog
from prometheus_client import Gauge

from api_schemas.rollouts import Stage
from rollout_service.activity import ActivityBoard
from rollout_service.base.shutdown import Shutdown
from rollout_service.cluster.leadership import RETENTION_ROLE, RUNS_ROLE, Leadership, Work
from rollout_service.cluster.membership import Membership, Placement
from rollout_service.cluster.node import Concurrency
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.groups.filters import FilterRegistry
from rollout_service.observability.telemetry.families import Collected
from rollout_service.observability.telemetry.health import node_metrics
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.observability.telemetry.parallel import slot_metrics
from rollout_service.observability.tracing.otel.setup import tracing
from rollout_service.observability.tracing.steps import StepArchive, StepWriter
from rollout_service.pipeline.context import AttemptContext, Stages
from rollout_service.pipeline.fair_slots import FairSlots
from rollout_service.pipeline.pauses import Pauser
from rollout_service.pipeline.pipeline import Pipeline
from rollout_service.pipeline.saved_sandboxes import SavedSandboxes
from rollout_service.pipeline.settlement import ClaimRules
from rollout_service.pipeline.shared_setup import SharedSetups
from rollout_service.pipeline.stage import StageLimiter
from rollout_service.pipeline.turn_writer import TurnWriter
from rollout_service.runs import Delivery, RunManager
from rollout_service.runs.api import RunExporter, RunService
from rollout_service.runs.dataset import reopening
from rollout_service.runs.rescore import Rescorer
from rollout_service.server.events import EventTail, StateWatcher
from rollout_service.server.hangs import HangWatch
from rollout_service.server.lifecycle.engines import EngineContext, open_engines
from rollout_service.server.lifecycle.foundation import Foundation, open_foundation
from rollout_service.server.lifecycle.membership import ClusterMember, Suitability
from rollout_service.server.lifecycle.service import Service, check_environment_here
from rollout_service.server.overview import OverviewBuilder, OverviewFeed
from rollout_service.server.trajectories import TrajectoryViewer
from rollout_service.settings import PipelineSettings, Settings


@asynccontextmanager
async def open_service(settings: Settings, metrics: Metrics, shutdown: Shutdown) -> AsyncIterator[Service]:
    """Open the service, sweep the remains of a crash, and work until the block is left.

    Every part goes onto one stack, so parts that are opened later are closed earlier: the leader's work on runs, the
    pipeline, which hands back its rollouts, and the membership; then the records of attempts are written; then
    sessions, the gateway and the engines close, then the sandboxes, and last the store, which all of them write.
    """
    async with AsyncExitStack() as stack:
        foundation = await open_foundation(stack, settings, metrics)
        engines = await open_engines(stack, foundation)
        context, steps = await open_attempts(stack, foundation, engines, shutdown)
        serving = engines.serving
        member = await make_member(foundation, serving, context)
        managers = member.managers
        hangs = HangWatch(
            foundation.node.name,
            context,
            serving,
            foundation.state_dir,
            troubled_runs=lambda: [run for manager in managers for run in manager.troubled],
        )
        overview = await _make_overview(engines, member, hangs)
        membership = await begin_work(stack, serving, member, hangs)
        service = _service(engines, steps, hangs, member, membership, overview, shutdown)
        overview.readiness = service
        ready = Gauge("rollout_ready", "1 while the service takes work, else 0", registry=metrics.registry)
        ready.set_function(lambda: float(not service.unready()))
        yield service


async def _make_overview(engines: EngineContext, member: ClusterMember, hangs: HangWatch) -> OverviewBuilder:
    """Make the overview, and subscribe it to everything that ends from now on."""
    live, context = engines.live, member.context
    overview = OverviewBuilder(
        context=context,
        manager_of=member.manager_of,
        nodes=member.nodes(),
        node=member.foundation.node.name,
        open_sessions=lambda: live.sessions.open_sessions,
        hangs=hangs,
    )
    context.activities.observe(overview.figures)
    member.pipeline.on_finished(overview.outcomes.ended)
    if not context.store.cluster.is_shared:
        await overview.remember()
    return overview


def _service(
    engines: EngineContext,
    steps: StepArchive,
    hangs: HangWatch,
    member: ClusterMember,
    membership: Membership,
    overview: OverviewBuilder,
    shutdown: Shutdown,
) -> Service:
    foundation, context, serving = member.foundation, member.context, engines.serving
    store = foundation.store
    suitability = Suitability(member.placement, membership)
    check_environment = partial(check_environment_here, foundation.environments, foundation.sandboxes, suitability)
    run_service = RunService(
        store.runs,
        member.manager_of,
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
        concurrency=make_concurrency(member),
        serving=serving,
        external=context.external,
        live=engines.live,
        overview=OverviewFeed(overview.build),
        event_tails=[EventTail(shard) for shard in store.shards],
        trajectories=TrajectoryViewer(store, serving),
        hangs=hangs,
        metrics=foundation.metrics,
        run_service=run_service,
        delivery=Delivery(store.runs, member.manager_of),
        run_exporter=RunExporter(store.runs, run_service),
        rescorer=Rescorer(context, check_environment),
        steps=steps,
        clock=foundation.clock,
        shutdown=shutdown,
    )


async def open_attempts(
    stack: AsyncExitStack, foundation: Foundation, engines: EngineContext, shutdown: Shutdown
) -> tuple[AttemptContext, StepArchive]:
    """Open the context of attempts, and the records of their steps, turns and traces."""
    settings, store, metrics = foundation.settings, foundation.store, foundation.metrics
    activities, step_writer = ActivityBoard(), StepWriter(store)
    activities.observe(step_writer)
    await stack.enter_async_context(step_writer.running())
    slots = FairSlots(settings.pipeline.subagent_slots)
    metrics.registry.register(Collected(lambda: slot_metrics(slots.held, slots.waiting, slots.total)))
    await stack.enter_async_context(tracing(activities, metrics.registry, settings.node_name, engines.serving.views))
    admission = foundation.node.admission
    setups = SharedSetups(lambda: bool(admission.pressure_reasons), metrics.count_shared_setup)
    await stack.enter_async_context(setups.running())
    pauser = Pauser(settings.sandboxes.pause_seconds, admission, metrics)
    pausing = pauser.running(foundation.node.pool.pausing)
    turn_writer = await _open_turn_writer(stack, foundation) if settings.pipeline.resume else None
    context = AttemptContext(
        owner=foundation.owner,
        store=store,
        stages=make_stages(settings.pipeline, metrics),
        environments=foundation.environments,
        sandboxes=foundation.sandboxes,
        policies=engines.serving,
        admission=admission,
        setups=setups,
        pauser=await stack.enter_async_context(pausing),
        metrics=metrics,
        max_attempts=settings.pipeline.max_attempts,
        turn_writer=turn_writer,
        saved_sandboxes=await _open_saved_sandboxes(foundation, turn_writer),
        gateway=engines.gateway,
        judge=engines.judge,
        sampler=engines.sampler,
        subagent_slots=slots,
        activities=activities,
        is_stopping=lambda: shutdown.begun,
    )
    return context, StepArchive(store, activities, step_writer)


def make_stages(settings: PipelineSettings, metrics: Metrics) -> Stages:
    limiters = {
        stage: StageLimiter(
            stage,
            places=getattr(settings, f"{stage}_queue"),
            workers=getattr(settings, f"{stage}_workers"),
            metrics=metrics,
        )
        for stage in Stage
    }
    return Stages(init=limiters[Stage.INIT], rollout=limiters[Stage.ROLLOUT], evaluate=limiters[Stage.EVALUATE])


async def _open_turn_writer(stack: AsyncExitStack, foundation: Foundation) -> TurnWriter:
    writer = TurnWriter(foundation.store, foundation.owner, foundation.metrics)
    await stack.enter_async_context(writer.running())
    return writer


async def _open_saved_sandboxes(foundation: Foundation, turns: TurnWriter | None) -> SavedSandboxes | None:
    settings = foundation.settings.sandboxes
    if turns is None or not settings.save_seconds:
        return None
    shared = settings.save_folder
    saved = SavedSandboxes(
        foundation.state_dir / "saved-sandboxes" if shared is None else shared / foundation.settings.node_name,
        foundation.metrics,
        turns.flush,
        seconds=settings.save_seconds,
        limit=settings.save_bytes,
        budget=settings.saved_bytes,
        shared=shared is not None,
    )
    await saved.sweep(foundation.store)
    return saved


log = structlog.get_logger(__name__)


async def make_member(foundation: Foundation, serving: PolicyServing, context: AttemptContext) -> ClusterMember:
    """Make this node's member, with a pipeline and run managers that have not begun."""
    settings, environments = foundation.settings, foundation.environments
    claims = ClaimRules(one.spec.name for one in environments.list())
    return ClusterMember(
        foundation,
        context,
        placement=Placement(environments, foundation.sandboxes, settings.cluster.labels),
        claims=claims,
        pipeline=Pipeline(context, settings.pipeline, claims),
        managers=await _make_run_managers(foundation, serving),
    )


async def _make_run_managers(foundation: Foundation, serving: PolicyServing) -> Sequence[RunManager]:
    filters = await anyio.to_thread.run_sync(FilterRegistry.load)
    for name, problem in filters.problems.items():
        log.error("a filter cannot be used", name=name, error=str(problem), hint=problem.hint)

    def pool_version(pool: str) -> int:
        return max((view.weight_version for view in serving.views() if view.pool == pool), default=0)

    return [
        RunManager(
            shard,
            filters,
            places=_places(foundation.settings.pipeline),
            reopen=reopening(foundation.environments.get),
            pool_version=pool_version,
            metrics=foundation.metrics,
            retention=foundation.settings.retention,
        )
        for shard in foundation.store.shards
    ]


def _places(stages: PipelineSettings) -> int:
    """Return how many rollouts can be in progress before their evaluation."""
    return stages.init_queue + stages.init_workers + stages.rollout_queue + stages.rollout_workers


def make_concurrency(member: ClusterMember) -> Concurrency:
    foundation = member.foundation

    def on_change(pipeline: PipelineSettings) -> None:
        # At nodes that share a store, the next heartbeat tells the leader, wherever it is.
        if not foundation.store.cluster.is_shared:
            for manager in member.managers:
                manager.resize(_places(pipeline))

    return Concurrency(member.context.stages, foundation.node, foundation.settings, on_change)


async def begin_work(
    stack: AsyncExitStack, serving: PolicyServing, member: ClusterMember, hangs: HangWatch
) -> Membership:
    """Join the cluster, and work until the stack is closed.

    The pipeline claims nothing before this node has joined, and hands back what it held before the node leaves. This
    node leads the runs only while its pipeline works.
    """
    foundation, membership = member.foundation, member.membership()
    await stack.enter_async_context(membership.joined())
    await stack.enter_async_context(hangs.running())  # also while the pipeline ends
    await stack.enter_async_context(member.pipeline.running())
    watcher = StateWatcher(
        foundation.announcer.announce, foundation.node, backends=serving.views, claims=lambda: member.claims.is_open
    )
    tasks = await stack.enter_async_context(anyio.create_task_group())
    stack.callback(tasks.cancel_scope.cancel)
    tasks.start_soon(watcher.run)
    leaderships = [Leadership(shard.cluster, foundation.owner) for shard in foundation.store.shards]
    foundation.metrics.registry.register(
        Collected(lambda: node_metrics(membership.beat, {role for one in leaderships for role in one.leases}))
    )
    for leadership, manager in zip(leaderships, member.managers, strict=True):
        roles: dict[str, Work] = {RUNS_ROLE: manager.manage, RETENTION_ROLE: manager.prune}
        await stack.enter_async_context(leadership.leading(roles))
    return membership
