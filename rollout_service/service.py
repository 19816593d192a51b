"""The running service: everything with a lifetime, opened in order and closed in reverse.

Guarantees: what a crash left behind is swept before any rollout starts; when `open_service` is left nothing of
this service lives on: no task, no sandbox, no engine that it started.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio
import structlog
from pydantic import HttpUrl

from api_schemas.errors import FieldError, sentences
from api_schemas.inference import BackendSpec, BackendState
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Stage
from rollout_service.cluster.concurrency import Concurrency
from rollout_service.cluster.identity import ServiceIdentity
from rollout_service.cluster.node import Node
from rollout_service.environments.contract import Environment, EnvironmentSpec
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.errors import ConfigurationError, InvalidFieldError, NotFoundError, prefix_field_paths
from rollout_service.groups import FilterRegistry
from rollout_service.inference.engines.embedded.process import EmbeddedEngine
from rollout_service.inference.local_servers.keep_running import kept_running
from rollout_service.inference.pool.options import PoolOptions
from rollout_service.inference.pool.pools import Pools
from rollout_service.pipeline.context import AttemptContext, Stages
from rollout_service.pipeline.pipeline import Pipeline
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.stage import StageLimiter
from rollout_service.policies.serving import PolicyServing
from rollout_service.policies.shipped import POLICIES, policy_folder
from rollout_service.private_files import open_state_folder
from rollout_service.runs import Delivery, RunManager
from rollout_service.runs.api import RunService
from rollout_service.runs.dataset import reopening
from rollout_service.runs.export import RunExporter
from rollout_service.runs.rescore import Rescorer
from rollout_service.settings import DefaultEngine, PipelineSettings, Settings
from rollout_service.shutdown import Shutdown
from rollout_service.store.contract import Store
from rollout_service.store.runs_contract import RetentionPolicy
from rollout_service.store.sqlite.store import SqliteStore
from rollout_service.telemetry.health import HealthMetrics
from rollout_service.telemetry.metrics import Metrics
from rollout_service.telemetry.routing import RoutingTrace
from sandboxes import SandboxProvider, make_provider
from sandboxes.errors import ImageError, SandboxConfigError

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """What the routes work with."""

    settings: Settings
    store: Store
    pipeline: Pipeline
    environments: EnvironmentRegistry
    sandboxes: SandboxSource
    node: Node
    concurrency: Concurrency
    serving: PolicyServing
    metrics: Metrics
    run_service: RunService
    delivery: Delivery
    run_exporter: RunExporter
    rescorer: Rescorer
    shutdown: Shutdown

    async def submit(self, request: RolloutRequest) -> Rollout:
        """Check an order, and make it durable.

        Raises InvalidFieldError with the paths at fault, NoBackendError, ConflictError, StoreError.
        """
        with prefix_field_paths("body.task"):
            environment = self.environments.get(request.task.environment)
            environment.check(request.task.instance)
            await check_image(self.sandboxes, environment.spec)
        self.serving.check(request.pool)
        rollout, _ = await self.store.submit(request)
        return rollout

    async def get(self, rollout_id: str, *, trajectory: bool = False) -> Rollout:
        """A rollout as it stands; raises NotFoundError."""
        rollout = await self.store.get(rollout_id)
        if rollout is None:
            raise NotFoundError(
                f"there is no rollout {rollout_id}", hint="GET /v1/rollouts lists those there are."
            )
        if trajectory and rollout.state.terminal:
            rollout = rollout.model_copy(update={"trajectory": await self.store.trajectory(rollout_id)})
        return rollout

    async def wait(self, rollout_id: str, seconds: float) -> Rollout | None:
        """Return the whole result once the rollout has ended, or None if that takes longer; raise ShuttingDownError."""

        async def ended() -> Rollout:
            await self.store.wait_for_result(rollout_id)
            return await self.get(rollout_id, trajectory=True)

        with anyio.move_on_after(seconds):
            return await self.shutdown.until_begun(ended)
        return None

    async def abort(self, rollout_ids: list[str] | None) -> list[str]:
        """Cancel these rollouts, or all that have not ended; returns those that this was asked for."""
        if rollout_ids is None:
            rollout_ids = [rollout_id async for rollout_id in self._unfinished()]
        for rollout_id in rollout_ids:
            await self.store.cancel(rollout_id)
        return rollout_ids

    async def _unfinished(self) -> AsyncIterator[str]:
        for state in [state for state in RolloutState if not state.terminal]:
            cursor: str | None = None
            while True:
                page = await self.store.list(state=state, cursor=cursor, limit=1_000)
                for rollout in page.rollouts:
                    yield rollout.rollout_id
                if (cursor := page.next_cursor) is None:
                    break

    def warnings(self) -> list[str]:
        """Return what does not work without keeping the service from working."""
        problems = self.environments.problems.items()
        return [f"an environment cannot be used: {where}: {problem}" for where, problem in problems]

    def unready(self) -> list[str]:
        """Why the service cannot take work, each with what to do; empty when it can."""
        reasons = [f"the service is shutting down: {self.shutdown.reason}"] if self.shutdown.begun else []
        if not any(view.state is BackendState.READY for view in self.serving.views()):
            reasons.append(
                "no backend is in service; register one with POST /v1/backends or resume its pool."
                + "".join(f" {sentence}" for sentence in self.serving.absences())
            )
        if (problem := self.store.problem) is not None:
            reasons.append(sentences(str(problem), problem.hint))
        if not self.pipeline.started:
            reasons.append("stopped; POST /start begins rollouts again")
        return reasons


async def check_image(sandboxes: SandboxSource, spec: EnvironmentSpec) -> None:
    """Raise InvalidFieldError when the image of an environment cannot be used."""
    try:
        await sandboxes.check(spec)
    except (ImageError, SandboxConfigError) as error:
        raise InvalidFieldError(
            [FieldError(path="environment", message=f"its image cannot be used: {error}")],
            hint=error.hint,
        ) from error


@asynccontextmanager
async def open_service(settings: Settings, metrics: Metrics, shutdown: Shutdown) -> AsyncIterator[Service]:
    """Open the service, sweep what a crash left, and work until the block is left."""
    state_dir = open_state_folder(settings.state_dir.expanduser())
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(await SqliteStore.open(settings.database))
        await stack.enter_async_context(_failing_with(store))
        environments = await anyio.to_thread.run_sync(EnvironmentRegistry.load, settings.environments)
        _check_named(settings, environments)
        provider = make_provider(settings.sandbox, state_dir, settings.images_dir)
        stack.push_async_callback(provider.close)
        await _sweep(provider)
        node = Node.make(provider, settings, metrics)
        await stack.enter_async_context(node.running())
        sandboxes = SandboxSource(node.pool, settings.pipeline.artifacts_bytes)
        pools = await stack.enter_async_context(_pools(settings, metrics))
        serving = PolicyServing(pools, state_dir / "backends.json")
        await _start_engine(settings, stack, serving)
        metrics.registry.register(HealthMetrics(serving.views, store, node.free_bytes))
        await stack.enter_async_context(serving.reconnecting(settings.backends))
        context = AttemptContext(
            owner=str(ServiceIdentity.create()),
            store=store,
            stages=_stages(settings.pipeline, metrics),
            environments=environments,
            sandboxes=sandboxes,
            policies=serving,
            admission=node.admission,
            metrics=metrics,
            max_attempts=settings.pipeline.max_attempts,
        )
        pipeline = Pipeline(context, settings.pipeline)
        await stack.enter_async_context(pipeline.running())
        manager = await _manager(settings, store, environments, serving, metrics)
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
            concurrency=Concurrency(context.stages, node, settings, lambda it: manager.resize(_places(it))),
            serving=serving,
            metrics=metrics,
            run_service=run_service,
            delivery=Delivery(store.runs, manager),
            run_exporter=RunExporter(store.runs, run_service),
            rescorer=Rescorer(context, check_environment),
            shutdown=shutdown,
        )


@asynccontextmanager
async def _failing_with(store: SqliteStore) -> AsyncIterator[None]:
    """End the block if the store fails for good: without it nothing works."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.failed)
        yield
        tasks.cancel_scope.cancel()


