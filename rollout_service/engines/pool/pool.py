"""A pool of backends that serve one policy; its parts state their guarantees.

`registry` knows the backends, `health` takes them out of service and brings them back, `StallDetector` ends calls
without progress, `dispatch` sends each request where `routing` decides, and `weights.controller` runs the commands to
all.
"""

import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

import anyio
import structlog
from anyio.abc import TaskGroup

from api_schemas.inference import (
    BackendState,
    BackendView,
    PauseMode,
    PoolOutcome,
    WeightsRequest,
)
from rollout_service.engines.contract import Backend, BackendLoad, GenerateRequest, Generation, ModelInfo, TokenSink
from rollout_service.engines.errors import BackendRejected, InferenceError
from rollout_service.engines.kinds.registry import SGLANG
from rollout_service.engines.pool.backend_handle import BackendHandle, VersionWatch, check_backend
from rollout_service.engines.pool.dispatch import Dispatcher, WaitQueue
from rollout_service.engines.pool.health import HealthChecks
from rollout_service.engines.pool.registry import BackendRegistry, PoolOptions
from rollout_service.engines.pool.weights.controller import Exclusive, PoolController
from rollout_service.engines.routing.contract import Observer, Router

log = structlog.get_logger(__name__)

Accept = Callable[[ModelInfo], Awaitable[None]]
"""Raises if a model cannot be served."""


class BackendPool:
    """The backends of one policy; made by `Pools`, which owns the tasks that probe them."""

    def __init__(
        self,
        name: str,
        tasks: TaskGroup,
        *,
        options: PoolOptions,
        router: Router,
        observer: Observer | None,
        on_change: Callable[[], None],
        exclusive: Exclusive | None,
    ) -> None:
        """`on_change` is called after every change of a backend's state or of the pause.

        `exclusive` is for backends that other services command too.
        """
        self.name = name
        self._tasks = tasks
        self._options = options
        self._queue = WaitQueue()
        self._versions = VersionWatch(name)
        self._on_change = on_change
        self._observer = observer
        self._registry = BackendRegistry(name, router.forget, self._changed)
        self.controller = PoolController(self._registry, exclusive)
        """Runs the orders to all backends; process groups and services that share the backends use it."""
        self._health = HealthChecks(self._registry, self.controller, self._options)
        self._stalls = StallDetector(self._registry, router, self._options)
        self._dispatcher = Dispatcher(self._registry, self._health, router, self._queue, self._options, observer)

    @property
    def paused(self) -> bool:
        return self._registry.paused is not None

    @property
    def in_service(self) -> bool:
        """Whether a backend serves, or will once a pause ends."""
        return any(handle.state is BackendState.READY for handle in self._registry)

    @property
    def has_served(self) -> bool:
        """Whether a backend was ever in it."""
        return self._registry.has_served

    @property
    def paused_at(self) -> float | None:
        return self._registry.paused_at

    def handle(self, backend_id: str) -> BackendHandle | None:
        return self._registry.get(backend_id)

    def _changed(self) -> None:
        self._queue.wake_all()
        self._on_change()

    @property
    def version_changes(self) -> int:
        """How often a backend had another version of the weights than before."""
        return self._versions.changes

    @property
    def waiting(self) -> int:
        """Requests that wait because the pool's limits are reached."""
        return len(self._queue)

    def __contains__(self, backend_id: object) -> bool:
        return backend_id in self._registry

    def views(self) -> list[BackendView]:
        return self._registry.views()

    # ---- membership

    async def register(
        self,
        backend: Backend,
        *,
        kind: str = SGLANG,
        max_in_flight: int | None = None,
        traces: bool = False,
        exports: Collection[str] | None = None,
        accept: Accept | None = None,
    ) -> BackendView:
        """Check the features of `backend`, give it the pool's weights, and put it into service.

        With `traces`, requests carry a `traceparent` header. A backend whose id is known is checked again and brought
        back, whatever its state was; `backend` is then closed and the known one stays. With `exports`, another service
        has checked it, and it may be paused. `accept` is called before it gets a request, and may refuse it.

        Raises:
            BackendUnreachable: The backend does not answer.
            BackendProtocolError: The backend lacks a required feature; the message names it.
        """
        is_checked = exports is not None
        # First, since an engine that hangs must not keep anybody from commands.
        if exports is None:
            info = await check_backend(backend, seconds=self._options.registration_timeout)
        else:
            info = replace(await backend.model_info(), extras=frozenset(exports))
        if accept is not None:
            await accept(info)
        async with self.controller.joining():
            known = self._registry.get(backend.id)
            if known is not None:
                await backend.close()
                backend = known.backend
            info = replace(await backend.model_info(), extras=info.extras)
            self._registry.refuse_other_vocabulary(backend.id, info.vocab_size)
            is_known = is_checked and known is None
            version = await self.controller.synchronize(
                backend, info.weight_version, is_known=is_known, tried=info.weight_version
            )
            is_tried = not self.paused or version == info.weight_version
            info = replace(info, weight_version=version)
            handle = known or BackendHandle(
                backend,
                kind,
                info,
                self._options.slow_start,
                self._versions,
                self.controller.external_version,
            )
            handle.bring_back(info, is_tried=is_tried)
            handle.max_in_flight = max_in_flight or self._options.max_in_flight_per_backend
            handle.traces = traces
            self._registry.add(handle)
            if known is None:
                self._tasks.start_soon(self._follow, handle)
        return self._registry.view(handle)

    async def remove(self, backend_id: str) -> None:
        """Remove a backend for good; its open requests continue elsewhere."""
        await self._registry.remove(backend_id).close()

    def drain(self, backend_id: str) -> BackendView:
        """Send a backend no new requests, until it is registered again; it is done once `in_flight` is 0."""
        return self._registry.view(self._registry.drain(backend_id))

    async def close(self) -> None:
        for handle in self._registry.clear():
            await handle.close()

    async def _follow(self, handle: BackendHandle) -> None:
        with handle.watch:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._health.watch, handle)
                tasks.start_soon(self._stalls.watch, handle)

    # ---- requests

    async def generate(
        self, request: GenerateRequest, *, affinity: str | None = None, on_tokens: TokenSink | None = None
    ) -> Generation:
        """Sample a continuation, through pauses, weight updates and the loss of backends.

        `affinity` names the rollout, which keeps its turns on the backend that holds their KV; call `release` when the
        rollout has ended. With `on_tokens`, chunks are delivered as they arrive, each token once: when a backend is
        lost, another goes on after the last delivered token. Cancelling this call aborts the request in its engine.

        Raises:
            NoBackendError: No backend is registered, or none came back into service in time.
            BackendRejected: The engine refused the request.
            BackendUnreachable: The last of the backends that were tried did not answer.
            BackendProtocolError: The last of the backends that were tried sent an invalid answer.
            GenerationTimeout: The engine took longer than allowed.
            PoolPaused: A pause lasted longer than allowed.
        """
        started = time.perf_counter()
        answer = self.controller.kept_kv(await self._dispatcher.generate(request, affinity, on_tokens))
        if self._observer is not None:
            self._observer.answered(self.name, time.perf_counter() - started)
        return answer

    def release(self, affinity: str) -> None:
        self._dispatcher.release(affinity)

    # ---- commands

    async def pause(self, mode: PauseMode = PauseMode.ABORT, drain_seconds: float = 60.0) -> PoolOutcome:
        """Hold every request from now on; running ones end or wait, as `mode` says, and no token is lost."""
        return await self.controller.pause(mode, drain_seconds)

    async def resume(self) -> PoolOutcome:
        return await self.controller.resume()

    async def abort(self) -> PoolOutcome:
        """Make every engine return its partial answers; the requests then continue, unless the pool is paused."""
        return await self.controller.abort()

    async def update_weights(self, path: str, version: int, mode: PauseMode = PauseMode.ABORT) -> PoolOutcome:
        return await self.load_weights(WeightsRequest(path=path, version=version, mode=mode))

    async def load_weights(self, request: WeightsRequest, *, is_repeated: bool = False) -> PoolOutcome:
        """Load weights into every backend, pausing by the request's mode unless paused already.

        A backend that fails while others succeed leaves service until it has the new weights. If all refuse them, all
        keep the old ones. Once begun, the update runs to its end, even if the caller is cancelled.

        Raises:
            WeightsConflict: The version is older than the pool's, or is in use for other weights; or the backends
                are not in the process group.
        """
        started = time.perf_counter()
        outcome = await self.controller.update_weights(request, is_repeated=is_repeated)
        if self._observer is not None and (outcome.changed or not all(each.ok for each in outcome.outcomes)):
            self._observer.loaded(outcome, time.perf_counter() - started)
        return outcome


