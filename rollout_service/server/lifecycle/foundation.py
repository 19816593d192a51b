"""Opens the parts that all others need. The leftovers of a crash are swept before anything of this node starts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from api_schemas.errors import sentences
from rollout_service.base.errors import ConfigurationError
from rollout_service.base.private_files import open_state_folder
from rollout_service.cluster.identity import ServiceIdentity, is_gone
from rollout_service.cluster.node import Node
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.environments.secrets import HostSecrets
from rollout_service.observability.telemetry.logging import hidden_in_log
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.server.events import Announcer
from rollout_service.settings import Settings, StoreSettings
from rollout_service.store.contract import Store
from rollout_service.store.sqlite import SqliteStore
from sandboxes import SandboxProvider, make_provider

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Foundation:
    settings: Settings
    """As this node follows them."""
    state_dir: Path
    metrics: Metrics
    owner: str
    store: Store
    environments: EnvironmentRegistry
    node: Node
    sandboxes: SandboxSource
    announcer: Announcer
    clock: ServiceClock


async def open_foundation(stack: AsyncExitStack, settings: Settings, metrics: Metrics) -> Foundation:
    state_dir = open_state_folder(settings.state_dir.expanduser())
    owner = str(ServiceIdentity.create())
    secrets = HostSecrets(settings.secrets)
    stack.enter_context(hidden_in_log(secrets.given))
    clock = ServiceClock()
    store = await stack.enter_async_context(open_store(settings, owner, clock))
    await stack.enter_async_context(clock.running())
    if store.cluster.is_shared:
        settings = _claiming_less_ahead(settings)
    environments = await _load_environments(settings)
    metrics.expect(one.spec.name for one in environments.list())
    secrets.note_lacking(one.spec for one in environments.list())
    node = await _open_node(stack, settings, state_dir, metrics)
    announcer = Announcer(store)
    await stack.enter_async_context(announcer.running())
    return Foundation(
        settings=settings,
        state_dir=state_dir,
        metrics=metrics,
        owner=owner,
        store=store,
        environments=environments,
        node=node,
        sandboxes=SandboxSource(node.pool, settings.pipeline.artifacts_bytes, secrets, settings.sandboxes),
        announcer=announcer,
        clock=clock,
    )


def _claiming_less_ahead(settings: Settings) -> Settings:
    """Claim little ahead at a node that shares its store, because other nodes cannot begin rollouts that it claims."""
    pipeline = settings.pipeline
    ahead = min(pipeline.init_queue, max(1, pipeline.init_workers // 4))
    return settings.model_copy(update={"pipeline": pipeline.model_copy(update={"init_queue": ahead})})


async def _load_environments(settings: Settings) -> EnvironmentRegistry:
    environments = await anyio.to_thread.run_sync(
        partial(EnvironmentRegistry.load, settings.environments, harbor=settings.harbor)
    )
    named = {str(path) for path in settings.environments} & environments.problems.keys()
    if named:
        problems = [environments.problems[path] for path in sorted(named)]
        if len(problems) == 1:
            raise problems[0]
        raise ConfigurationError("\n".join(sentences(str(problem), problem.hint) for problem in problems))
    for where, problem in environments.problems.items():
        log.error("an environment cannot be used", where=where, error=str(problem), hint=problem.hint)
    for environment in environments.list():
        for warning in environment.warnings():
            log.warning("an environment has what is ignored", name=environment.spec.name, what=warning)
    return environments


async def _open_node(stack: AsyncExitStack, settings: Settings, state_dir: Path, metrics: Metrics) -> Node:
    provider = make_provider(settings.sandbox, state_dir, settings.images_dir)
    stack.push_async_callback(provider.close)
    await _sweep(provider)
    node = Node.make(provider, settings, metrics)
    await stack.enter_async_context(node.running())
    return node


async def _sweep(provider: SandboxProvider) -> None:
    """Remove the remains of a crash, as far as possible."""
    swept = await provider.sweep()
    log.info("swept what was left", sandboxes=swept.sandboxes, processes=swept.processes)
    for failure in swept.failures:
        log.error(
            "something that a crash left could not be removed",
            what=failure,
            hint="The next start tries again. Until then, end or remove it by hand if it is in the way.",
        )


@asynccontextmanager
async def open_store(settings: Settings, owner: str, clock: Callable[[], float] = time.time) -> AsyncIterator[Store]:
    """Open the store that the settings name for the block: a SQLite file, or a Redis that services share.

    `owner` is the identity of this service. `clock` returns Unix seconds, for a store of this service alone; services
    that share a Redis have its time. The block ends with the store's error if the store fails for good, since nothing
    works without it.
    """
    async with _opened(settings, owner, clock) as store, anyio.create_task_group() as tasks:
        for shard in store.shards:
            tasks.start_soon(shard.failed)
            if shard.segments is not None:
                tasks.start_soon(shard.segments.keep_tidy)
                tasks.start_soon(shard.segments.watch.run)
        yield store
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def _opened(settings: Settings, owner: str, clock: Callable[[], float]) -> AsyncIterator[Store]:
    if settings.store.url:
        async with _opened_redis(settings.store, owner) as store:
            yield store
    else:
        async with await SqliteStore.open(settings.database, clock=clock, disk=settings.store.disk) as of_one_node:
            yield of_one_node


@asynccontextmanager
async def _opened_redis(settings: StoreSettings, owner: str) -> AsyncIterator[Store]:
    # Importing Redis's client takes a tenth of the CPU time of a start.
    from rollout_service.store.redis import RedisConfig, RedisStore
    from rollout_service.store.segments.files import files_of
    from rollout_service.store.sharded import ShardedStore

    configs = RedisConfig.of(settings)
    files = [await anyio.to_thread.run_sync(files_of, settings, one.shard) for one in configs]
    if len(configs) > 1:
        async with ShardedStore.opened(configs, is_gone=is_gone, files=files, owner=owner) as store:
            yield store
    else:
        async with await RedisStore.open(configs[0], is_gone=is_gone, files=files[0], owner=owner) as single:
            yield single


JUMP_SECONDS = 1.0
"""From this difference on the host's clock has jumped; time servers slew smaller ones."""
LOOK_SECONDS = 1.0
HINT = "Set the clock right, for example with a time server, and then restart the service, so that its times are right."


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ServiceClock:
    """Unix time that no jump of the host's clock moves; call it to read it.

    It never goes back, and a second of it lasts a second, also while the host is suspended. It follows the host's clock
    as long as that is set by less than `JUMP_SECONDS` at once. Each jump beyond is logged once; while the two clocks
    differ, `warnings` says so.
    """

    def __init__(self, host: Callable[[], float] = time.time, steady: Callable[[], float] = _since_boot) -> None:
        self._host = host
        self._steady = steady
        self._offset = host() - steady()
        self._ahead = 0.0
        """Seconds that the host's clock was ahead at the last look; negative if behind."""

    def __call__(self) -> float:
        return self._offset + self._steady()

    def look(self) -> None:
        before, difference = self._ahead, self._host() - self()
        self._ahead = difference
        if abs(difference - before) >= JUMP_SECONDS:
            log.warning("the clock jumped", seconds=round(difference - before, 1), hint=HINT)
        if 0 <= difference < JUMP_SECONDS:
            self._offset += difference
            self._ahead = 0.0

    def warnings(self) -> list[str]:
        if abs(self._ahead) < JUMP_SECONDS:
            return []
        where = "ahead of" if self._ahead > 0 else "behind"
        return [f"the clock of this host jumped, and is {abs(self._ahead):.0f} s {where} the service's time. {HINT}"]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, name="clock watch")
            yield
            tasks.cancel_scope.cancel()

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(LOOK_SECONDS)
            self.look()
