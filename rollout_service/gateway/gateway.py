"""The gateway of one service: its listener, and the sessions of the rollouts under way.

An answer is sampled in a task of the gateway, so that a client that goes away and comes back finds it; all of them end
with the block of `running`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from socket import socket

import anyio
from anyio.abc import TaskGroup
from starlette.types import Receive, Scope, Send

from api_schemas.rollouts import RolloutRequest
from rollout_service.base.errors import UnavailableError
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.episodes import EpisodeLimits
from rollout_service.gateway.capture import TurnCapture
from rollout_service.gateway.dialects import ListedModel
from rollout_service.gateway.metrics import GatewayMetrics
from rollout_service.gateway.server.app import GatewayApp
from rollout_service.gateway.server.listener import HEAD_SECONDS, address_of, bind, serving
from rollout_service.gateway.server.paths import GatewayRequest, KeyedApp
from rollout_service.gateway.sessions.engines import PolicyEngines
from rollout_service.gateway.sessions.keys import GatewaySessions
from rollout_service.gateway.sessions.session import GatewaySession, SessionPlace
from rollout_service.http.connections import ConnectionLimits, descriptor_limit
from rollout_service.http.protocol import Observe, RequestLimits
from rollout_service.http.requests import BodiesInFlight
from rollout_service.settings.http import GatewaySettings
from rollout_service.tokens import ChatRenderer

DESCRIPTOR_SHARE = 4
"""Divides the descriptors that the service may open: the gateway's connections take at most this part."""
ONE_PROGRAM = ConnectionLimits(admitted=256, pending=64)
"""For a program with a listener of its own."""


@dataclass(frozen=True, slots=True)
class GatewayParts:
    settings: GatewaySettings
    policies: PolicyServing
    make_capture: Callable[[ChatRenderer], TurnCapture]
    metrics: GatewayMetrics
    observe: Observe
    """Called for refused connections."""


class Gateway:
    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts
        self._sessions = GatewaySessions()
        self._other: KeyedApp | None = None
        self._tasks: TaskGroup | None = None
        self._requests = RequestLimits(
            head_seconds=HEAD_SECONDS,
            body_seconds=parts.settings.body_seconds,
            write_seconds=parts.settings.write_seconds,
        )
        self.metrics = parts.metrics
        self.bodies = BodiesInFlight(parts.settings.max_bytes_in_flight, parts.settings.max_body_bytes)
        """For all sessions, live ones included."""
        self.url = ""
        """For programs; empty until the gateway runs."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen within the block; then cut off the answers under way.

        Raises:
            ConfigurationError: The address cannot be bound.
        """
        parts = self._parts
        listener = bind(parts.settings.host, parts.settings.port, "gateway")
        own_url = address_of(listener, parts.settings.host)
        self.url = (parts.settings.public_url or own_url).rstrip("/")
        own = GatewayApp(self._sessions, parts.settings, parts.metrics, self.bodies)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            other = self._other
            if other is not None and scope["type"] == "http" and other.knows(GatewayRequest.of(scope).key):
                await other(scope, receive, send)
            else:
                await own(scope, receive, send)

        limits = ConnectionLimits.within(descriptor_limit() // DESCRIPTOR_SHARE)
        async with anyio.create_task_group() as self._tasks:
            async with serving(app, listener, limits, self._requests, parts.observe):
                yield
            self._tasks.cancel_scope.cancel()

    def open(self, request: RolloutRequest, limits: EpisodeLimits, hidden: Collection[str] = ()) -> GatewaySession:
        """Open a session, whose key is valid until `close`.

        The texts in `hidden` are masked for the policy.

        Raises:
            NoBackendError: The rollout's pool is not served.
            UnavailableError: The gateway does not run.
        """
        if self._tasks is None:
            raise UnavailableError("the gateway does not run")
        parts = self._parts
        model, pool = parts.policies.connect(request.pool)
        engines = PolicyEngines(
            pool,
            affinity=request.rollout_id or "",
            context_length=model.context_length,
            stop_token_ids=model.renderer.stop_token_ids,
            sampling=request.sampling,
            exports=request.exports,
            obey_sampling=parts.settings.obey_sampling,
            decode=model.renderer.decode,
        )
        place = SessionPlace(
            url=self.url,
            model=ListedModel(request.pool, model.context_length),
            serve=self._serve_alone,
            tasks=self._tasks,
            metrics=parts.metrics,
            retry_seconds=parts.settings.retry_seconds,
            hidden=hidden,
        )
        session = GatewaySession(parts.make_capture(model.renderer), engines, limits, place)
        self._sessions.add(session)
        parts.metrics.count_sessions(1)
        return session

    @contextmanager
    def also_serving(self, app: KeyedApp) -> Iterator[None]:
        """Let another application answer requests with its keys, within the block."""
        self._other = app
        try:
            yield
        finally:
            self._other = None

    def close(self, session: GatewaySession) -> None:
        """Make the key invalid, and cut off the answers under way. Idempotent."""
        if self._sessions.remove(session):
            self._parts.metrics.count_sessions(-1)
        session.close()

    def _serve_alone(self, session: GatewaySession, listener: socket) -> AbstractAsyncContextManager[None]:
        parts = self._parts
        app = GatewayApp(GatewaySessions(session), parts.settings, parts.metrics, self.bodies)
        return serving(app, listener, ONE_PROGRAM, self._requests, parts.observe)
