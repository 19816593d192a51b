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

from rollout_service.cluster.concurrency import Concurrency
from rollout_service.cluster.identity import ServiceIdentity
from rollout_service.cluster.node import Node
from rollout_service.environments.contract import Environment
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.pipeline.context import AttemptContext
from rollout_service.pipeline.pipeline import Pipeline
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.policies.serving import PolicyServing
from rollout_service.private_files import open_state_folder
from rollout_service.runs import Delivery, RunManager
from rollout_service.runs.api import RunService
from rollout_service.runs.export import RunExporter
from rollout_service.runs.rescore import Rescorer
from rollout_service.service.parts import (
    load_environments,
    make_pools,
    make_run_manager,
    make_stages,
    pipeline_places,
    run_embedded_engine,
    sweep,
)
from rollout_service.service.service import Service, check_image
from rollout_service.settings import Settings
from rollout_service.shutdown import Shutdown
from rollout_service.store.sqlite.store import SqliteStore
from rollout_service.telemetry.health import HealthMetrics
from rollout_service.telemetry.metrics import Metrics
from sandboxes import make_provider


@asynccontextmanager
async def open_service(settings: Settings, metrics: Metrics, shutdown: Shutdown) -> AsyncIterator[Service]:
    """Open the service, sweep what a crash left, and work until the block is left."""
    state_dir = open_state_folder(settings.state_dir.expanduser())
    async with AsyncExitStack() as stack:
        store = await _open_store(stack, settings)
        environments = await load_environments(settings)
        node = await _open_node(stack, settings, state_dir, metrics)
        sandboxes = SandboxSource(node.pool, settings.pipeline.artifacts_bytes)
        serving = await _open_serving(stack, settings, state_dir, metrics)
        metrics.registry.register(HealthMetrics(serving.views, store, node.free_bytes))
        context = AttemptContext(
            owner=str(ServiceIdentity.create()),
            store=store,
            stages=make_stages(settings.pipeline, metrics),
            environments=environments,
            sandboxes=sandboxes,
            policies=serving,
            admission=node.admission,
            metrics=metrics,
            max_attempts=settings.pipeline.max_attempts,
        )
        pipeline = Pipeline(context, settings.pipeline)
        await stack.enter_async_context(pipeline.running())
        manager = await make_run_manager(settings, store, environments, serving, metrics)
        await stack.enter_async_context(manager.running())
        check_environment = partial(_check_environment, environments, sandboxes)
        run_service = RunService(
            store.runs, manager, check_environment=check_environment, check_pool=serving.check
        )
        yield Service(
            settings=settings,
            store=store,
            pipeline=pipeline,
            environments=environments,
            sandboxes=sandboxes,
            node=node,
            concurrency=_concurrency(context, node, settings, manager),
            serving=serving,
            metrics=metrics,
            run_service=run_service,
            delivery=Delivery(store.runs, manager),
            run_exporter=RunExporter(store.runs, run_service),
            rescorer=Rescorer(context, check_environment),
            shutdown=shutdown,
        )


async def _open_store(stack: AsyncExitStack, settings: Settings) -> SqliteStore:
    store = await stack.enter_async_context(await SqliteStore.open(settings.database))
    await stack.enter_async_context(_failing_with(store))
    return store


@asynccontextmanager
async def _failing_with(store: SqliteStore) -> AsyncIterator[None]:
    """End the block if the store fails for good: nothing works without it."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.failed)
        yield
        tasks.cancel_scope.cancel()


async def _open_node(stack: AsyncExitStack, settings: Settings, state_dir: Path, metrics: Metrics) -> Node:
    provider = make_provider(settings.sandbox, state_dir, settings.images_dir)
    stack.push_async_callback(provider.close)
    await sweep(provider)
    node = Node.make(provider, settings, metrics)
    await stack.enter_async_context(node.running())
    return node


async def _open_serving(
    stack: AsyncExitStack, settings: Settings, state_dir: Path, metrics: Metrics
) -> PolicyServing:
    pools = await stack.enter_async_context(make_pools(settings, metrics))
    serving = PolicyServing(pools, state_dir / "backends.json")
    await stack.enter_async_context(run_embedded_engine(settings, serving))
    await stack.enter_async_context(serving.reconnecting(settings.backends))
    return serving


def _concurrency(context: AttemptContext, node: Node, settings: Settings, manager: RunManager) -> Concurrency:
    return Concurrency(
        context.stages, node, settings, lambda pipeline: manager.resize(pipeline_places(pipeline))
    )


async def _check_environment(
    environments: EnvironmentRegistry, sandboxes: SandboxSource, name: str
) -> Environment:
    environment = environments.get(name)
    await check_image(sandboxes, environment.spec)
    return environment
