"""An HTTP server that drains before it stops listening.

While the service drains, the API keeps answering, so batches can be acknowledged and results read. The process ends
within `LAST_SECONDS` after the drain, whatever its state. The first SIGTERM or SIGINT begins the shutdown, the second
ends the drain, and the third ends the process.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_service.base.shutdown import RETRY_SECONDS, LastResort, Shutdown, ShuttingDownError
from rollout_service.http.problems import problem_response, to_problem
from rollout_service.http.server import Server

LAST_SECONDS = 3.0
"""The most time that closing may take after the drain."""
FAILED = 4
"""The exit code when a part of the service failed, which a restart mends, unlike a wrong setting."""
IMPATIENT_SIGNALS = 2
"""How many signals end the service in order; one more ends it at once."""
SHOWN = 20
"""The most tasks that the log names when the shutdown takes too long."""


class DrainingServer(Server):
    def __init__(self, *arguments: Any, shutdown: Shutdown, on_start: Callable[[], None], **options: Any) -> None:
        """`on_start` is called once the service answers."""
        super().__init__(*arguments, **options)
        self._shutdown = shutdown
        self._on_start = on_start
        self._last_resort = LastResort(self._still_open)
        shutdown.on_drained = self._stop_listening
        shutdown.on_failure = lambda: self._end_in_time(shutdown.drain_seconds, FAILED)
        self._signals: list[int] = []

    @property
    def signal(self) -> int | None:
        return self._signals[0] if self._signals else None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - its name is uvicorn's
        """Handle a signal; it may arrive between any two instructions of the event loop's thread."""
        self._signals.append(sig)
        if len(self._signals) <= IMPATIENT_SIGNALS:
            drain_seconds = self._shutdown.drain_seconds if len(self._signals) == 1 else 0.0
            self._end_in_time(drain_seconds, 128 + sig)
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._shutdown.begin, signal.Signals(sig).name)
        else:
            self._last_resort.end_within(0.0, 128 + sig)

    def _stop_listening(self) -> None:
        self.should_exit = True

    def _end_in_time(self, drain_seconds: float, exit_code: int) -> None:
        self._last_resort.end_within(drain_seconds + LAST_SECONDS, exit_code)

    def _still_open(self) -> list[str]:
        """Name the open connections and tasks; called from another thread, since the event loop may be blocked."""
        connections = len(self.server_state.connections)
        names = sorted(task.get_name() for task in asyncio.all_tasks(self._loop))
        more = [f"{len(names) - SHOWN} more tasks"] if len(names) > SHOWN else []
        return [f"{connections} connections", *names[:SHOWN], *more]


NEW_WORK_METHODS = frozenset({"POST", "PUT"})
SETTLING_PATHS = ("/ack", "/nack", "/renew", "/cancel", "/stop", "/v1/abort")
"""Endings of paths that settle existing work."""


class ShutdownMiddleware:
    """Refuses or ends requests while the service shuts down.

    Requests that would start new work get a 503 that may be retried, and connections close with their response.
    Requests that settle earlier work, and those that only read, are answered until the drain is over. Then every open
    request ends: with the same 503, or, if its response has begun, by losing its connection, so that no truncated
    response looks complete.
    """

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
