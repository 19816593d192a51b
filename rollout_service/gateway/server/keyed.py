"""Several applications on one listener: a request goes to the one that knows its key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_service.gateway.server.paths import GatewayRequest


class KeyedApp(Protocol):
    """An application with keys of its own."""

    def knows(self, key: str) -> bool:
        """Return whether a key looks like one of its own, without looking it up."""
        ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; see ASGI."""
        ...


class KeyedApps:
    """Passes a request on by its key; an ASGI application."""

    def __init__(self, app: ASGIApp, others: Sequence[KeyedApp]) -> None:
        """`app` is for all keys that none of `others` knows; those may change at any time."""
        self._app = app
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if self._others and scope["type"] == "http":
            key = GatewayRequest.of(scope).key
            app = next((other for other in self._others if other.knows(key)), app)
        await app(scope, receive, send)
