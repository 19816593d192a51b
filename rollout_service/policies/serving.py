"""Serves each policy: the engines of its pool, and the tokenizer and chat format that they share.

Guarantees: a backend is in service only if the service can also turn messages into ids for it. Backends registered over
HTTP are registered again after a restart; one that does not answer then is retried until it does, and `waiting` names
it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import structlog
from pydantic import TypeAdapter

from api_schemas.inference import (
    BackendSpec,
    BackendState,
    BackendView,
    PauseRequest,
    PoolOutcome,
    ResumeRequest,
    WeightsGroupRequest,
    WeightsRequest,
)
from api_schemas.rollouts import RolloutRequest
from rollout_service.errors import describe
from rollout_service.inference.errors import InferenceError, NoBackendError, WeightsPartlyLoaded
from rollout_service.inference.pool.pools import Pools, backend_id_of
from rollout_service.inference.pool.weights.outcomes import check_outcome, check_weights_outcome
from rollout_service.policies.session import PolicySession
from rollout_service.private_files import write_private
from rollout_service.tokens import ChatRenderer, Conversation, ToolSpec

log = structlog.get_logger(__name__)

RECONNECT_SECONDS = 5.0
_SPECS = TypeAdapter(list[BackendSpec])


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

    def __init__(self, pools: Pools, remembered: Path) -> None:
        """Take `remembered`, the file that keeps the backends across restarts."""
        self._pools = pools
        self._remembered = remembered
        self._served: dict[str, ServedModel] = {}
        self._specs: dict[str, BackendSpec] = {}
        self._awaited: dict[str, BackendSpec] = {}
        self._attempts: dict[str, _Reconnection] = {}
        self._saving = anyio.Lock()
        self.waiting: dict[str, str] = {}
        """The ids of backends that could not be registered yet, with the reason."""

    @asynccontextmanager
    async def reconnecting(self, specs: list[BackendSpec]) -> AsyncIterator[None]:
        """Register these and the remembered backends in the background, retrying until the context ends."""
        async with anyio.create_task_group() as tasks:
            known = {_id(spec): spec for spec in [*self._load(), *specs]}
            for backend_id, spec in known.items():
                self.waiting[backend_id] = "not tried yet"
                self._awaited[backend_id] = spec
                self._attempts[backend_id] = _Reconnection(anyio.CancelScope(), anyio.Event())
                tasks.start_soon(self._reconnect, backend_id, spec)
            yield
            tasks.cancel_scope.cancel()

    async def register(self, spec: BackendSpec, *, remember: bool = True) -> BackendView:
        """Put an engine into service; an error leaves nothing half done.

        Raises:
            InferenceError: The engine does not answer, or lacks a required feature.
            TokenError: The engine's tokenizer or chat format cannot be loaded.
        """
        known = {view.backend_id for view in self._pools.views()}
        view = await self._pools.register(
            str(spec.url), spec.pool, kind=spec.kind, max_in_flight=spec.max_in_flight
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
            self._specs[view.backend_id] = spec
            await self._save()
        log.info("backend registered", backend_id=view.backend_id, model=view.model_path, pool=view.pool)
        return view

    async def remove(self, backend_id: str) -> None:
        """Remove an engine for good.

        Raises:
            UnknownBackend: No backend with that id is registered.
        """
        await self._pools.remove(backend_id)
        log.info("backend removed", backend_id=backend_id)
        if self._specs.pop(backend_id, None):
            await self._save()

    async def clear(self, pool: str) -> int:
        """Remove all engines of a pool for good, including those still waited for; return their number."""
        attempts = {one: self._attempts[one] for one, spec in self._awaited.items() if spec.pool == pool}
        for attempt in attempts.values():
            attempt.scope.cancel()
        for attempt in attempts.values():
            await attempt.ended.wait()
        given_up = [backend_id for backend_id in attempts if backend_id in self._awaited]
        for backend_id in given_up:
            self._stop_waiting(backend_id)
        if given_up:
            await self._save()
        served = [view.backend_id for view in self._pools.views() if view.pool == pool]
        for backend_id in served:
            await self.remove(backend_id)
        return len(given_up) + len(served)

    def drain(self, backend_id: str) -> BackendView:
        """Send an engine no new requests.

        Raises:
            UnknownBackend: No backend with that id is registered.
        """
        view = self._pools.drain(backend_id)
        log.info("backend is given nothing new", backend_id=backend_id)
        return view

    def views(self) -> list[BackendView]:
        """Return all backends of all pools."""
        return self._pools.views()

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
        outcome = await self._pools[request.pool].pause(request.mode, request.drain_seconds)
        log.info("pool paused", pool=request.pool, mode=request.mode)
        return check_outcome(outcome, "pause")

    async def resume(self, request: ResumeRequest) -> PoolOutcome:
        """Resume a pool.

        Raises:
            NoBackendError: There is no such pool.
            OrderFailed: An engine in service failed to resume.
        """
        outcome = await self._pools[request.pool].resume()
        log.info("pool resumed", pool=request.pool)
        return check_outcome(outcome, "resume")

    async def update_weights(self, request: WeightsRequest) -> PoolOutcome:
        """Load weights into a pool.

        Raises:
            NoBackendError: There is no such pool, or it has no backend.
            WeightsConflict: The version is older than the pool's, or in use for other weights.
            OrderFailed: Backends failed; the error has every answer.
        """
        order = log.bind(pool=request.pool, version=request.version, source=request.weights.type)
        order.info("weight update begun", mode=request.mode, forced=request.force)
        try:
            outcome = await self._pools[request.pool].load_weights(request)
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

    async def join_group(self, request: WeightsGroupRequest) -> PoolOutcome:
        """Let a pool's backends join a process group, all or none.

        Raises:
            NoBackendError: There is no such pool, or it has no backend.
            WeightsConflict: The number of ranks is wrong, or the trainer is not listening.
            BackendRejected: A backend cannot take weights from a process group.
            OrderFailed: A backend could not join.
        """
        return check_outcome(await self._pools[request.pool].join_group(request), "join the process group")

    async def leave_group(self, pool: str, name: str) -> PoolOutcome:
        """Let a pool's backends leave a process group.

        Raises:
            NoBackendError: There is no such pool, or it has no backend.
            OrderFailed: A backend could not leave.
        """
        return check_outcome(await self._pools[pool].leave_group(name), "leave the process group")

    def check(self, pool: str) -> None:
        """Check that a pool is served, or about to be.

        Raises:
            NoBackendError: The pool is neither; the hint says how to register a backend.
        """
        if pool not in self._served and all(spec.pool != pool for spec in self._awaited.values()):
            self._pools[pool]

    def in_service(self) -> tuple[frozenset[str], anyio.Event]:
        """Return the pools with a backend in service, paused ones too, and the event of the next change."""
        pools, changed = self._pools.in_service()
        return pools & self._served.keys(), changed

    async def open(self, request: RolloutRequest, tools: list[ToolSpec]) -> PolicySession:
        """Open the conversation of one rollout with its pool.

        Raises:
            NoBackendError: The pool is not served.
        """
        served = self._served.get(request.pool)
        if served is None:
            raise NoBackendError(
                f"pool {request.pool!r} has no backend", hint="Register one with POST /v1/backends."
            )
        return PolicySession(
            Conversation(served.renderer, tools),
            self._pools[request.pool],
            affinity=request.rollout_id or "",
            sampling=request.sampling,
            stop_token_ids=served.renderer.stop_token_ids,
            context_length=served.context_length,
            exports=request.exports,
        )

    def close(self, request: RolloutRequest) -> None:
        """Free a rollout's place on its backend; idempotent."""
        if request.pool in self._served:
            self._pools[request.pool].release(request.rollout_id or "")

    def _stop_waiting(self, backend_id: str) -> None:
        self.waiting.pop(backend_id, None)
        self._awaited.pop(backend_id, None)

    async def _reconnect(self, backend_id: str, spec: BackendSpec) -> None:
        attempt = self._attempts[backend_id]
        try:
            with attempt.scope:
                await self._register_in_the_end(backend_id, spec)
        finally:
            attempt.ended.set()

    async def _register_in_the_end(self, backend_id: str, spec: BackendSpec) -> None:
        url = str(spec.url)
        while backend_id in self._awaited:
            try:
                await self.register(spec)
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

    def _load(self) -> list[BackendSpec]:
        try:
            return _SPECS.validate_json(self._remembered.read_bytes())
        except FileNotFoundError:
            return []

    async def _save(self) -> None:
        async with self._saving:  # two registrations at once would write the same draft file
            data = _SPECS.dump_json(list((self._awaited | self._specs).values()))
            try:
                await anyio.to_thread.run_sync(write_private, self._remembered, data)
            except OSError as error:
                log.error(
                    "the backends cannot be remembered, and have to be registered again after a restart",
                    file=str(self._remembered),
                    error=str(error),
                    hint="Free disk space or restore the state folder, then register any of them again.",
                )


def _id(spec: BackendSpec) -> str:
    return backend_id_of(str(spec.url), spec.pool)
