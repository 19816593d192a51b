"""Opens the parts of the service in order, and closes them in reverse.

Guarantees: the leftovers of a crash are swept before any rollout starts; once `open_service` is left, nothing of this
service lives on: no task, no sandbox, no engine that it started.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio

from rollout_service.activity import ActivityBoard
from rollout_service.cluster.concurrency import Concurrency
from rollout_service.cluster.identity import ServiceIdentity
from rollout_service.cluster.leadership import RETENTION_ROLE, RUNS_ROLE, Leadership
from rollout_service.cluster.node import Node
from rollout_service.cluster.placement import Placement
from rollout_service.cluster.pool_commands import SharedCommands
from rollout_service.gateway.capture import TurnCapture
from rollout_service.gateway.gateway import Gateway, GatewayParts
from rollout_service.gateway.metrics import GatewayMetrics
from rollout_service.hangs import HangWatch
from rollout_service.judging.judge import PoolJudge
from rollout_service.judging.metrics import JudgeMetrics
from rollout_service.pipeline.claims import ClaimRules
from rollout_service.pipeline.context import AttemptContext
from rollout_service.pipeline.pipeline import Pipeline
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.subagents.fair_slots import FairSlots
from rollout_service.pipeline.turn_writer import TurnWriter
from rollout_service.policies.serving import PolicyServing, backend_id_of_spec
from rollout_service.policies.text_sampler import PoolTextSampler
from rollout_service.private_files import open_state_folder
from rollout_service.runs import Delivery, RunManager
from rollout_service.runs.api import RunService
from rollout_service.runs.export import RunExporter
from rollout_service.runs.rescore import Rescorer
from rollout_service.service.events import Announcer, EventTail, StateWatcher
from rollout_service.service.live import Live, open_live
from rollout_service.service.membership import ClusterMember, Suitability
from rollout_service.service.overview import OverviewBuilder, OverviewFeed
from rollout_service.service.parts import (
    claiming_less_ahead,
    load_environments,
    make_pools,
    make_run_manager,
    make_stages,
    pipeline_places,
    run_embedded_engines,
    sweep,
)
from rollout_service.service.service import Service, check_environment_here
from rollout_service.service.stores import open_store
from rollout_service.service.trajectories import TrajectoryViewer
from rollout_service.settings import PipelineSettings, Settings
from rollout_service.shutdown import Shutdown
from rollout_service.store.contract import Store
from rollout_service.store.file_backends import FileBackends
from rollout_service.telemetry.health import HealthMetrics
from rollout_service.telemetry.metrics import Metrics
from rollout_service.telemetry.nodes import NodeMetrics
from rollout_service.telemetry.parallel import SlotMetrics
from rollout_service.tracing.otel.opening import tracing
from rollout_service.tracing.steps import StepArchive, StepWriter
from sandboxes import make_provider


@asynccontextmanager
async def open_service(settings: Settings, metrics: Metrics, shutdown: Shutdown) -> AsyncIterator[Service]:
    """Open the service, sweep what a crash left, and work until the block is left."""
    state_dir = open_state_folder(settings.state_dir.expanduser())
    async with AsyncExitStack() as stack:
        owner = str(ServiceIdentity.create())
        store = await stack.enter_async_context(open_store(settings, owner))
        if store.cluster.is_shared:
            settings = claiming_less_ahead(settings)
        environments = await load_environments(settings)
        metrics.expect(one.spec.name for one in environments.list())
        node = await _open_node(stack, settings, state_dir, metrics)
        sandboxes = SandboxSource(node.pool, settings.pipeline.artifacts_bytes)
        announcer = Announcer(store)
        await stack.enter_async_context(announcer.running())
        serving = await _open_serving(stack, settings, store, owner, state_dir, metrics, announcer)
        gateway = await _open_gateway(stack, settings, serving, metrics)
        sampler = PoolTextSampler(serving)
        judge = PoolJudge(sampler, JudgeMetrics(metrics.registry))
        live = await stack.enter_async_context(
            open_live(settings, state_dir, store, environments, serving, gateway, judge, metrics)
        )
        metrics.registry.register(
            HealthMetrics(serving.views, serving.frozen_version_changes, store, node.free_bytes)
        )
        activities, step_writer = ActivityBoard(), StepWriter(store)
        activities.observe(step_writer)
        await stack.enter_async_context(step_writer.running())
        slots = FairSlots(settings.pipeline.subagent_slots)
        metrics.registry.register(SlotMetrics(lambda: slots.held, lambda: slots.waiting, slots.total))
        await stack.enter_async_context(
            tracing(activities, metrics.registry, settings.node_name, serving.views)
        )
        context = AttemptContext(
            owner=owner,
            store=store,
            stages=make_stages(settings.pipeline, metrics),
            environments=environments,
            sandboxes=sandboxes,
            policies=serving,
            admission=node.admission,
            metrics=metrics,
            max_attempts=settings.pipeline.max_attempts,
            turn_writer=await _open_turn_writer(stack, settings, store, owner, metrics),
            gateway=gateway,
            judge=judge,
            sampler=sampler,
            subagent_slots=slots,
            activities=activities,
            is_stopping=lambda: shutdown.begun,
        )
        hangs = HangWatch(node.name, context, serving, state_dir)
        claims = ClaimRules(one.spec.name for one in environments.list())
        pipeline = Pipeline(context, settings.pipeline, claims)
        manager = await make_run_manager(settings, store, environments, serving, metrics)
        member = ClusterMember(
            settings=settings,
            cluster=store.cluster,
            owner=context.owner,
            node=node,
            placement=Placement(environments, sandboxes, settings.cluster.labels),
            claims=claims,
            pipeline=pipeline,
            manager=manager,
            stages=(context.stages.init, context.stages.rollout),
        )
        overview = await _open_overview(context, serving, pipeline, member, live)
        overview.hangs = hangs
        membership = member.membership()
        await stack.enter_async_context(membership.joined())
        await stack.enter_async_context(hangs.running())
        await stack.enter_async_context(pipeline.running())
        watcher = StateWatcher(
            announcer.announce, node, backends=serving.views, claims=lambda: claims.is_open
        )
        await _watch(stack, watcher)
        leadership = Leadership(store.cluster, context.owner)
        metrics.registry.register(NodeMetrics(lambda: membership.beat, lambda: leadership.leases))
        await stack.enter_async_context(
            leadership.leading({RUNS_ROLE: manager.manage, RETENTION_ROLE: manager.prune})
        )
        suitability = Suitability(member.placement, membership)
        check_environment = partial(check_environment_here, environments, sandboxes, suitability)
        run_service = RunService(
            store.runs, manager, check_environment=check_environment, check_pool=serving.check
        )
        service = Service(
            settings=settings,
            store=store,
            pipeline=pipeline,
            environments=environments,
            sandboxes=sandboxes,
            node=node,
            nodes=member.nodes(),
            suitability=suitability,
            claims=claims,
            concurrency=_concurrency(context, node, settings, manager),
            serving=serving,
            external=context.external,
            live=live,
            overview=OverviewFeed(overview.build),
            event_tail=EventTail(store),
            trajectories=TrajectoryViewer(store, serving),
            hangs=hangs,
            metrics=metrics,
            run_service=run_service,
            delivery=Delivery(store.runs, manager),
            run_exporter=RunExporter(store.runs, run_service),
            rescorer=Rescorer(context, check_environment),
            steps=StepArchive(store, activities, step_writer),
            shutdown=shutdown,
        )
        overview.readiness = service
        yield service


async def _open_overview(
    context: AttemptContext, serving: PolicyServing, pipeline: Pipeline, member: ClusterMember, live: Live
) -> OverviewBuilder:
    """Make the overview, which is told of everything that ends from now on."""
    overview = OverviewBuilder(
        store=context.store,
        stages=context.stages,
        serving=serving,
        manager=member.manager,
        nodes=member.nodes(),
        board=context.activities,
        node=member.node.name,
        open_sessions=lambda: live.sessions.open_sessions,
    )
    context.activities.observe(overview.figures)
    pipeline.on_finished(overview.outcomes.ended)
    if not context.store.cluster.is_shared:
        await overview.remember()
    return overview


async def _watch(stack: AsyncExitStack, watcher: StateWatcher) -> None:
    tasks = await stack.enter_async_context(anyio.create_task_group())
    stack.callback(tasks.cancel_scope.cancel)
    tasks.start_soon(watcher.run)


async def _open_gateway(
    stack: AsyncExitStack, settings: Settings, serving: PolicyServing, metrics: Metrics
) -> Gateway:
    parts = GatewayParts(
        settings=settings.gateway,
        policies=serving,
        make_capture=TurnCapture,
        metrics=GatewayMetrics(metrics.registry),
        observe=metrics.count_refused_connection,
    )
    gateway = Gateway(parts)
    await stack.enter_async_context(gateway.running())
    return gateway


async def _open_turn_writer(
    stack: AsyncExitStack, settings: Settings, store: Store, owner: str, metrics: Metrics
) -> TurnWriter | None:
    if not settings.pipeline.resume:
        return None
    writer = TurnWriter(store, owner, metrics)
    await stack.enter_async_context(writer.running())
    return writer


async def _open_node(stack: AsyncExitStack, settings: Settings, state_dir: Path, metrics: Metrics) -> Node:
    provider = make_provider(settings.sandbox, state_dir, settings.images_dir)
    stack.push_async_callback(provider.close)
    await sweep(provider)
    node = Node.make(provider, settings, metrics)
    await stack.enter_async_context(node.running())
    return node


async def _open_serving(
    stack: AsyncExitStack,
    settings: Settings,
    store: Store,
    owner: str,
    state_dir: Path,
    metrics: Metrics,
    announcer: Announcer,
) -> PolicyServing:
    if (engines := store.engines) is None:
        pools = await stack.enter_async_context(make_pools(settings, metrics))
        backends = FileBackends(state_dir / "backends.json", backend_id_of_spec)
        serving = PolicyServing(pools, backends, announce=announcer.announce)
    else:
        commands = SharedCommands(engines, store.cluster, owner)
        pools = await stack.enter_async_context(make_pools(settings, metrics, commands.exclusive))
        commands.attach(pools)
        await stack.enter_async_context(commands.running())
        serving = PolicyServing(pools, engines, commands, announce=announcer.announce)
    await stack.enter_async_context(run_embedded_engines(settings, serving))
    await stack.enter_async_context(serving.reconnecting(settings.backends))
    return serving


def _concurrency(context: AttemptContext, node: Node, settings: Settings, manager: RunManager) -> Concurrency:
    def on_change(pipeline: PipelineSettings) -> None:
        if (
            not context.store.cluster.is_shared
        ):  # otherwise the next heartbeat tells the leader, wherever it is
            manager.resize(pipeline_places(pipeline))

    return Concurrency(context.stages, node, settings, on_change)
