"""A pool of backends that serve one policy.

Guarantees:

- A request that a backend fails is repeated elsewhere from the tokens that were delivered; none of them
  is lost, none is sampled twice, and the caller sees one answer.
- A backend that stops answering leaves service within a few probes, and its open requests move; it comes back
  after several good probes, with the pool's weights and pause state, and takes up its share gradually.
- While the pool is paused requests wait here, up to a limit, and none is refused before it.
- After `update_weights` no backend in service has other weights than the pool's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import anyio
from anyio.abc import TaskGroup

from api_schemas.inference import BackendState, BackendView, PauseMode, PoolOutcome
from rollout_service.inference.broadcast import Order, tell_all
from rollout_service.inference.capabilities import check_backend
from rollout_service.inference.contract import Backend, GenerateRequest, Generation
from rollout_service.inference.errors import (
    BackendProtocolError,
    BackendRejected,
    BackendUnreachable,
    GenerationTimeout,
    InferenceError,
    NoBackendError,
    UnknownBackend,
)
from rollout_service.inference.generation import Continuation
from rollout_service.inference.member import Member
from rollout_service.inference.router import Candidate, LeastLoaded, Router

_BACKOFF_SECONDS = 0.05
_LONGEST_BACKOFF_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How patient a pool is."""

    hold_seconds: float = 120.0
    """How long a request waits while the pool is paused, or while no backend is in service."""
    max_failures: int = 6
    """Failed calls, or aborts that gave nothing, that one request survives in a row."""
    probe_interval: float = 2.0
    probe_timeout: float = 10.0
    unhealthy_after: int = 2
    """Failures in a row, of probes or requests, that take a backend out of service."""
    healthy_after: int = 2
    """Good probes in a row that bring it back."""
    slow_start: float = 10.0
    """Seconds over which a backend that has come into service takes up its fair share."""
    registration_timeout: float = 60.0


@dataclass(frozen=True, slots=True)
class _Weights:
    path: str
    version: int
    flush_cache: bool


