"""What stands before every route: the bearer key, and the count of requests.

Guarantees: with keys configured, nothing but `/health` and `/ready` answers without one; keys are compared in
constant time; both are plain ASGI, so that a streamed answer is never buffered.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_service.errors import UnauthorizedError
from rollout_service.problems import problem_of, respond
from rollout_service.telemetry import Metrics

OPEN_PATHS = frozenset({"/health", "/ready"})


class BearerKeys:
    """Refuses requests without one of the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[SecretStr]) -> None:
        self._app = app
        self._keys = [key.get_secret_value().encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._admits(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = UnauthorizedError(
            "the bearer key is missing or wrong",
            hint="Send `Authorization: Bearer KEY` with a configured key.",
        )
        await respond(problem_of(error), {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        if not self._keys:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class CountRequests:
    """Counts requests by the route's template, never by the raw path, so that ids make no new series."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "unknown")
                self._metrics.request(scope["method"], route, message["status"])
            await send(message)

        await self._app(scope, receive, count)
