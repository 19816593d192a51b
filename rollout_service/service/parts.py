"""The parts of the service, each made from the settings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio.to_thread
import structlog
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from api_schemas.rollouts import Stage
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.errors import ConfigurationError
from rollout_service.groups import FilterRegistry
from rollout_service.inference.engines.embedded.process import EmbeddedEngine
from rollout_service.inference.local_servers.keep_running import kept_running
from rollout_service.inference.pool.options import PoolOptions
from rollout_service.inference.pool.pools import Pools
from rollout_service.inference.pool.weights.controller import Exclusive
from rollout_service.pipeline.context import Stages
from rollout_service.pipeline.stage import StageLimiter
from rollout_service.policies.serving import PolicyServing
from rollout_service.policies.shipped import POLICIES, policy_folder
from rollout_service.runs import RunManager
from rollout_service.runs.dataset import reopening
from rollout_service.settings import PipelineSettings, Settings
from rollout_service.store.contract import Store
from rollout_service.store.runs_contract import RetentionPolicy
from rollout_service.telemetry.engines import PoolMetrics
from rollout_service.telemetry.metrics import Metrics
from sandboxes import SandboxProvider

log = structlog.get_logger(__name__)


async def load_environments(settings: Settings) -> EnvironmentRegistry:
    """Load all environments, and log those that cannot be used.

    Raises:
        ConfigurationError: An environment that the settings name cannot be used.
    """
    environments = await anyio.to_thread.run_sync(
        partial(EnvironmentRegistry.load, settings.environments, harbor=settings.harbor)
    )
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
    return environments


async def sweep(provider: SandboxProvider) -> None:
    """Remove what a crash left; log what cannot be removed, and start all the same."""
    swept = await provider.sweep()
    log.info("swept what was left", sandboxes=swept.sandboxes, processes=swept.processes)
    for failure in swept.failures:
        log.error(
            "something that a crash left could not be removed",
            what=failure,
            hint="The next start tries again. Until then, end or remove it by hand if it is in the way.",
        )


def make_pools(settings: Settings, metrics: Metrics, exclusive: Exclusive | None = None) -> Pools:
    """Make the pools, which have no engine yet; `exclusive` is for engines that other services command too."""
    options = PoolOptions(hold_seconds=settings.hold_seconds)
    options_of = {name: replace(options, **pool.model_dump()) for name, pool in settings.pools.items()}
    pools = Pools(options, options_of=options_of, exclusive=exclusive)
    pools.observe(PoolMetrics(metrics.registry, pools.views))
    return pools


@asynccontextmanager
async def run_embedded_engines(settings: Settings, serving: PolicyServing) -> AsyncIterator[None]:
    """Run the embedded engines within the block: one for each pool that the settings name a model for.

    The pool `policy` has one too, unless the settings name other engines.
    """
    threads = settings.embedded.threads
    async with AsyncExitStack() as stack:
        for pool, model in settings.embedded_models.items():
            make = partial(_embedded_engine, _checkpoint(model), threads)
            url = await stack.enter_async_context(kept_running(make))
            await serving.register(BackendSpec(url=HttpUrl(url), pool=pool), remember=False)
        yield


def _embedded_engine(model: Path, threads: int, port: int) -> EmbeddedEngine:
    return EmbeddedEngine(model, port=port, threads=threads)


def _checkpoint(model: str) -> Path:
    """Return the folder of a shipped policy, or the given folder."""
    return policy_folder(model) if model in POLICIES else Path(model).expanduser()


def claiming_less_ahead(settings: Settings) -> Settings:
    """Return the settings of a node that shares its store: what it claims ahead, other nodes cannot begin."""
    pipeline = settings.pipeline
    ahead = min(pipeline.init_queue, max(1, pipeline.init_workers // 4))
    return settings.model_copy(update={"pipeline": pipeline.model_copy(update={"init_queue": ahead})})


def make_stages(settings: PipelineSettings, metrics: Metrics) -> Stages:
    """Make the limiters of the three stages."""
    limiters = {
        stage: StageLimiter(
            stage,
            places=getattr(settings, f"{stage}_queue"),
            workers=getattr(settings, f"{stage}_workers"),
            metrics=metrics,
        )
        for stage in Stage
    }
    return Stages(
        init=limiters[Stage.INIT], rollout=limiters[Stage.ROLLOUT], evaluate=limiters[Stage.EVALUATE]
    )


async def make_run_manager(
    settings: Settings,
    store: Store,
    environments: EnvironmentRegistry,
    serving: PolicyServing,
    metrics: Metrics,
) -> RunManager:
    """Make the run manager with all filters; log those that cannot be used."""
    filters = await anyio.to_thread.run_sync(FilterRegistry.load)
    for name, problem in filters.problems.items():
        log.error("a filter cannot be used", name=name, error=str(problem), hint=problem.hint)

    def pool_version(pool: str) -> int:
        return max((view.weight_version for view in serving.views() if view.pool == pool), default=0)

    keep = settings.retention
    return RunManager(
        store,
        filters,
        places=pipeline_places(settings.pipeline),
        reopen=reopening(environments.get),
        pool_version=pool_version,
        metrics=metrics,
        retention=RetentionPolicy(keep.ended_run_seconds, keep.settled_group_seconds, keep.rollout_seconds),
    )


def pipeline_places(stages: PipelineSettings) -> int:
    """Return how many rollouts can be in progress before their evaluation."""
    return stages.init_queue + stages.init_workers + stages.rollout_queue + stages.rollout_workers
