"""Opens engines, gateway, judge and live sessions, with everything that works on them in the background.

No engine that this service started outlives the stack. Sessions are served without waiting for another part; at the
end, answers under way are cut off before their store is closed. Sessions stay open over a shutdown.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from rollout_service.base import private_files
from rollout_service.cluster.pool_commands import SharedCommands
from rollout_service.engines.kinds.embedded.process import EmbeddedEngine
from rollout_service.engines.kinds.registry import check_kinds
from rollout_service.engines.local_servers.process import kept_running
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.engines.pool.weights.controller import Exclusive
from rollout_service.engines.serving.policies import PolicyServing, backend_id_of_spec
from rollout_service.engines.serving.text_sampler import PoolTextSampler
from rollout_service.engines.shipped import model_folder
from rollout_service.gateway.capture import TurnCapture
from rollout_service.gateway.gateway import Gateway, GatewayParts
from rollout_service.gateway.metrics import GatewayMetrics
from rollout_service.judging.contract import Judge, TextSampler
from rollout_service.judging.judge import PoolJudge
from rollout_service.judging.metrics import JudgeMetrics
from rollout_service.live.canary import Canaries
from rollout_service.live.consent import MessageHashes
from rollout_service.live.detectors import Detectors
from rollout_service.live.judging.factory import make_judge_stage
from rollout_service.live.metrics import LiveFunnel, LiveMetrics
from rollout_service.live.parts.work import SessionTraining
from rollout_service.live.recorder import RecordingParts
from rollout_service.live.register import UserHashes
from rollout_service.live.serving.app import LiveApp
from rollout_service.live.serving.engines import SessionEngines
from rollout_service.live.sessions import LiveSessions
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.observability.telemetry.engines import PoolMetrics
from rollout_service.observability.telemetry.health import HealthMetrics
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.server.lifecycle.foundation import Foundation
from rollout_service.settings import Settings
from rollout_service.store.contract import cancel_unfinished
from rollout_service.store.file_backends import FileBackends


@dataclass(frozen=True, slots=True)
class Live:
    sessions: LiveSessions
    app: LiveApp
    store: SqliteLiveStore
    training: SessionTraining
    canaries: Canaries
    funnel: LiveFunnel


@asynccontextmanager
async def open_live(
    foundation: Foundation, serving: PolicyServing, gateway: Gateway, judge: Judge
) -> AsyncIterator[Live]:
    """Open live sessions, work on them in the block, and add the environment of their parts."""
    live, state_dir = foundation.settings.live, foundation.state_dir
    detectors = await anyio.to_thread.run_sync(Detectors.load, live.detectors)
    metrics = LiveMetrics(foundation.metrics.registry)
    canaries = Canaries(state_dir / private_files.CANARIES, lambda pool: pool in serving.in_service()[0])
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            SqliteLiveStore(state_dir / private_files.LIVE_STORE, foundation.settings.store.disk)
        )
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        judging = await make_judge_stage(live.judge, store, judge, serving, metrics.judged)
        training = SessionTraining.make(
            store,
            foundation.store,
            serving,
            judging=live.judge,
            trained_pool=canaries.main_of,
            node=foundation.settings.node_name,
            metrics=metrics,
        )
        foundation.environments.add(training.environment, "live sessions")
        users = UserHashes.load(state_dir / private_files.USERS_SALT)
        hashes = MessageHashes(users.message_key())
        recording = RecordingParts(store, detectors, hashes, metrics, tasks, judging.wake, judging.note_feedback)
        sessions = LiveSessions(
            settings=live,
            store=store,
            users=users,
            engines=_make_engines(foundation.settings, serving, gateway, tasks, metrics),
            recording=recording,
            deletion=training.deletion,
            choose_pool=canaries.choose,
            abandoned_pools=canaries.abandoned,
        )
        await sessions.start()
        funnel = LiveFunnel(store, open_sessions=lambda: sessions.open_sessions, judge_queue=lambda: judging.waiting)
        foundation.metrics.registry.register(funnel)
        for work in (store.failed, judging.run, training.run, sessions.expire, sessions.prune):
            tasks.start_soon(work)
        settings = foundation.settings.gateway
        app = LiveApp(sessions.served, settings, gateway.metrics, live.hold_seconds, gateway.bodies)
        with gateway.also_serving(app):
            yield Live(sessions, app, store, training, canaries, funnel)


def _make_engines(
    settings: Settings, serving: PolicyServing, gateway: Gateway, tasks: TaskGroup, metrics: LiveMetrics
) -> SessionEngines:
    return SessionEngines(
        policies=serving,
        settings=settings.live,
        gateway=settings.gateway,
        tasks=tasks,
        metrics=gateway.metrics,
        live_metrics=metrics,
        changed=lambda: serving.in_service()[1],
        url=gateway.url,
    )


@dataclass(frozen=True, slots=True)
class EngineContext:
    serving: PolicyServing
    gateway: Gateway
    sampler: TextSampler
    judge: Judge
    live: Live


async def open_engines(stack: AsyncExitStack, foundation: Foundation) -> EngineContext:
    """Connect the engines, and open the parts in front of them."""
    metrics = foundation.metrics
    serving = await _open_serving(stack, foundation)
    gateway = await _open_gateway(stack, foundation.settings, serving, metrics)
    sampler = PoolTextSampler(serving)
    judge = PoolJudge(sampler, JudgeMetrics(metrics.registry))
    live = await stack.enter_async_context(open_live(foundation, serving, gateway, judge))
    store = foundation.store
    metrics.registry.register(
        HealthMetrics(
            serving.views,
            serving.awaited,
            serving.frozen_version_changes,
            store,
            lambda: store.problem or live.store.problem,
            foundation.node.free_bytes,
        )
    )
    return EngineContext(serving, gateway, sampler, judge, live)


async def _open_serving(stack: AsyncExitStack, foundation: Foundation) -> PolicyServing:
    settings, metrics, announce = foundation.settings, foundation.metrics, foundation.announcer.announce
    check_kinds(settings.backends)

    async def abandon(pool: str) -> int:
        return len(await cancel_unfinished(foundation.store, pool))

    if (engines := foundation.store.engines) is None:
        pools = await stack.enter_async_context(_make_pools(settings, metrics))
        backends = FileBackends(foundation.state_dir / private_files.BACKENDS, backend_id_of_spec)
        serving = PolicyServing(pools, backends, announce=announce, on_abandoned=abandon)
    else:
        commands = SharedCommands(engines, foundation.store.cluster, foundation.owner)
        pools = await stack.enter_async_context(_make_pools(settings, metrics, commands.exclusive))
        commands.attach(pools)
        await stack.enter_async_context(commands.running())
        serving = PolicyServing(pools, engines, commands, announce=announce, on_abandoned=abandon)
    await stack.enter_async_context(_run_embedded_engines(settings, serving))
    await stack.enter_async_context(serving.reconnecting(settings.backends))
    return serving


def _make_pools(settings: Settings, metrics: Metrics, exclusive: Exclusive | None = None) -> Pools:
    """Make pools without engines; `exclusive` is for engines that other services command too."""
    options = PoolOptions(hold_seconds=settings.hold_seconds)
    options_of = {name: replace(options, **pool.model_dump()) for name, pool in settings.pools.items()}
    pools = Pools(options, options_of=options_of, exclusive=exclusive)
    pools.observe(PoolMetrics(metrics.registry, pools.views))
    return pools


@asynccontextmanager
async def _run_embedded_engines(settings: Settings, serving: PolicyServing) -> AsyncIterator[None]:
    """Run one embedded engine for each of `embedded_models`; for `policy` unless the settings name engines."""
    threads = settings.embedded.threads
    async with AsyncExitStack() as stack:
        for pool, model in settings.embedded_models.items():
            make = partial(_embedded_engine, model_folder(model), threads)
            url = await stack.enter_async_context(kept_running(make))
            await serving.register(BackendSpec(url=HttpUrl(url), pool=pool), remember=False)
        yield


def _embedded_engine(model: Path, threads: int, port: int) -> EmbeddedEngine:
    return EmbeddedEngine(model, port=port, threads=threads)


async def _open_gateway(stack: AsyncExitStack, settings: Settings, serving: PolicyServing, metrics: Metrics) -> Gateway:
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