def _check_named(settings: Settings, environments: EnvironmentRegistry) -> None:
    """Refuse to start with an environment that was named and cannot be used; others that cannot be are logged.

    Raises ConfigurationError.
    """
    named = {str(path) for path in settings.environments} & environments.problems.keys()
    if named:
        problems = [environments.problems[path] for path in sorted(named)]
        hint = next((problem.hint for problem in problems if problem.hint), "")
        raise ConfigurationError("; ".join(str(problem) for problem in problems), hint=hint)
    for where, problem in environments.problems.items():
        log.error("an environment cannot be used", where=where, error=str(problem), hint=problem.hint)
    for environment in environments.list():
        for warning in environment.warnings():
            log.warning("an environment has what is ignored", name=environment.spec.name, what=warning)


async def _manager(
    settings: Settings,
    store: Store,
    environments: EnvironmentRegistry,
    serving: PolicyServing,
    metrics: Metrics,
) -> RunManager:
    filters = await anyio.to_thread.run_sync(FilterRegistry.load)
    for name, problem in filters.problems.items():
        log.error("a filter cannot be used", name=name, error=str(problem), hint=problem.hint)

    def pool_version(pool: str) -> int:
        return max((view.weight_version for view in serving.views() if view.pool == pool), default=0)

    keep = settings.retention
    retention = RetentionPolicy(keep.ended_run_seconds, keep.settled_group_seconds, keep.rollout_seconds)
    return RunManager(
        store,
        filters,
        places=_places(settings.pipeline),
        reopen=reopening(environments.get),
        pool_version=pool_version,
        metrics=metrics,
        retention=retention,
    )


