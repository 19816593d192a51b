"""The path of one request through a pool: held, sent, repeated elsewhere.

When a backend fails a request, it continues elsewhere from the tokens already delivered; none is lost, sampled twice or
delivered twice, and the caller sees one answer. While the pool is paused, requests wait up to a time limit. Beyond the
pool's limits on concurrency, the oldest rollout's request is next, which keeps the number of open rollouts small.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

import anyio

from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import OpenStep, current_activity, waits_for
from rollout_service.engines.contract import GenerateRequest, Generation, TokenChunk, TokenSink
from rollout_service.engines.errors import (
    BackendProtocolError,
    BackendUnreachable,
    NoBackendError,
    PoolPaused,
)
from rollout_service.engines.pool.backend_handle import BackendHandle
from rollout_service.engines.pool.continuation import Continuation
from rollout_service.engines.pool.health import HealthChecks
from rollout_service.engines.pool.registry import BackendRegistry, PoolOptions
from rollout_service.engines.routing.contract import Candidate, Decision, Observer, RequestEnd, Router

_BACKOFF_SECONDS = 0.05
_LONGEST_BACKOFF_SECONDS = 2.0


class Dispatcher:
    def __init__(
        self,
        registry: BackendRegistry,
        health: HealthChecks,
        router: Router,
        queue: WaitQueue,
        options: PoolOptions,
        observer: Observer | None,
    ) -> None:
        self._registry = registry
        self._health = health
        self._router = router
        self._queue = queue
        self._options = options
        self._observer = observer
        self._decided: deque[Decision] = deque()
        """Decisions that the observer has not got yet."""
        self._ended: deque[tuple[Decision, GenerateRequest, Generation | None, float, RequestEnd]] = deque()
        """Ended requests, with their seconds, that the router and the observer have not got yet."""

    async def generate(
        self, request: GenerateRequest, affinity: str | None, on_tokens: TokenSink | None = None
    ) -> Generation:
        self._registry.refuse_unknown_ids(request.input_ids, request.known)
        continuation = Continuation(request, on_tokens)
        avoid: set[str] = set()
        fruitless = 0
        while True:
            free = await self._turn(affinity)
            attempt = continuation.next_request()
            decision = self._choose(free, attempt, affinity, avoid)
            handle = self._registry[decision.backend_id]
            version = handle.info.weight_version
            read_by = version if handle.backend.keeps_kv_apart else None
            try:
                part = await self._send(handle, decision, attempt, continuation.sink)
            except (BackendUnreachable, BackendProtocolError) as error:
                fruitless = 0 if continuation.has_streamed else fruitless + 1
                is_settled = self._is_settled(handle, version)
                whole = continuation.keep_streamed(handle.id, read_by, version if is_settled else None)
                if whole is not None:
                    return whole
                avoid.add(handle.id)
                await self._health.suspect(handle, error)
                if fruitless >= self._options.max_failures:
                    raise
                await _back_off(fruitless)
                continue
            if part.versions and self._is_settled(handle, version):
                handle.sampled_with(part.versions[-1])
            if (whole := continuation.add(part, read_by)) is not None:
                return whole
            # A request that waited through updates of the weights, and was aborted by each, is not the engine's fault.
            has_gained = part.output_ids and continuation.is_resumable
            fruitless = 0 if has_gained else fruitless + self._is_settled(handle, version)
            if fruitless >= self._options.max_failures:
                raise BackendUnreachable(
                    "aborts every request before there is a token to go on from",
                    hint="See the engine's log.",
                    backend_id=handle.id,
                )
            await _back_off(fruitless)

    def _is_settled(self, handle: BackendHandle, version: int) -> bool:
        """Return whether a backend still has this version; it changes in a pause, or without requests."""
        return handle.info.weight_version == version and self._registry.paused is None

    def release(self, affinity: str) -> None:
        self._learn()
        self._router.release(affinity)
        self._queue.release(affinity)

    async def _turn(self, affinity: str | None) -> list[BackendHandle]:
        """Wait for backends that may be given a request now. Do not await between this and sending."""
        arrival = self._queue.arrival(affinity)
        free = self._free(self._registry.ready() or await self._hold())
        if free and not self._queue:
            return free
        with waits_for(StepKind.POOL_QUEUE, self._registry.name), self._queue.join(arrival) as waiter:
            while not (free and self._queue.is_next(waiter)):
                await waiter.wait()
                free = self._free(self._registry.ready() or await self._hold())
            return free

    def _free(self, ready: list[BackendHandle]) -> list[BackendHandle]:
        limit = self._options.max_in_flight
        if limit is not None and sum(handle.in_flight for handle in self._registry) >= limit:
            return []
        return [handle for handle in ready if handle.has_room]

    def _choose(
        self, free: list[BackendHandle], request: GenerateRequest, affinity: str | None, avoid: set[str]
    ) -> Decision:
        self._learn()
        fresh = [handle for handle in free if handle.id not in avoid] or free if avoid else free
        candidates = [Candidate(handle.id, handle.in_flight, handle.share, handle.is_local) for handle in fresh]
        decision = self._router.choose(candidates, request, affinity)
        self._decided.append(decision)
        asyncio.get_running_loop().call_soon(self._learn)
        return decision

    async def _send(
        self,
        handle: BackendHandle,
        decision: Decision,
        request: GenerateRequest,
        on_tokens: TokenSink | None,
    ) -> Generation:
        answer: Generation | None = None
        end, started = RequestEnd.CANCELLED, time.perf_counter()
        try:
            with waits_for(
                StepKind.ENGINE,
                handle.id,
                pool=self._registry.name,
                request=request.request_id,
                prompt_tokens=len(request.input_ids),
            ) as step:
                step.request = request
                if handle.traces and step.traceparent is not None:
                    request = replace(request, traceparent=step.traceparent)
                step.answer = answer = await handle.generate(request, _noting_progress(step, on_tokens))
                end = RequestEnd.ANSWERED
                step.note(
                    tokens=len(answer.output_ids),
                    cached_tokens=answer.cached_tokens,
                    version=answer.versions[-1] if answer.versions else None,
                )
        except Exception:
            end = RequestEnd.FAILED
            raise
        finally:
            self._ended.append((decision, request, answer, time.perf_counter() - started, end))
            asyncio.get_running_loop().call_soon(self._learn)
            self._queue.wake_next()
        return answer

    def _learn(self) -> None:
        """Tell the router and the observer what was decided and answered.

        Deferred off the request path; runs before the next routing decision.
        """
        self._router.settle()
        while self._decided:
            decision = self._decided.popleft()
            if self._observer is not None:
                self._observer.decided(self._registry.name, decision)
        while self._ended:
            decision, request, answer, seconds, end = self._ended.popleft()
            self._router.ended(decision, request, answer)
            if self._observer is not None:
                self._observer.ended(self._registry.name, decision.backend_id, seconds, end)
                if answer is not None and answer.output_ids:
                    self._observer.served(self._registry.name, decision, answer.cached_tokens)

    async def _hold(self) -> list[BackendHandle]:
        name, seconds = self._registry.name, self._options.hold_seconds
        with waits_for(StepKind.PAUSED_POOL, name), anyio.move_on_after(seconds):
            while not (ready := self._registry.ready()):
                if not self._registry:
                    raise NoBackendError(
                        f"pool {name!r} has no backends",
                        hint=f'Register one: POST /v1/backends {{"url": "http://host:30000", "pool": "{name}"}}',
                    )
                await self._registry.wait_for_change()
            return ready
        if self._registry.paused is not None:
            raise PoolPaused(
                f"pool {name!r} has been paused for more than {seconds:g} s",
                hint="Resume it with POST /v1/resume.",
            )
        errors = "; ".join(f"{handle.id}: {handle.last_error}" for handle in self._registry)
        raise NoBackendError(
            f"no backend of pool {name!r} is in service ({errors})",
            hint="Restart an engine, or register another with POST /v1/backends.",
        )


def _noting_progress(step: OpenStep, on_tokens: TokenSink | None) -> TokenSink | None:
    """Note how many tokens have arrived, if a rollout waits for them."""
    if on_tokens is None or current_activity() is None:
        return on_tokens
    arrived = 0

    def take(chunk: TokenChunk) -> None:
        nonlocal arrived
        arrived += len(chunk.ids)
        step.move(tokens=arrived)
        on_tokens(chunk)

    return take


async def _back_off(fruitless: int) -> None:
    if fruitless:
        await anyio.sleep(min(_LONGEST_BACKOFF_SECONDS, _BACKOFF_SECONDS * 2 ** (fruitless - 1)))


@dataclass(slots=True, order=True)
class Waiter:
    """Ordered by its rollout's arrival and then by its own."""

    arrival: int
    number: int
    event: anyio.Event = field(default_factory=anyio.Event, compare=False)
    has_left: bool = field(default=False, compare=False)

    async def wait(self) -> None:
        """Wait until it is worth looking for a place again."""
        await self.event.wait()
        self.event = anyio.Event()


