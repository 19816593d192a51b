"""Serves each policy: the engines of its pool, and the tokenizer and chat format that they share.

Guarantees: a backend is in service only if the service can also turn messages into ids for it. Registered backends are
registered again after a restart; one that does not answer is retried until it does, and `waiting` names it. If the
backends are shared, those that other services register, drain or remove are registered, drained or removed here too;
one that this service cannot reach is not removed for the others.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import anyio
import structlog
from anyio.abc import TaskGroup
from pydantic import JsonValue

from api_schemas.events import EventKind
from api_schemas.inference import (
    BackendSpec,
    BackendState,
    BackendView,
    PauseRequest,
    PoolOutcome,
    ResumeRequest,
    WeightsGroupRequest,
    WeightsRequest,
    is_frozen,
)
from api_schemas.rollouts import RolloutRequest
from rollout_service.errors import StoreError, describe
from rollout_service.inference.errors import (
    InferenceError,
    NoBackendError,
    UnknownBackend,
    WeightsPartlyLoaded,
)
from rollout_service.inference.pool.backend_handle import BackendHandle
from rollout_service.inference.pool.locality import is_loopback, loopback_scope
from rollout_service.inference.pool.pool import BackendPool
from rollout_service.inference.pool.pools import Pools, backend_id_of
from rollout_service.inference.pool.weights.outcomes import (
    check_outcome,
    check_weights_outcome,
    failed_backends,
)
from rollout_service.policies.commands import LeaveGroupRequest, LocalCommands, PoolCommands
from rollout_service.policies.session import PolicySession
from rollout_service.policies.turn_log import TurnLog
from rollout_service.store.engines_contract import BackendStore, SharedBackend
from rollout_service.tokens import ChatRenderer, Conversation, ToolSpec

log = structlog.get_logger(__name__)

RECONNECT_SECONDS = 5.0

Announce = Callable[[EventKind, str, dict[str, JsonValue]], None]
"""Writes an event of a kind, about a subject, with its data; never waits and never fails."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The chat format and context length that the engines of a pool share."""

    renderer: ChatRenderer
    context_length: int


@dataclass(frozen=True, slots=True)
class _Reconnection:
    """The task that registers a backend which may not answer yet."""

    scope: anyio.CancelScope
    ended: anyio.Event