_IDLE_FACTOR = 2.0
"""Multiplies the interval for an engine without calls of this pool."""
_SILENT_FACTOR = 10.0
"""Multiplies it for an engine that refuses to report its load: a proxy before it may have answered, just now."""


class StallDetector:
    """Polls what engines report about themselves, tells the router, and ends calls that make no progress.

    A call that has been open for `stall_seconds`, while the engine neither answered any call of the pool nor streamed a
    token nor reported any change in its work, ends and continues elsewhere. An engine that refuses to report is asked
    less often, and is covered by its probes and time limits until it reports.
    """

    def __init__(self, registry: BackendRegistry, router: Router, options: PoolOptions) -> None:
        self._registry = registry
        self._router = router
        self._options = options

    async def watch(self, handle: BackendHandle) -> None:
        delivered, signature, since = 0, "", handle.clock()
        patience, has_warned = self._options.stall_seconds, False
        while True:
            try:
                load = await self._ask(handle)
            except Exception as error:
                if not isinstance(error, BackendRejected) and not has_warned:
                    has_warned = True
                    text = "the kind of an engine cannot read its load; its stalls are not seen"
                    log.exception(text, backend_id=handle.id, hint="Correct the plug-in.")
                await anyio.sleep(self._options.load_interval * _SILENT_FACTOR)
                since = handle.clock()
                continue
            now = handle.clock()
            if load is not None and load.running + load.waiting > 0 and load.signature != signature:
                signature, since = load.signature, now
            if handle.served + handle.chunks != delivered or self._registry.paused is not None:
                delivered, since = handle.served + handle.chunks, now
            if now - since >= patience:
                handle.drop_calls(f"reported no progress for {patience:g} s", older_than=patience)
            await anyio.sleep(self._options.load_interval * (1 if handle.in_flight else _IDLE_FACTOR))

    async def _ask(self, handle: BackendHandle) -> BackendLoad | None:
        try:
            with anyio.fail_after(self._options.probe_timeout):
                load = await handle.backend.load()
        except BackendRejected:
            raise
        except (InferenceError, TimeoutError):
            return None
        handle.queued = load.waiting
        if handle.id in self._registry:
            self._router.observe(handle.id, load)
        return load