def _places(stages: PipelineSettings) -> int:
    """Return how many rollouts can be under way before their evaluation."""
    return stages.init_queue + stages.init_workers + stages.rollout_queue + stages.rollout_workers


async def _check_environment(
    environments: EnvironmentRegistry, sandboxes: SandboxSource, name: str
) -> Environment:
    environment = environments.get(name)
    await check_image(sandboxes, environment.spec)
    return environment


async def _sweep(provider: SandboxProvider) -> None:
    """End and remove what a crash left; log what cannot be removed, and start all the same."""
    swept = await provider.sweep()
    log.info("swept what was left", sandboxes=swept.sandboxes, processes=swept.processes)
    for failure in swept.failures:
        log.error(
            "something that a crash left could not be removed",
            what=failure,
            hint="The next start tries again. Until then, end or remove it by hand if it is in the way.",
        )


async def _start_engine(settings: Settings, stack: AsyncExitStack, serving: PolicyServing) -> None:
    """Start the embedded engine, unless real ones are named."""
    if settings.engine is not DefaultEngine.EMBEDDED or settings.backends:
        return
    model, threads = _checkpoint(settings.embedded.model), settings.embedded.threads
    url = await stack.enter_async_context(
        kept_running(lambda port: EmbeddedEngine(model, port=port, threads=threads))
    )
    await serving.register(BackendSpec(url=HttpUrl(url)), remember=False)


def _checkpoint(model: str) -> Path:
    """The folder of a shipped policy, or of the caller's own."""
    return policy_folder(model) if model in POLICIES else Path(model).expanduser()


def _pools(settings: Settings, metrics: Metrics) -> Pools:
    options = PoolOptions(hold_seconds=settings.hold_seconds)
    options_of = {name: replace(options, **pool.model_dump()) for name, pool in settings.pools.items()}
    return Pools(options, options_of=options_of, observer=RoutingTrace(metrics.registry))


def _stages(settings: PipelineSettings, metrics: Metrics) -> Stages:
    return Stages(
        init=StageLimiter(
            Stage.INIT, places=settings.init_queue, workers=settings.init_workers, metrics=metrics
        ),
        rollout=StageLimiter(
            Stage.ROLLOUT, places=settings.rollout_queue, workers=settings.rollout_workers, metrics=metrics
        ),
        evaluate=StageLimiter(
            Stage.EVALUATE, places=settings.evaluate_queue, workers=settings.evaluate_workers, metrics=metrics
        ),
    )