class WaitQueue:
    """The requests that wait for a free place; falsy while there are none.

    Usually only the next one's event is set: a freed place costs the same however many wait.
    """

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []
        self._numbers = count()
        self._arrivals: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def arrival(self, rollout: str | None) -> int:
        """Return the rollout's arrival number (lower is older); an anonymous request gets a new one."""
        if rollout is None:
            return next(self._numbers)
        if rollout not in self._arrivals:
            self._arrivals[rollout] = next(self._numbers)
        return self._arrivals[rollout]

    def release(self, rollout: str) -> None:
        self._arrivals.pop(rollout, None)

    @contextmanager
    def join(self, arrival: int) -> Iterator[Waiter]:
        waiter = Waiter(arrival, next(self._numbers))
        heappush(self._waiters, waiter)
        try:
            yield waiter
        finally:
            waiter.has_left = True
            self.wake_next()

    def is_next(self, waiter: Waiter) -> bool:
        return self._waiters[0] is waiter

    def wake_all(self) -> None:
        """Wake everyone after a change of the pool, since each has its own time limit during a pause."""
        for waiter in self._waiters:
            waiter.event.set()

    def wake_next(self) -> None:
        while self._waiters and self._waiters[0].has_left:
            heappop(self._waiters)
        if self._waiters:
            self._waiters[0].event.set()
