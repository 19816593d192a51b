"""The handling of requests while the service shuts down.

Guarantees: once the shutdown has begun, requests that would start new work get a 503 that may be retried, and
connections close with their response. Requests that settle work given out earlier (`ack`, `nack`, `renew`,
cancellations), and those that only read, are answered until the drain is over. Then every open request ends: with the
same 503, or, if its response has begun, by losing its connection, so that no truncated response looks complete.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_service.base.shutdown import RETRY_SECONDS, Shutdown, ShuttingDownError
from rollout_service.http.problems import problem_response, to_problem

NEW_WORK_METHODS = frozenset({"POST", "PUT"})
SETTLING_PATHS = ("/ack", "/nack", "/renew", "/cancel", "/stop", "/v1/abort")
"""The endings of paths that settle existing work instead of starting new work."""


class ShutdownMiddleware:
    """Refuses or ends requests while the service shuts down."""

    def __init__(self, app: ASGIApp, shutdown: Shutdown) -> None:
        self._app = app
        self._shutdown = shutdown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                if self._shutdown.begun:
                    MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        if self._shutdown.begun and _begins_work(scope):
            await _refusal()(scope, receive, watched)
            return
        with self._shutdown.request() as request:
            await self._app(scope, receive, watched)
        if request.cancelled_caught and not begun:
            await _refusal()(scope, receive, watched)


def _begins_work(scope: Scope) -> bool:
    return scope["method"] in NEW_WORK_METHODS and not scope["path"].endswith(SETTLING_PATHS)


def _refusal() -> ASGIApp:
    return problem_response(to_problem(ShuttingDownError()), {"Retry-After": str(RETRY_SECONDS)})