class BackendPool:
    """The backends of one policy; made by `Pools`, which owns the tasks that probe them."""

    def __init__(
        self,
        name: str,
        tasks: TaskGroup,
        *,
        options: PoolOptions | None = None,
        router: Router | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._tasks = tasks
        self._options = options or PoolOptions()
        self._router: Router = router or LeastLoaded()
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._paused: PauseMode | None = None
        self._weights: _Weights | None = None
        self._changed = anyio.Event()
        self._control = anyio.Lock()

    @property
    def paused(self) -> bool:
        """Whether requests are being held."""
        return self._paused is not None

    def __contains__(self, backend_id: object) -> bool:
        return backend_id in self._members

    def views(self) -> list[BackendView]:
        """The backends and how they are doing, in the order of their registration."""
        return [member.view(self.name, paused=self.paused) for member in self._members.values()]

    # ---- membership

    async def register(self, backend: Backend) -> BackendView:
        """Check what `backend` can do, give it the pool's weights, and take it into service.

        A backend whose id is known is checked again and brought back, whatever state it was in;
        `backend` is then closed and the known one stays.

        Raises:
            BackendUnreachable: it does not answer.
            BackendProtocolError: it lacks something; the message names it.
        """
        async with self._control:
            known = self._members.get(backend.id)
            if known is not None:
                await backend.close()
                backend = known.backend
            info = await check_backend(backend, seconds=self._options.registration_timeout)
            self._refuse_other_vocabulary(backend.id, info.vocab_size)
            info = replace(info, weight_version=await self._synchronise(backend, info.weight_version))
            member = known or Member(backend, info, self._options.slow_start, self._clock)
            member.bring_back(info)
            if known is None:
                self._members[backend.id] = member
                self._tasks.start_soon(self._watch, member)
        self._notify()
        return member.view(self.name, paused=self.paused)

    async def remove(self, backend_id: str) -> None:
        """Take a backend out for good; its open requests go on elsewhere."""
        member = self._member(backend_id)
        del self._members[backend_id]
        self._router.forget(backend_id)
        self._notify()
        await member.close()

    def drain(self, backend_id: str) -> BackendView:
        """Give a backend nothing new; `in_flight` tells when it is done. Registering it again ends the
        drain.
        """
        member = self._member(backend_id)
        member.state = BackendState.DRAINING
        self._router.forget(backend_id)
        self._notify()
        return member.view(self.name, paused=self.paused)

    async def close(self) -> None:
        """Release every backend's connections."""
        members, self._members = list(self._members.values()), {}
        self._notify()
        for member in members:
            await member.close()

    # ---- requests

    async def generate(self, request: GenerateRequest, *, affinity: str | None = None) -> Generation:
        """Sample a continuation, through pauses, weight updates and the loss of backends.

        `affinity` names the rollout, so that its turns stay on the backend that holds their KV; call
        `release` when it has ended. Cancelling this call aborts the request in its engine.

        Raises:
            NoBackendError: none is registered, or none came back into service in time.
            BackendRejected: the engine refused the request.
            BackendUnreachable, BackendProtocolError: it failed on every backend that was tried.
            GenerationTimeout: the engine, or a pause, took longer than allowed.
        """
        continuation = Continuation(request)
        avoid: set[str] = set()
        fruitless = 0
        while True:
            member = await self._choose(request, affinity, avoid)
            try:
                part = await member.generate(continuation.next_request())
            except (BackendUnreachable, BackendProtocolError) as error:
                fruitless += 1
                avoid.add(member.id)
                await self._suspect(member, error)
                if fruitless >= self._options.max_failures:
                    raise
                await _back_off(fruitless)
                continue
            if (whole := continuation.add(part)) is not None:
                return whole
            fruitless = 0 if part.output_ids else fruitless + 1
            if fruitless >= self._options.max_failures and not self.paused:
                raise BackendUnreachable(
                    "aborts every request before its first token", hint="See its log", backend_id=member.id
                )
            await _back_off(fruitless)

    def release(self, affinity: str) -> None:
        """The rollout has ended; its place on a backend is free."""
        self._router.release(affinity)

    # ---- control

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> PoolOutcome:
        """Hold every request from now on; what is running ends or waits as `mode` says, and nothing is
        lost.
        """
        async with self._control:
            return await self._pause(mode)

    async def resume(self) -> PoolOutcome:
        """Let the held requests go on."""
        async with self._control:
            return await self._resume()

    async def abort(self) -> PoolOutcome:
        """Make every engine hand back what it has; the requests then go on, unless the pool is paused."""
        return await self._each(lambda backend: backend.abort(None))

    async def update_weights(self, path: str, version: int, mode: PauseMode = PauseMode.ABORT) -> PoolOutcome:
        """Load the weights in `path` into every backend as `version`, pausing by `mode` unless paused
        already.

        A backend that fails where others succeed leaves service until it has the new weights; where all
        fail, all keep the old ones.
        """
        async with self._control:
            was_paused = self._paused
            if was_paused is None:
                await self._pause(mode)
            weights = _Weights(path, version, flush_cache=(was_paused or mode) is not PauseMode.IN_PLACE)
            try:
                outcome = await self._each(lambda backend: _load_weights(backend, weights))
                self._settle_weights(weights, outcome)
            finally:
                if was_paused is None:
                    with anyio.CancelScope(shield=True):
                        await self._resume()
        return outcome.model_copy(update={"version": version})

    # ---- inside

    def _member(self, backend_id: str) -> Member:
        if backend_id not in self._members:
            raise UnknownBackend(
                f"pool {self.name!r} has no backend {backend_id!r}", hint="GET /v1/backends lists them"
            )
        return self._members[backend_id]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _ready(self) -> list[Member]:
        if self.paused:
            return []
        return [member for member in self._members.values() if member.state is BackendState.READY]

    async def _choose(self, request: GenerateRequest, affinity: str | None, avoid: set[str]) -> Member:
        ready = self._ready() or await self._hold()
        fresh = [member for member in ready if member.id not in avoid] or ready
        candidates = [Candidate(member.id, member.in_flight, member.share) for member in fresh]
        return self._members[self._router.choose(candidates, request, affinity).backend_id]

    async def _hold(self) -> list[Member]:
        """Wait for a backend that may be used."""
        seconds = self._options.hold_seconds
        with anyio.move_on_after(seconds):
            while not (ready := self._ready()):
                if not self._members:
                    raise NoBackendError(
                        f"pool {self.name!r} has no backends",
                        hint='Register one: POST /v1/backends {"url": "http://host:30000", "pool": '
                        f'"{self.name}"}}',
                    )
                await self._changed.wait()
            return ready
        if self.paused:
            raise GenerationTimeout(
                f"pool {self.name!r} was paused for more than {seconds:g} s",
                hint="POST /v1/resume ends a pause",
            )
        errors = "; ".join(f"{member.id}: {member.last_error}" for member in self._members.values())
        raise NoBackendError(
            f"no backend of pool {self.name!r} is in service ({errors})",
            hint="Bring an engine back or register another with POST /v1/backends",
        )

    async def _suspect(self, member: Member, error: InferenceError) -> None:
        """Decide whether a failed request means a failed backend: ask it, or count."""
        member.failed(error)
        if member.bad_in_a_row >= self._options.unhealthy_after:
            self._take_out(member)
        elif isinstance(error, BackendUnreachable) and not member.being_checked:
            member.being_checked = True
            try:
                if await self._probe_error(member) is not None:
                    self._take_out(member)
            finally:
                member.being_checked = False

    def _take_out(self, member: Member) -> None:
        member.take_out()
        self._router.forget(member.id)
        self._notify()

    async def _watch(self, member: Member) -> None:
        with member.watch:
            while True:
                await anyio.sleep(self._options.probe_interval)
                await self._probe(member)

    async def _probe(self, member: Member) -> None:
        error = await self._probe_error(member)
        if error is not None:
            member.failed(error)
            if member.bad_in_a_row >= self._options.unhealthy_after:
                self._take_out(member)
            return
        member.good_in_a_row += 1
        if member.state is not BackendState.FAILED:
            return
        if member.good_in_a_row >= self._options.healthy_after:
            await self._bring_back(member)

    async def _probe_error(self, member: Member) -> Exception | None:
        try:
            with anyio.fail_after(self._options.probe_timeout):
                await member.backend.health(paused=self.paused)
        except (InferenceError, TimeoutError) as error:
            return error
        return None

    async def _bring_back(self, member: Member) -> None:
        """An engine that was away may have restarted: it gets the pool's weights before any request."""
        async with self._control:
            try:
                info = await member.backend.model_info()
                version = await self._synchronise(member.backend, info.weight_version)
            except InferenceError as error:
                member.failed(error)
                return
            if member.state is BackendState.FAILED:
                member.bring_back(replace(info, weight_version=version))
        self._notify()

    async def _synchronise(self, backend: Backend, version: int) -> int:
        """Bring a backend to the pool's weights and pause state; gives its weight version."""
        if self._weights is not None and version != self._weights.version:
            await _load_weights(backend, replace(self._weights, flush_cache=True))
            version = self._weights.version
        if self._paused is not None:
            await backend.pause(self._paused)
        else:
            await backend.resume()
        return version

    async def _pause(self, mode: PauseMode) -> PoolOutcome:
        self._paused = mode
        return await self._each(lambda backend: backend.pause(mode))

    async def _resume(self) -> PoolOutcome:
        outcome = await self._each(lambda backend: backend.resume())
        self._paused = None
        self._notify()
        return outcome

    def _settle_weights(self, weights: _Weights, outcome: PoolOutcome) -> None:
        if not any(each.ok for each in outcome.outcomes):
            return
        self._weights = weights
        for each in outcome.outcomes:
            member = self._members.get(each.backend_id)
            if member is None:
                continue
            if each.ok:
                member.info = replace(member.info, weight_version=weights.version)
            else:
                self._take_out(member)

    async def _each(self, order: Order) -> PoolOutcome:
        """Give an order to every backend at once; one that cannot be reached leaves service."""
        answers = await tell_all(list(self._members.values()), order)
        for member, answer in answers:
            if isinstance(answer.error, BackendUnreachable):
                self._take_out(member)
        return PoolOutcome(pool=self.name, outcomes=[answer.outcome(member.id) for member, answer in answers])

    def _refuse_other_vocabulary(self, backend_id: str, vocab_size: int | None) -> None:
        for member in self._members.values():
            if None not in (vocab_size, member.info.vocab_size) and vocab_size != member.info.vocab_size:
                raise BackendRejected(
                    f"has a vocabulary of {vocab_size}, but pool {self.name!r} serves one of "
                    f"{member.info.vocab_size}",
                    hint="Register it in a pool of its own",
                    backend_id=backend_id,
                )


async def _load_weights(backend: Backend, weights: _Weights) -> None:
    await backend.update_weights(weights.path, weights.version, flush_cache=weights.flush_cache)


async def _back_off(fruitless: int) -> None:
    if fruitless:
        await anyio.sleep(min(_LONGEST_BACKOFF_SECONDS, _BACKOFF_SECONDS * 2 ** (fruitless - 1)))
