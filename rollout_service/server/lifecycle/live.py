"""Opens live sessions: their store, the sessions, and everything that works on them in the background.

In the block, sessions are served without waiting for another part; at its end, answers under way are cut off before the
store is closed. Sessions stay open over a shutdown.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from rollout_service.base import private_files
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.gateway.gateway import Gateway
from rollout_service.judging.contract import Judge
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
from rollout_service.server.lifecycle.foundation import Foundation
from rollout_service.settings import Settings


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
