"""The pools of the service by name, such as `policy`, `judge` or `frozen-1`."""

from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup
from pydantic_core import to_json

from api_schemas.inference import BackendView
from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.errors import NoBackendError, UnknownBackend
from rollout_service.engines.kinds.http_backend import location_of, normalize_url
from rollout_service.engines.kinds.registry import EngineKinds, ask_kind
from rollout_service.engines.pool.backend_handle import BackendHandle
from rollout_service.engines.pool.pool import Accept, BackendPool
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.engines.pool.weights.controller import Exclusive
from rollout_service.engines.routing.contract import LeastLoaded, Observer
from rollout_service.engines.routing.cost_router import CostRouter

DEFAULT_POOL = "policy"


def backend_id_of(url: str, pool: str) -> str:
    """Return the id of the backend at `url` in a pool, unique among all engines and pools.

    Raises:
        ValueError: The address is malformed.
    """
    return f"{pool}@{location_of(url)}"


class Pools:
    """Named pools, with the tasks that probe their backends, and the backends' connections.

    Everything ends with the context. `options_of` are those of single pools, by name. `exclusive` keeps other services,
    if the backends are shared, from commanding a pool.
    """

    def __init__(
        self,
        options: PoolOptions | None = None,
        *,
        options_of: Mapping[str, PoolOptions] | None = None,
        kinds: EngineKinds | None = None,
        exclusive: Exclusive | None = None,
    ) -> None:
        self._options = options or PoolOptions()
        self._options_of = options_of or {}
        self._observer: Observer | None = None
        self._kinds = kinds or EngineKinds()
        self._exclusive = exclusive
        self._pools: dict[str, BackendPool] = {}
        self._changed = ChangeSignal()
        self._tasks: TaskGroup | None = None

    def observe(self, observer: Observer) -> None:
        """Observe the pools that are made from now on."""
        self._observer = observer

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        tasks, self._tasks = self._tasks, None
        if tasks is None:
            return None
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            for pool in self._pools.values():
                await pool.close()
        return await tasks.__aexit__(exc_type, exc, traceback)

    def __getitem__(self, name: str) -> BackendPool:
        """Raise `NoBackendError` if no backend was ever registered in the pool."""
        if name not in self._pools:
            raise NoBackendError(
                f"there is no pool {name!r}",
                hint="Register a backend in it: "
                f"POST /v1/backends {to_json({'url': 'http://host:30000', 'pool': name}).decode()}",
            )
        return self._pools[name]

    def get(self, name: str) -> BackendPool | None:
        """Return None if no backend was ever registered in it."""
        return self._pools.get(name)

    def handle(self, backend_id: str) -> BackendHandle | None:
        found = (pool.handle(backend_id) for pool in self._pools.values())
        return next((handle for handle in found if handle is not None), None)

    def names(self) -> list[str]:
        """Return the pools that ever had a backend: another name may be mistyped."""
        return sorted(name for name, pool in self._pools.items() if pool.has_served)

    def in_service(self) -> tuple[frozenset[str], anyio.Event]:
        """Return the pools in service, paused ones included, and the event of the next change."""
        return frozenset(name for name, pool in self._pools.items() if pool.in_service), self._changed.next

    def note_change(self) -> None:
        self._changed.notify()

    def views(self) -> list[BackendView]:
        return [view for name in self.names() for view in self._pools[name].views()]

    def version_changes(self) -> dict[str, int]:
        return {name: pool.version_changes for name, pool in self._pools.items()}

    async def register(
        self,
        url: str,
        pool: str = DEFAULT_POOL,
        *,
        kind: str | None = None,
        max_in_flight: int | None = None,
        traces: bool = False,
        exports: Collection[str] | None = None,
        accept: Accept | None = None,
    ) -> BackendView:
        """Put the engine at `url` into service in a pool.

        Registering it again changes only `max_in_flight` and `traces`, and ends a drain. If `kind` is None, the engine
        is asked for it. `exports` are the extras that another service found when it checked the engine. `accept` is
        called before it gets a request, and may refuse it.

        Raises:
            ValueError: The address is malformed.
            InvalidFieldError: There is no such kind.
            ConfigurationError: The kind is a plug-in that cannot be loaded.
            BackendUnreachable: The engine does not answer.
            BackendProtocolError: The engine lacks a required feature.
            BackendRejected: The engine refuses the check, or does not fit the pool.
        """
        address = normalize_url(url)
        kind = kind or await ask_kind(address)
        backend = await self._kinds.connect(address, backend_id_of(address, pool), kind)
        try:
            return await self._pool(pool).register(
                backend, kind=kind, max_in_flight=max_in_flight, traces=traces, exports=exports, accept=accept
            )
        except BaseException:
            with anyio.CancelScope(shield=True):
                await backend.close()
            raise

    async def remove(self, backend_id: str) -> None:
        await self._holder(backend_id).remove(backend_id)

    def drain(self, backend_id: str) -> BackendView:
        return self._holder(backend_id).drain(backend_id)

    def _pool(self, name: str) -> BackendPool:
        if self._tasks is None:
            raise RuntimeError("use `async with Pools() as pools`")
        if name not in self._pools:
            options = self._options_of.get(name, self._options)
            self._pools[name] = BackendPool(
                name,
                self._tasks,
                options=options,
                router=CostRouter() if options.router == "cost" else LeastLoaded(),
                observer=self._observer,
                on_change=self.note_change,
                exclusive=self._exclusive,
            )
        return self._pools[name]

    def _holder(self, backend_id: str) -> BackendPool:
        for pool in self._pools.values():
            if backend_id in pool:
                return pool
        raise UnknownBackend(f"there is no backend {backend_id!r}", hint="List them with GET /v1/backends.")