class PolicyServing:
    """The backends and chat formats of all pools."""

    def __init__(
        self,
        pools: Pools,
        backends: BackendStore,
        commands: PoolCommands | None = None,
        *,
        announce: Announce = lambda kind, subject, data: None,  # noqa: ARG005 - nobody listens
    ) -> None:
        """Take the backends to serve, which survive restarts; `commands` of shared ones go to all services.

        `announce` is told what was done to pools.
        """
        self._announce = announce
        self._pools = pools
        self._backends = backends
        self._commands = commands or LocalCommands(pools)
        self._served: dict[str, ServedModel] = {}
        self._followed: dict[str, SharedBackend] = {}
        """The backends of the store that are served here, or will be."""
        self._awaited: dict[str, BackendSpec] = {}
        self._attempts: dict[str, _Reconnection] = {}
        self.waiting: dict[str, str] = {}
        """The ids of backends that could not be registered yet, with the reason."""

    @asynccontextmanager
    async def reconnecting(self, specs: list[BackendSpec]) -> AsyncIterator[None]:
        """Register these and the remembered backends in the background, retrying until the context ends."""
        async with anyio.create_task_group() as tasks:
            for spec in specs:
                self._await(tasks, backend_id_of_spec(spec), spec, remember=True)
            await self._follow_listed(tasks)
            if self._backends.is_shared:
                tasks.start_soon(self._follow, tasks)
            yield
            tasks.cancel_scope.cancel()

    async def _follow(self, tasks: TaskGroup) -> None:
        seen = 0
        while True:
            seen = await self._backends.wait_for_change(seen)
            try:
                await self._follow_listed(tasks)
            except StoreError as error:
                log.error("the backends cannot be read; trying again", error=str(error), hint=error.hint)
                await anyio.sleep(RECONNECT_SECONDS)
                seen -= 1

    async def _follow_listed(self, tasks: TaskGroup) -> None:
        """Serve what the store lists, and nothing that it listed before."""
        scope = loopback_scope()
        listed = {
            each.backend_id: each
            for each in await self._backends.backends()
            if each.loopback_of in ("", scope)
        }
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

    def _await(self, tasks: TaskGroup, backend_id: str, spec: BackendSpec, *, remember: bool = False) -> None:
        """Begin to register a backend in the background, unless that has begun."""
        if backend_id in self._awaited:
            return
        self.waiting[backend_id] = "not tried yet"
        self._awaited[backend_id] = spec
        self._attempts[backend_id] = _Reconnection(anyio.CancelScope(), anyio.Event())
        tasks.start_soon(self._reconnect, backend_id, spec, remember)

    async def _give_up(self, backend_id: str) -> None:
        """Stop serving a backend here, or trying to."""
        await self._end_attempt(backend_id)
        self._stop_waiting(backend_id)
        with suppress(UnknownBackend):
            await self._pools.remove(backend_id)
            log.info("backend removed", backend_id=backend_id)

    async def _end_attempt(self, backend_id: str) -> bool:
        """End the attempts to register a backend; return whether there were any."""
        if backend_id not in self._awaited:
            return False
        attempt = self._attempts[backend_id]
        attempt.scope.cancel()
        await attempt.ended.wait()
        return True

    async def register(
        self, spec: BackendSpec, *, remember: bool = True, exports: Collection[str] | None = None
    ) -> BackendView:
        """Put an engine into service; an error leaves nothing half done.

        `exports` are the extras that another service found when it checked the engine.

        Raises:
            InferenceError: The engine does not answer, or lacks a required feature.
            TokenError: The engine's tokenizer or chat format cannot be loaded.
        """
        known = {view.backend_id for view in self._pools.views()}
        view = await self._pools.register(
            str(spec.url),
            spec.pool,
            kind=spec.kind,
            max_in_flight=spec.max_in_flight,
            traces=spec.trace,
            exports=exports,
        )
        try:
            path = spec.tokenizer or view.tokenizer_path
            renderer = await anyio.to_thread.run_sync(ChatRenderer.load, path, spec.renderer)
        except BaseException:
            if view.backend_id not in known:
                with anyio.CancelScope(shield=True):
                    await self._pools.remove(view.backend_id)
            raise
        self._served[spec.pool] = ServedModel(renderer, view.context_length)
        self._pools.note_change()
        self._stop_waiting(view.backend_id)
        if remember:
            await self._share(view, spec, path)
        log.info("backend registered", backend_id=view.backend_id, model=view.model_path, pool=view.pool)
        return view

    async def remove(self, backend_id: str) -> None:
        """Remove an engine for good.

        Raises:
            UnknownBackend: No backend with that id is registered.
        """
        was_awaited = await self._end_attempt(backend_id)
        self._followed.pop(backend_id, None)
        was_listed = await self._backends.remove(backend_id)
        if not was_listed and not was_awaited:
            await self._pools.remove(backend_id)
            log.info("backend removed", backend_id=backend_id)
            return
        await self._give_up(backend_id)

    async def clear(self, pool: str) -> int:
        """Remove all engines of a pool for good, including those still waited for; return their number."""
        awaited = {backend_id for backend_id, spec in self._awaited.items() if spec.pool == pool}
        listed = {each.backend_id for each in await self._backends.backends() if each.spec.pool == pool}
        served = {view.backend_id for view in self._pools.views() if view.pool == pool}
        for backend_id in awaited | listed | served:
            with suppress(UnknownBackend):
                await self.remove(backend_id)
        return len(awaited | listed | served)

    async def drain(self, backend_id: str) -> BackendView:
        """Send an engine no new requests.

        Raises:
            UnknownBackend: No backend with that id is registered.
        """
        view = self._pools.drain(backend_id)
        if (backend := self._followed.get(backend_id)) is not None and self._backends.is_shared:
            self._followed[backend_id] = replace(backend, is_draining=True)
            await self._backends.put(self._followed[backend_id])
        log.info("backend is given nothing new", backend_id=backend_id)
        return view

    def views(self) -> list[BackendView]:
        """Return all backends of all pools."""
        return self._pools.views()

    def pool(self, name: str) -> BackendPool | None:
        """Return the engines of a pool, or None if there is none of that name."""
        return self._pools.get(name)

    def backend(self, backend_id: str) -> BackendHandle | None:
        """Return an engine with its record, or None."""
        return self._pools.handle(backend_id)

    def frozen_version_changes(self) -> dict[str, int]:
        """Return how often the version of each frozen pool has changed, which only an engine itself can do."""
        return {name: count for name, count in self._pools.version_changes().items() if is_frozen(name)}

    def absences(self) -> list[str]:
        """Return a sentence with the reason for each backend that does not serve."""
        awaited = [f"Waiting for {one}: {why.rstrip('.')}." for one, why in self.waiting.items()]
        views = [view for view in self.views() if view.state is not BackendState.READY]
        return awaited + [
            f"{view.backend_id} is {view.state}"
            + (f": {view.last_error}." if view.state is BackendState.FAILED and view.last_error else ".")
            for view in views
        ]

    async def pause(self, request: PauseRequest) -> PoolOutcome:
        """Pause a pool.

        Raises:
            NoBackendError: There is no such pool.
            OrderFailed: An engine in service failed to pause.
        """
        outcome = await self._commands.run(request)
        log.info("pool paused", pool=request.pool, mode=request.mode)
        self._announce(EventKind.POOL_PAUSED, request.pool, {"mode": str(request.mode)})
        return check_outcome(outcome, "pause")

    async def resume(self, request: ResumeRequest) -> PoolOutcome:
        """Resume a pool.

        Raises:
            NoBackendError: There is no such pool.
            OrderFailed: An engine in service failed to resume.
        """
        outcome = await self._commands.run(request)
        log.info("pool resumed", pool=request.pool)
        self._announce(EventKind.POOL_RESUMED, request.pool, {})
        return check_outcome(outcome, "resume")

    async def update_weights(self, request: WeightsRequest) -> PoolOutcome:
        """Load weights into a pool.

        Raises:
            PoolFrozen: The pool is frozen.
            NoBackendError: There is no such pool, or it has no backend.
            WeightsConflict: The version is older than the pool's, or in use for other weights.
            OrderFailed: Backends failed; the error has every answer.
        """
        order = log.bind(pool=request.pool, version=request.version, source=request.weights.type)
        order.info("weight update begun", mode=request.mode, forced=request.force)
        began = time.monotonic()
        try:
            outcome = await self._commands.run(request)
            self._tell_of_weights(outcome, time.monotonic() - began)
            check_weights_outcome(outcome, request.version)
        except WeightsPartlyLoaded as error:
            order.error("weight update done in part", error=str(error), hint=error.hint)
            raise
        except InferenceError as error:
            order.error("weight update refused", error=str(error), code=error.code, hint=error.hint)
            raise
        order.info(
            "weight update done",
            changed=outcome.changed,
            backends=sum(each.ok for each in outcome.outcomes),
            held_seconds=round(outcome.held_seconds, 3),
        )
        return outcome

    def _tell_of_weights(self, outcome: PoolOutcome, seconds: float) -> None:
        if not outcome.changed:
            return
        data: dict[str, JsonValue] = {
            "version": outcome.version,
            "seconds": round(seconds, 3),
            "held_seconds": round(outcome.held_seconds, 3),
            "backends": sum(each.ok for each in outcome.outcomes),
            "failed": len(failed_backends(outcome)),
        }
        self._announce(EventKind.WEIGHTS_UPDATED, outcome.pool, data)

    async def join_group(self, request: WeightsGroupRequest) -> PoolOutcome:
        """Let a pool's backends join a process group, all or none.

        Raises:
            PoolFrozen: The pool is frozen.
            NoBackendError: There is no such pool, or it has no backend.
            WeightsConflict: The number of ranks is wrong, or the trainer is not listening.
            BackendRejected: A backend cannot take weights from a process group.
            OrderFailed: A backend could not join.
        """
        return check_outcome(await self._commands.run(request), "join the process group")

    async def leave_group(self, pool: str, name: str) -> PoolOutcome:
        """Let a pool's backends leave a process group.

        Raises:
            NoBackendError: There is no such pool, or it has no backend.
            OrderFailed: A backend could not leave.
        """
        return check_outcome(
            await self._commands.run(LeaveGroupRequest(pool=pool, group_name=name)), "leave the process group"
        )

    def check(self, pool: str) -> None:
        """Check that a pool is served, or about to be.

        Raises:
            NoBackendError: The pool is neither; the hint says how to register a backend.
        """
        if not self.expects(pool):
            self._pools[pool]

    def expects(self, pool: str) -> bool:
        """Return whether a pool was served, or is about to be."""
        return pool in self._served or any(spec.pool == pool for spec in self._awaited.values())

    def in_service(self) -> tuple[frozenset[str], anyio.Event]:
        """Return the pools with a backend in service, paused ones too, and the event of the next change."""
        pools, changed = self._pools.in_service()
        return pools & self._served.keys(), changed

    def connect(self, pool: str) -> tuple[ServedModel, BackendPool]:
        """Return the model that a pool serves, and its engines.

        Raises:
            NoBackendError: The pool is not served.
        """
        served = self._served.get(pool)
        if served is None:
            raise NoBackendError(f"pool {pool!r} has no backend", hint="Register one with POST /v1/backends.")
        return served, self._pools[pool]

    def renderer(self, pool: str) -> ChatRenderer | None:
        """Return the chat format of a pool that is, or was, served here; None for others."""
        served = self._served.get(pool)
        return None if served is None else served.renderer

    def model(self, pool: str) -> str:
        """Return the model that a pool serves.

        Raises:
            NoBackendError: The pool is not served.
        """
        _, backends = self.connect(pool)
        return next((view.model_path for view in backends.views()), pool)

    async def open(
        self, request: RolloutRequest, tools: list[ToolSpec], turns: TurnLog | None = None
    ) -> PolicySession:
        """Open the conversation of one rollout with its pool.

        Raises:
            NoBackendError: The pool is not served.
        """
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
        """Free a rollout's place on its backend; idempotent."""
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
        )
        known = self._followed.get(backend_id)
        self._followed[backend_id] = backend
        # A file is always written: the last attempt may have failed.
        if known != backend or not self._backends.is_shared:
            await self._backends.put(backend)

    def _stop_waiting(self, backend_id: str) -> None:
        self.waiting.pop(backend_id, None)
        self._awaited.pop(backend_id, None)

    async def _reconnect(self, backend_id: str, spec: BackendSpec, remember: bool) -> None:
        attempt = self._attempts[backend_id]
        try:
            with attempt.scope:
                await self._register_in_the_end(backend_id, spec, remember=remember)
        finally:
            attempt.ended.set()

    async def _register_in_the_end(self, backend_id: str, spec: BackendSpec, *, remember: bool) -> None:
        url = str(spec.url)
        while backend_id in self._awaited:
            try:
                listed = self._followed.get(backend_id) if self._backends.is_shared else None
                exports = listed.exports if listed is not None else None
                await self.register(spec, remember=remember, exports=exports)
            except InferenceError as error:
                self.waiting[backend_id] = str(error)
                log.warning(
                    "backend does not answer yet; trying again", url=url, error=str(error), hint=error.hint
                )
                await anyio.sleep(RECONNECT_SECONDS)
            except Exception as error:
                info = describe(error)
                self.waiting[backend_id] = info.message
                defect = error if info.code == "internal_error" else None
                log.error(
                    "backend cannot be used", url=url, error=info.message, hint=info.hint, exc_info=defect
                )
                self._awaited.pop(backend_id, None)


def backend_id_of_spec(spec: BackendSpec) -> str:
    """Return the id of the backend that a request registers."""
    return backend_id_of(str(spec.url), spec.pool)
