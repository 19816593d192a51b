"""Commands to a whole pool: pause, resume, abort, update the weights.

One runs at a time, and to its end once begun, even if the caller hangs up. After `update_weights` every backend in
service has the pool's weights. A backend that joins gets the pool's weights and pause before any request.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace

import anyio

from api_schemas.inference import (
    BackendOutcome,
    BackendState,
    DistributedWeights,
    KvHandling,
    PauseMode,
    PoolOutcome,
    WeightsGroupRequest,
    WeightsRequest,
)
from rollout_service.engines.contract import Backend, Generation
from rollout_service.engines.errors import (
    BackendRejected,
    BackendUnreachable,
    InferenceError,
    NoBackendError,
)
from rollout_service.engines.pool.backend_handle import BackendHandle, try_weights
from rollout_service.engines.pool.registry import BackendRegistry
from rollout_service.engines.pool.weights.outcomes import OUT_OF_SERVICE, FanOut, PoolCommand
from rollout_service.engines.pool.weights.process_groups import (
    ProcessGroups,
    assign_ranks,
    require_process_groups,
    wait_for_master,
)
from rollout_service.engines.pool.weights.state import PoolState, PoolWeights, WeightSet, kv_handling

Exclusive = Callable[[str], AbstractAsyncContextManager[None]]
"""Keeps all other services from commanding a pool."""
_AWAY_SECONDS = 2.0
"""How long a pause, a resume or an abort waits for backends that are out of service."""


class PoolController:
    """Runs commands on all backends of a registry; `lock` is held while one runs."""

    def __init__(self, registry: BackendRegistry, exclusive: Exclusive | None = None) -> None:
        """`exclusive` is for backends that other services command too: in its block, none of them does."""
        self.lock = anyio.Lock()
        self._exclusive = exclusive or (lambda _: nullcontext())
        self._registry = registry
        self._weights = PoolWeights()
        self._groups = ProcessGroups()

    # ---- services that share the backends

    def external_version(self) -> int | None:
        return self._weights.external_version

    @asynccontextmanager
    async def joining(self) -> AsyncIterator[None]:
        """Let no command run within the block, at any service."""
        async with self._exclusive(self._registry.name), self.lock:
            yield

    def hold(self, mode: PauseMode) -> None:
        """Hold requests while another service carries out a command; `take_over` ends it."""
        if self._registry.paused is None:
            self._registry.paused = mode

    async def drained(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            for handle in self._registry:
                await handle.wait_until_idle()

    def state(self) -> PoolState:
        present = self._weights.present
        handles = list(self._registry)
        return PoolState(
            pause=self._registry.paused,
            source=present.source if present else None,
            version=present.version if present else 0,
            kept_kv=sorted(self._weights.kept),
            unknown=sorted(self._weights.unknown),
            groups=self._groups.all(),
            versions={each.id: each.info.weight_version for each in handles if each.state is not BackendState.FAILED},
            out=[each.id for each in handles if each.state is BackendState.FAILED],
        )

    def take_over(self, state: PoolState) -> None:
        """Adopt the state that another service left; the backends have their commands already."""
        present = WeightSet(state.source, state.version) if state.source is not None else None
        self._weights.replace(present, state.kept_kv, state.unknown)
        self._groups.replace(state.groups)
        for handle in self._registry:
            if handle.id in state.versions:
                handle.has_weights(state.versions[handle.id])
            elif handle.id in state.out and handle.state is not BackendState.FAILED:
                handle.record_failure(BackendUnreachable("another node took it out of service"))
                self._registry.take_out(handle)
        if self._registry.paused is not state.pause:
            self._registry.paused = state.pause

    # ---- pauses

    async def pause(self, mode: PauseMode, drain_seconds: float = 60.0) -> PoolOutcome:
        async with self.lock:
            with anyio.CancelScope(shield=True):
                self._registry.paused = mode
                outcome = await self._each("pause", lambda handle: _quiet(handle, mode, drain_seconds))
        return outcome

    async def resume(self) -> PoolOutcome:
        async with self.lock:
            with anyio.CancelScope(shield=True):
                outcome = await self._each("resume", lambda handle: handle.backend.resume(), self._try)
                self._registry.paused = None
        return outcome

    async def abort(self) -> PoolOutcome:
        return await self._each("abort", lambda handle: handle.backend.abort(None))

    async def synchronize(
        self, backend: Backend, version: int, *, is_known: bool = False, tried: int | None = None
    ) -> int:
        """Bring a backend to the pool's weights and pause, and return its weight version, within `joining`.

        One that `is_known` to other services did not restart, and keeps its process groups. Its weights are tried
        unless they are of the version `tried`, or the pool is paused: then they are once it is resumed.
        """
        if not is_known:
            self._groups.forget(backend.id)
        version = await self._weights.bring_up_to_date(backend, version)
        if self._registry.paused is not None:
            mode = self._registry.paused
            await backend.pause(PauseMode.ABORT if mode is PauseMode.DRAIN else mode)
        else:
            await backend.resume()
            if version != tried:
                await try_weights(backend, version, self._weights.source_of(version))
        return version

    # ---- weights

    async def update_weights(self, request: WeightsRequest, *, is_repeated: bool = False) -> PoolOutcome:
        """Load weights, pausing by the request's mode unless paused already.

        If the update `is_repeated`, because the service that began it is gone, load them only where they are missing.
        """
        async with self.lock:
            with anyio.CancelScope(shield=True):
                outcome = await self._update(request, is_repeated=is_repeated)
        return outcome

    async def _update(self, request: WeightsRequest, *, is_repeated: bool) -> PoolOutcome:
        handles = self._addressed()
        weights = self._weights.plan_update(request, [handle.info.weight_version for handle in handles])
        if weights is None:
            return self._outcome(FanOut(handles), changed=False, version=request.version)
        if weights.is_external:
            return self._note_external(weights, handles)
        if isinstance(weights.source, DistributedWeights):
            self._groups.check(weights.source.group_name, [handle.id for handle in handles])
        was_paused = self._registry.paused
        kv = kv_handling(was_paused or request.mode)
        load = _load_unless_present if is_repeated else _load
        fan_out, started = FanOut(handles), time.perf_counter()
        try:
            if was_paused is None:
                self._registry.paused = request.mode
                await fan_out.step("pause", lambda it: _quiet(it, request.mode, request.drain_seconds))
            if self._may_begin(weights, fan_out):
                await fan_out.step("load", lambda it: load(it, weights, kv, request.timeout_seconds))
            has_changed = self._settle(weights, kv, fan_out)
            if was_paused is None:
                await fan_out.step("resume", lambda it: it.backend.resume(), after_errors=True)
                if has_changed:
                    await fan_out.step("try", self._try)
            self._take_out_failed(fan_out, has_changed=has_changed)
        finally:
            if was_paused is None:
                held_seconds, held = time.perf_counter() - started, self._registry.held
                self._registry.paused = None
        version = weights.version if has_changed else None
        outcome = self._outcome(fan_out, changed=has_changed, version=version, kv=kv if has_changed else None)
        if was_paused is not None:
            return outcome
        return outcome.model_copy(update={"held": held, "held_seconds": held_seconds})

    def _note_external(self, weights: WeightSet, handles: list[BackendHandle]) -> PoolOutcome:
        """Record weights that the engines have already, without asking or pausing them."""
        self._weights.adopt(weights, KvHandling.FLUSHED)
        for handle in handles:
            handle.has_weights(weights.version)
            self._weights.unknown.discard(handle.id)
        return self._outcome(FanOut(handles), changed=True, version=weights.version)

    def _addressed(self) -> list[BackendHandle]:
        """Return the backends in service, or all if none is; the others get the weights when they come back."""
        handles = list(self._registry)
        if not handles:
            raise NoBackendError(
                f"pool {self._registry.name!r} has no backends", hint="Register one with POST /v1/backends."
            )
        return [handle for handle in handles if handle.state is not BackendState.FAILED] or handles

    def _may_begin(self, weights: WeightSet, fan_out: FanOut) -> bool:
        """Return whether the load may begin: a broadcast to a group never ends unless all its backends take part."""
        failed = [handle.id for handle, record in fan_out.records.items() if record.error]
        if not failed or not isinstance(weights.source, DistributedWeights):
            return True
        for handle, record in fan_out.records.items():
            record.error = record.error or BackendRejected(
                f"did not get the weights, because {failed} could not be paused",
                hint="Let the remaining backends join a new group with POST /v1/weights/group.",
                backend_id=handle.id,
            )
        return False

    def _settle(self, weights: WeightSet, kv: KvHandling, fan_out: FanOut) -> bool:
        """Record which backends have the weights and which are in an unknown state; return whether any has them."""
        has_changed = any(record.error is None for record in fan_out.records.values())
        if has_changed:
            self._weights.adopt(weights, kv)
        for handle, record in fan_out.records.items():
            if record.error is None:
                handle.has_weights(weights.version)
                self._weights.unknown.discard(handle.id)
            elif "load" in record.steps and _may_have_begun(weights, record.error):
                self._weights.unknown.add(handle.id)
                record.is_known = False
        return has_changed

    async def _try(self, handle: BackendHandle) -> None:
        """Try the weights of a backend that is not paused, once."""
        version = handle.info.weight_version
        if handle.tried_version != version:
            await try_weights(handle.backend, version, self._weights.source_of(version))
            handle.tried_version = version

    def _take_out_failed(self, fan_out: FanOut, *, has_changed: bool) -> None:
        for handle, record in fan_out.records.items():
            unusable = has_changed or handle.id in self._weights.unknown or not record.can_be_told
            if record.error is not None and unusable:
                self._registry.take_out(handle)

    def kept_kv(self, generation: Generation) -> Generation:
        """Keep, of the versions that could have sampled on KV of older weights, those loaded while it stayed in use."""
        could = generation.kept_kv_versions
        return replace(generation, kept_kv_versions=self._weights.kept & could) if could else generation

    # ---- process groups

    async def join_group(self, group: WeightsGroupRequest) -> PoolOutcome:
        async with self.lock:
            handles = self._addressed()
            ranks = await assign_ranks(handles, group)
            await wait_for_master(group)
            with anyio.CancelScope(shield=True):
                fan_out = FanOut(handles)
                if group.group_name in self._groups:
                    await self._leave(group.group_name, handles)
                await fan_out.step(
                    "join",
                    lambda it: _within(
                        group.timeout_seconds,
                        require_process_groups(it.backend).join_group(group, ranks[it].start),
                    ),
                )
                if any(record.error for record in fan_out.records.values()):
                    await self._leave(
                        group.group_name, [m for m, record in fan_out.records.items() if not record.error]
                    )
                    return self._outcome(fan_out, changed=False)
                self._groups.add(group.group_name, [handle.id for handle in handles])
        outcome = self._outcome(fan_out, changed=True)
        joined = [
            each.model_copy(update={"ranks": list(ranks[handle])})
            for handle, each in zip(fan_out.records, outcome.outcomes, strict=True)
        ]
        return outcome.model_copy(update={"outcomes": joined})

    async def leave_group(self, name: str) -> PoolOutcome:
        async with self.lock:
            with anyio.CancelScope(shield=True):
                outcome = self._outcome(await self._leave(name, self._addressed()), changed=True)
        return outcome

    async def _leave(self, name: str, handles: list[BackendHandle]) -> FanOut:
        self._groups.remove(name)
        fan_out = FanOut(handles)
        await fan_out.step("leave", lambda handle: require_process_groups(handle.backend).leave_group(name))
        return fan_out

    # ---- all commands

    async def _each(self, name: str, command: PoolCommand, trial: PoolCommand | None = None) -> PoolOutcome:
        """Run a command on every backend at once; one that is lost, or fails the trial, leaves service.

        Backends out of service get the command too, since an engine that stays paused may fail its probes. Do not wait
        long for them: they get the pool's weights and pause before they serve again.
        """
        away = FanOut(handle for handle in self._registry if handle.state is BackendState.FAILED)
        fan_out = FanOut(handle for handle in self._registry if handle not in away.records)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_tell_briefly, away, name, command)
            await fan_out.step(name, command)
        obeyed = {handle for handle, record in fan_out.records.items() if record.error is None}
        if trial is not None:
            await fan_out.step("try", trial)
        for handle, record in fan_out.records.items():
            if not record.can_be_told or (record.error is not None and handle in obeyed):
                self._registry.take_out(handle)
        return self._outcome(fan_out, changed=True)

    def _outcome(
        self, fan_out: FanOut, *, changed: bool, version: int | None = None, kv: KvHandling | None = None
    ) -> PoolOutcome:
        present = self._weights.present
        away = [
            BackendOutcome(
                backend_id=handle.id,
                ok=False,
                seconds=0.0,
                error="is out of service; it gets the pool's weights and pause before it serves again",
                code=OUT_OF_SERVICE,
            )
            for handle in self._registry
            if handle not in fan_out.records
        ]
        return PoolOutcome(
            pool=self._registry.name,
            version=version if version is not None else (present.version if present else None),
            changed=changed,
            kv=kv,
            outcomes=[*fan_out.outcomes(), *away],
        )


async def _tell_briefly(away: FanOut, name: str, command: PoolCommand) -> None:
    with anyio.move_on_after(_AWAY_SECONDS):
        await away.step(name, command)


async def _quiet(handle: BackendHandle, mode: PauseMode, drain_seconds: float) -> None:
    """Stop a backend; the pool already holds new requests."""
    if mode is PauseMode.DRAIN:
        with anyio.move_on_after(drain_seconds):
            await handle.wait_until_idle()
        mode = PauseMode.ABORT
    await handle.backend.pause(mode)


async def _load(handle: BackendHandle, weights: WeightSet, kv: KvHandling, seconds: float) -> None:
    await _within(seconds, weights.load(handle.backend, kv))


async def _load_unless_present(handle: BackendHandle, weights: WeightSet, kv: KvHandling, seconds: float) -> None:
    info = await handle.backend.model_info()
    if info.weight_version == weights.version:
        return
    if isinstance(weights.source, DistributedWeights):
        raise BackendRejected(
            "was not reached by the broadcast, whose coordinator is gone",
            hint="Let the backends join a new group with POST /v1/weights/group, and send the weights again.",
            backend_id=handle.id,
        )
    await _load(handle, weights, kv, seconds)


async def _within(seconds: float, command: Awaitable[None]) -> None:
    with anyio.move_on_after(seconds):
        return await command
    raise BackendUnreachable(f"did not finish within {seconds:g} s", hint="See the engine's log.")


def _may_have_begun(weights: WeightSet, error: InferenceError) -> bool:
    """Return whether a failed load may have changed weights: an engine that refuses a folder keeps its own."""
    return isinstance(weights.source, DistributedWeights) or not isinstance(error, BackendRejected)
