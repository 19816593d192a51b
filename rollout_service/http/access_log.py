"""The debug log line of every request, with its status and its time. At other levels a request costs nothing here.

No line has a key, not even one that a client has put into the path.
"""

from __future__ import annotations

import logging
import re
import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = structlog.get_logger(__name__)

_PATH_KEY = re.compile(r"(?<=/s/)[^/]+")
"""A rollout's or session's key, for clients that can only be told a base URL."""


def without_keys(path: str) -> str:
    return _PATH_KEY.sub("***", path)


class AccessLogMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._logger = logging.getLogger(__name__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._logger.isEnabledFor(logging.DEBUG):
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            log.debug(
                "request",
                method=scope["method"],
                path=without_keys(scope["path"]),
                status=status or None,
                seconds=round(time.perf_counter() - started, 4),
                client=(scope.get("client") or ("",))[0],
            )
