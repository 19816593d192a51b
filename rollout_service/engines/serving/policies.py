"""Serves each policy: the engines of its pool, and the tokenizer and chat format that they share.

A backend is in service only if the service can also turn messages into ids for it. Backends are registered again after
a restart; one that does not answer is retried until it does, and `waiting` names it. Of shared backends, those that
other services register, drain or remove are registered, drained or removed here too; one that this service cannot reach
is not removed for the others. A backend whose lease runs out is removed; a pool that loses its last one so is
abandoned.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import anyio
import structlog
from anyio.abc import TaskGroup

from api_schemas.events import EventKind
from api_schemas.inference import BackendSpec, BackendState, BackendView, is_frozen
from api_schemas.rollouts import RolloutRequest
from rollout_service.base.errors import StoreError, did_you_mean
from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.contract import ModelInfo
from rollout_service.engines.errors import NoBackendError, UnknownBackend, UnknownPool
from rollout_service.engines.pool.backend_handle import BackendHandle
from rollout_service.engines.pool.locality import is_loopback, loopback_scope
from rollout_service.engines.pool.pool import BackendPool
from rollout_service.engines.pool.pools import Pools, backend_id_of
from rollout_service.engines.serving.awaited_backends import RECONNECT_SECONDS, AwaitedBackends
from rollout_service.engines.serving.orders import Announce, LocalCommands, PoolCommands, PoolOrders
from rollout_service.engines.serving.session import PolicySession
from rollout_service.engines.serving.turn_log import TurnLog
from rollout_service.store.engines_contract import BackendStore, SharedBackend, end_of_lease
from rollout_service.tokens import ChatRenderer, Conversation, ToolSpec

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PoolModel:
    """Shared by the engines of a pool."""

    renderer: ChatRenderer
    context_length: int


class PolicyServing:
    """Methods that name a pool raise a `NoBackendError` if it is not served; those that name a backend raise an
    `UnknownBackend` if it is not registered.
    """

    def __init__(
        self,
        pools: Pools,
        backends: BackendStore,
        commands: PoolCommands | None = None,
        *,
        announce: Announce = lambda kind, subject, data: None,  # noqa: ARG005 - nobody listens
        on_abandoned: Callable[[str], Awaitable[int]] | None = None,
    ) -> None:
        """`backends` survive restarts; `commands` of shared ones go to all services.

        `on_abandoned` is called with the name of each abandoned pool, and returns how many rollouts it has cancelled.
        """
        self._pools = pools
        self._backends = backends
        self._served: dict[str, PoolModel] = {}
        self._followed: dict[str, SharedBackend] = {}
        """The backends of the store that are served here, or will be."""
        self._awaited = AwaitedBackends()
        self._leases_changed = ChangeSignal()
        self._announce, self._on_abandoned = announce, on_abandoned
        self.orders = PoolOrders(commands or LocalCommands(pools), announce, self.check_known)

    @asynccontextmanager
    async def reconnecting(self, specs: list[BackendSpec]) -> AsyncIterator[None]:
        """Register these and the remembered backends in the background, retrying until the context ends."""
        async with anyio.create_task_group() as tasks:
            for spec in specs:
                self._await(tasks, backend_id_of_spec(spec), spec, remember=True)
            await self._follow_listed(tasks)
            if self._backends.is_shared:
                tasks.start_soon(self._follow, tasks)
            tasks.start_soon(self._end_leases)
            yield
            tasks.cancel_scope.cancel()

    async def _follow(self, tasks: TaskGroup) -> None:
        seen = 0
        while True:
            seen = await self._backends.wait_for_change(seen)
            try:
                await self._follow_listed(tasks)
            except StoreError as error:
                log.debug("the backends cannot be read; trying again", error=str(error), hint=error.hint)
                await anyio.sleep(RECONNECT_SECONDS)
                seen -= 1

    async def _follow_listed(self, tasks: TaskGroup) -> None:
        scope = loopback_scope()
        listed = {each.backend_id: each for each in await self._backends.backends() if each.loopback_of in ("", scope)}
        served = {view.backend_id: view.state for view in self.views()}
        for backend_id in self._followed.keys() - listed.keys():
            del self._followed[backend_id]
            await self._give_up(backend_id)
        for backend_id, backend in listed.items():
            is_given_up = backend_id in self.waiting and self._followed.get(backend_id) == backend
            if backend_id not in served and backend_id not in self._awaited and not is_given_up:
                self._await(tasks, backend_id, backend.spec)
            elif backend_id in served and backend.is_draining:
                self._pools.drain(backend_id)
            elif served.get(backend_id) is BackendState.DRAINING:
                self._await(tasks, backend_id, backend.spec)
            self._followed[backend_id] = backend
        self._leases_changed.notify()

    async def _end_leases(self) -> None:
        while True:
            changed = self._leases_changed.next
            ends = [each.lease_until for each in self._followed.values() if each.lease_until is not None]
            with anyio.move_on_after(min(ends) - time.time() if ends else None):
                await changed.wait()
            try:
                for backend_id in list(self._followed):
                    backend = self._followed.get(backend_id)  # it may have been renewed while another was removed
                    if backend and backend.lease_until is not None and backend.lease_until <= time.time():
                        await self._remove_lapsed(backend_id, backend.spec.pool)
            except StoreError as error:
                log.warning("engines without a lease stay for now", error=str(error), hint=error.hint)
                await anyio.sleep(RECONNECT_SECONDS)

    async def _remove_lapsed(self, backend_id: str, pool: str) -> None:
        log.warning(
            "the lease of an engine ran out",
            backend_id=backend_id,
            pool=pool,
            hint="Its trainer has ended or cannot reach the service; the trainer registers it again when it can.",
        )
        with suppress(UnknownBackend):
            await self.remove(backend_id)
        followed = [each.spec.pool for each in self._followed.values()]
        awaited = [spec.pool for spec in self._awaited.specs.values()]
        if pool in (*followed, *awaited, *(view.pool for view in self.views())):
            return
        cancelled = await self._on_abandoned(pool) if self._on_abandoned is not None else 0
        log.warning("pool abandoned", pool=pool, rollouts=cancelled)
        self._announce(EventKind.POOL_ABANDONED, pool, {"rollouts": cancelled})

    async def renew(self, backend_id: str) -> None:
        """Extend a backend's lease by its `lease_seconds` from now; do nothing without one.

        Raises:
            UnknownBackend: No backend with that id is registered, perhaps because its lease ran out.
        """
        backend = self._followed.get(backend_id)
        if backend is None:
            raise UnknownBackend(f"no backend {backend_id!r} is registered", hint="Register it again.")
        renewed = replace(backend, lease_until=end_of_lease(backend.spec))
        self._followed[backend_id] = renewed
        self._leases_changed.notify()
        await self._backends.put(renewed)

    def _await(self, tasks: TaskGroup, backend_id: str, spec: BackendSpec, *, remember: bool = False) -> None:
        async def register() -> None:
            listed = self._followed.get(backend_id) if self._backends.is_shared else None
            exports = listed.exports if listed is not None else None
            await self.register(spec, remember=remember, exports=exports)

        self._awaited.begin(tasks, backend_id, spec, register)

    async def _give_up(self, backend_id: str) -> None:
        await self._awaited.end(backend_id)
        self._awaited.forget(backend_id)
        with suppress(UnknownBackend):
            await self._pools.remove(backend_id)
            log.info("backend removed", backend_id=backend_id)

    async def register(
        self, spec: BackendSpec, *, remember: bool = True, exports: Collection[str] | None = None
    ) -> BackendView:
        """Put an engine into service; an error leaves nothing half done.

        `exports` are the extras that another service found when it checked the engine.

        Raises:
            InvalidFieldError: There is no such kind of engine.
            ConfigurationError: The kind of engine is a plug-in that cannot be loaded.
            InferenceError: The engine does not answer, or lacks a required feature.
            TokenError: The engine's tokenizer or chat format cannot be loaded.
            StoreError: The engine cannot be remembered.
        """
        loaded: dict[str, ChatRenderer] = {}

        async def load(info: ModelInfo) -> None:
            path = spec.tokenizer or info.tokenizer_path
            loaded[path] = await anyio.to_thread.run_sync(ChatRenderer.load, path, spec.renderer)

        known = {view.backend_id for view in self._pools.views()}
        view = await self._pools.register(
            str(spec.url),
            spec.pool,
            kind=spec.kind,
            max_in_flight=spec.max_in_flight,
            traces=spec.trace,
            exports=exports,
            accept=load,
        )
        [(path, renderer)] = loaded.items()
        try:
            if remember:
                await self._share(view, spec, path)
        except BaseException:
            if view.backend_id not in known:
                with anyio.CancelScope(shield=True):
                    await self._pools.remove(view.backend_id)
            raise
        self._served[spec.pool] = PoolModel(renderer, view.context_length)
        self._pools.note_change()
        self._awaited.forget(view.backend_id)
        log.info("backend registered", backend_id=view.backend_id, model=view.model_path, pool=view.pool)
        return view

    async def remove(self, backend_id: str) -> None:
        was_awaited = await self._awaited.end(backend_id)
        self._followed.pop(backend_id, None)
        was_listed = await self._backends.remove(backend_id)
        if not was_listed and not was_awaited:
            await self._pools.remove(backend_id)
            log.info("backend removed", backend_id=backend_id)
            return
        await self._give_up(backend_id)

    async def clear(self, pool: str) -> int:
        """Remove all engines of a pool for good, including those still waited for; return their number."""
        awaited = {backend_id for backend_id, spec in self._awaited.specs.items() if spec.pool == pool}
        listed = {each.backend_id for each in await self._backends.backends() if each.spec.pool == pool}
        served = {view.backend_id for view in self._pools.views() if view.pool == pool}
        for backend_id in awaited | listed | served:
            with suppress(UnknownBackend):
                await self.remove(backend_id)
        return len(awaited | listed | served)

    async def drain(self, backend_id: str) -> BackendView:
        view = self._pools.drain(backend_id)
        if (backend := self._followed.get(backend_id)) is not None and self._backends.is_shared:
            self._followed[backend_id] = replace(backend, is_draining=True)
            await self._backends.put(self._followed[backend_id])
        log.info("backend is given nothing new", backend_id=backend_id)
        return view

    @property
    def waiting(self) -> dict[str, str]:
        """Why backends could not be registered yet, by id."""
        return self._awaited.reasons

    def awaited(self) -> list[tuple[str, str]]:
        """Return the pools and ids of the backends in `waiting`."""
        return [(backend_id.partition("@")[0], backend_id) for backend_id in self.waiting]

    def views(self) -> list[BackendView]:
        return self._pools.views()

    def pool(self, name: str) -> BackendPool | None:
        return self._pools.get(name)

    def backend(self, backend_id: str) -> BackendHandle | None:
        return self._pools.handle(backend_id)

    def frozen_version_changes(self) -> dict[str, int]:
        """Return how often the version of each frozen pool has changed, which only an engine itself can do."""
        return {name: count for name, count in self._pools.version_changes().items() if is_frozen(name)}

    def absences(self, pool: str | None = None) -> list[str]:
        """Return a sentence for each backend that does not serve."""
        awaited = [
            f"Waiting for {one}: {why.rstrip('.')}."
            for one, why in self.waiting.items()
            if pool is None or one.startswith(f"{pool}@")
        ]
        views = [view for view in self.views() if view.state is not BackendState.READY and pool in (None, view.pool)]
        return awaited + [
            f"{view.backend_id} is {view.state}"
            + (f": {view.last_error}." if view.state is BackendState.FAILED and view.last_error else ".")
            for view in views
        ]

    def check(self, pool: str) -> None:
        """Check that a pool is served, or about to be.

        Raises:
            NoBackendError: The pool is neither; the hint says how to register a backend.
        """
        if not self.expects(pool):
            self._pools[pool]

    def check_known(self, pool: str) -> None:
        """Check that an order can mean this pool: before any backend is there, nobody knows.

        Raises:
            UnknownPool: Other pools have backends, or will have, but not this one.
        """
        known = {*self._pools.names(), *(pool for pool, _ in self.awaited())}
        if known and pool not in known:
            raise UnknownPool(
                f"there is no pool {pool!r}{did_you_mean(pool, known)}",
                hint=f"The pools are {', '.join(sorted(known))}. Name one of them, or register a backend in this one.",
            )

    def expects(self, pool: str) -> bool:
        return pool in self._served or any(spec.pool == pool for spec in self._awaited.specs.values())

    def in_service(self) -> tuple[frozenset[str], anyio.Event]:
        """Return the pools in service, paused ones too, and the event of the next change."""
        pools, changed = self._pools.in_service()
        return pools & self._served.keys(), changed

    def connect(self, pool: str) -> tuple[PoolModel, BackendPool]:
        served = self._served.get(pool)
        if served is None:
            raise NoBackendError(f"pool {pool!r} has no backend", hint="Register one with POST /v1/backends.")
        backends = self._pools[pool]
        # Any of them may get a request, and refuses one that is too long for itself.
        shortest = min((view.context_length for view in backends.views()), default=served.context_length)
        return replace(served, context_length=shortest), backends

    def renderer(self, pool: str) -> ChatRenderer | None:
        """Return None for a pool that was never served here."""
        served = self._served.get(pool)
        return None if served is None else served.renderer

    def model(self, pool: str) -> str:
        _, backends = self.connect(pool)
        return next((view.model_path for view in backends.views()), pool)

    async def open(self, request: RolloutRequest, tools: list[ToolSpec], turns: TurnLog | None = None) -> PolicySession:
        served, pool = self.connect(request.pool)
        return PolicySession(
            Conversation(served.renderer, tools),
            pool,
            affinity=request.rollout_id or "",
            sampling=request.sampling,
            stop_token_ids=served.renderer.stop_token_ids,
            context_length=served.context_length,
            exports=request.exports,
            turns=turns,
        )

    def close(self, request: RolloutRequest) -> None:
        if request.pool in self._served:
            self._pools[request.pool].release(request.rollout_id or "")

    async def _share(self, view: BackendView, spec: BackendSpec, tokenizer: str) -> None:
        backend_id = view.backend_id
        if self._backends.is_shared:  # an engine may name other weights' folder once it has loaded them
            spec = spec.model_copy(update={"tokenizer": tokenizer})
        is_local = self._backends.is_shared and is_loopback(str(spec.url))
        backend = SharedBackend(
            backend_id,
            spec,
            loopback_of=loopback_scope() if is_local else "",
            exports=tuple(view.exports),
            lease_until=end_of_lease(spec),
        )
        known = self._followed.get(backend_id)
        # A file is always written: the last attempt may have failed.
        if known != backend or not self._backends.is_shared or backend.lease_until is not None:
            await self._backends.put(backend)
        self._followed[backend_id] = backend
        self._leases_changed.notify()


def backend_id_of_spec(spec: BackendSpec) -> str:
    return backend_id_of(str(spec.url), spec.pool)
