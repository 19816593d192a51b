"""Gateway sessions of live sessions: their engines, and how they sample."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NoReturn

import anyio
from anyio.abc import TaskGroup

from api_schemas.rollouts import Sampling, TokenExtras
from rollout_service.base.errors import UnavailableError
from rollout_service.engines.contract import GenerateRequest, Generation, TokenChunk, TokenSink
from rollout_service.engines.errors import NoBackendError, PoolPaused
from rollout_service.engines.pool.pool import BackendPool
from rollout_service.engines.serving.policies import PolicyServing, PoolModel
from rollout_service.episodes import EpisodeLimits
from rollout_service.gateway.capture import PlannedTurn, TurnCapture
from rollout_service.gateway.contract import CallObserver, ModelCall
from rollout_service.gateway.dialects import ListedModel
from rollout_service.gateway.metrics import GatewayMetrics
from rollout_service.gateway.sessions.engines import PolicyEngines
from rollout_service.gateway.sessions.session import GatewaySession, SessionPlace
from rollout_service.live.metrics import LiveMetrics
from rollout_service.live.register import PoolHeldError
from rollout_service.live.replay import LIVE
from rollout_service.settings.http import GatewaySettings
from rollout_service.settings.live import LiveSettings
from rollout_service.tokens import ChatRenderer

_NO_LIMIT = 2**53
LIMITS = EpisodeLimits(max_turns=_NO_LIMIT, max_tokens=_NO_LIMIT, max_turn_tokens=_NO_LIMIT)
"""A session has no limits but its model's context."""
_SALT_BYTES = 8
_NO_ENGINE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """For calls that are served and not kept; implements `CallObserver` and `TurnObserver`."""

    unrecorded_because: str

    async def refused(self, call: ModelCall) -> None:
        _ = call

    async def planned(self, call: ModelCall, planned: PlannedTurn) -> Unrecorded:
        _ = call, planned
        return self

    async def record(self, generation: Generation, *, delivered: bool) -> None:
        _ = generation, delivered

    def sent(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SessionEngines:
    """Methods raise PoolHeldError if the pool is not served, or not yet again."""

    policies: PolicyServing
    settings: LiveSettings
    gateway: GatewaySettings
    tasks: TaskGroup
    metrics: GatewayMetrics
    live_metrics: LiveMetrics
    changed: Callable[[], anyio.Event]
    url: str

    def renderer(self, pool: str) -> ChatRenderer:
        return self._connect(pool)[0].renderer

    def _connect(self, pool: str) -> tuple[PoolModel, BackendPool]:
        try:
            return self.policies.connect(pool)
        except NoBackendError as error:
            raise PoolHeldError(
                f"no engine serves the pool {pool!r} at the moment",
                hint="Repeat the request later.",
                seconds=_NO_ENGINE_SECONDS,
            ) from error

    def open(
        self,
        pool: str,
        tenant: str,
        observer: CallObserver,
        charge: Callable[[int], None],
        *,
        session_id: str = "",
        capture: TurnCapture | None = None,
    ) -> GatewaySession:
        """Open a gateway session; without an id, for one request that belongs to no session.

        `charge` counts answers beside the first one of a request.
        """
        model, engines = self._connect(pool)
        salt = blake2b(tenant.encode(), digest_size=_SALT_BYTES).hexdigest()
        policy = PolicyEngines(
            HeldPool(pool, engines, self.changed, self.settings.hold_seconds, self.live_metrics),
            affinity=f"live/{tenant}/{session_id}" if session_id else None,
            context_length=model.context_length,
            stop_token_ids=model.renderer.stop_token_ids,
            sampling=Sampling(),
            exports=TokenExtras(),
            obey_sampling=self.gateway.obey_sampling,
            cache_salt="" if self.settings.share_prefixes else salt,
            decode=model.renderer.decode,
        )
        place = SessionPlace(
            url=self.url,
            model=ListedModel(pool, model.context_length),
            serve=_refuse,
            tasks=self.tasks,
            metrics=self.metrics,
            retry_seconds=self.gateway.retry_seconds,
            observer=observer,
            is_private=True,
            charge=charge,
        )
        return GatewaySession(capture or TurnCapture(model.renderer, LIVE), policy, LIMITS, place)


def _refuse(*_: object) -> NoReturn:
    raise UnavailableError("a live session has no listener of its own", hint="Use its URL and key.")


@dataclass(slots=True)
class _Wait:
    since: float | None = None
    held: float = 0.0
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def begin(self) -> float:
        """Return since when the request waits: from now on, if it did not before."""
        if self.since is None:
            self.since = time.monotonic()
        return self.since

    def end(self) -> None:
        if self.since is not None:
            self.held += time.monotonic() - self.since
        self.since = None


@dataclass(frozen=True, slots=True)
class HeldPool:
    """Keeps a request waiting for a bounded time only; implements `StreamingGenerator`.

    A request that makes no progress for longer than allowed, because its pool is paused or has no engine in service, is
    aborted and fails with `PoolHeldError`, so that nothing of it is recorded.
    """

    name: str
    pool: BackendPool
    changed: Callable[[], anyio.Event]
    seconds: float
    metrics: LiveMetrics

    async def generate(
        self, request: GenerateRequest, *, affinity: str | None = None, on_tokens: TokenSink | None = None
    ) -> Generation:
        """Sample a continuation.

        Raises:
            PoolHeldError: The pool was paused, or had no engine, for too long.
            InferenceError: No engine answered.
        """
        wait = _Wait()

        def note(chunk: TokenChunk) -> None:
            wait.end()
            if on_tokens is not None:
                on_tokens(chunk)

        generation: Generation | None = None
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, wait)
            with wait.scope:
                try:
                    generation = await self.pool.generate(request, affinity=affinity, on_tokens=note)
                except Exception as error:  # noqa: BLE001 - raised below, where no group wraps it
                    failure = error
            tasks.cancel_scope.cancel()
        wait.end()
        if wait.held or wait.scope.cancel_called:
            self.metrics.held(self.name, wait.held, refused=wait.scope.cancel_called)
        if wait.scope.cancel_called or isinstance(failure, NoBackendError | PoolPaused):
            raise self._error() from failure
        if failure is not None:
            raise failure
        assert generation is not None  # noqa: S101 - neither refused nor failed
        return generation

    def release(self, affinity: str) -> None:
        self.pool.release(affinity)

    async def _watch(self, wait: _Wait) -> None:
        while True:
            changed = self.changed()
            if self.pool.in_service and not self.pool.paused:
                wait.end()
                await changed.wait()
                continue
            with anyio.move_on_after(wait.begin() + self.seconds - time.monotonic()):
                await changed.wait()
                continue
            if wait.since is not None:  # otherwise tokens came while the pool began to pause
                wait.scope.cancel()
                return

    def _error(self) -> PoolHeldError:
        return PoolHeldError(
            f"the model is being updated, and took no requests for {self.seconds:g} s",
            hint="Repeat the request later; nothing of this one was recorded.",
            seconds=min(self.seconds, 5.0),
        )
