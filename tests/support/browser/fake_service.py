"""The dashboard's files with answers that a test chooses: for pages alone, without a service behind them."""

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import orjson
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from api_schemas.errors import Problem
from api_schemas.views.overview import Overview
from rollout_service.http.keyring import Role
from rollout_service.http.problems import problem_response
from rollout_service.server.dashboard import routes as dashboard
from tests.support.browser import canned

JSON = "application/json"
TICK = 0.05


@dataclass
class FakeService:
    """A server whose answers a test may change at any time."""

    url: str = ""
    overview: Overview = field(default_factory=canned.overview)
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """By method and path without the query: `GET /v1/runs`."""
    handlers: dict[str, Callable[[Request], BaseModel]] = field(default_factory=dict)
    """By method and path: what answers depend on the query. `answers` come before them."""
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    """The method, path with query, and body of each request but those for files and streams."""
    events: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    keys: dict[str, Role] = field(default_factory=dict)
    """The roles of keys; if there are any, each request needs one."""
    broken: bool = False
    """Whether streams end at once, as when a service is restarted."""
    readers: int = 0
    """The streams of the overview that are open."""
    ended: bool = False

    def answer(self, request: str, content: BaseModel | Any, status: int = 200) -> None:
        """Answer requests such as `GET /v1/runs` with a model, or with what becomes JSON."""
        is_model = isinstance(content, BaseModel)
        body = content.model_dump_json().encode() if is_model else orjson.dumps(content)
        self.answers[request] = (status, body)

    def emit(self, kind: str, **event: Any) -> None:
        """Send an event to all readers, and count it in the overview."""
        number = self.overview.last_event + 1
        self.events.append((number, kind, {"event_id": number, "kind": kind, **event}))
        self.overview = self.overview.model_copy(update={"last_event": number})

    async def stream_overview(self) -> AsyncIterator[bytes]:
        sent = None
        self.readers += 1
        try:
            while not self.ended and not self.broken:
                if sent is not self.overview:
                    sent = self.overview
                    yield b"event: overview\ndata: %s\n\n" % sent.model_dump_json().encode()
                await anyio.sleep(TICK)
        finally:
            self.readers -= 1

    async def stream_events(self, after: int) -> AsyncIterator[bytes]:
        yield b"id: %d\n\n" % after
        while not self.ended and not self.broken:
            for number, kind, event in self.events:
                if number > after:
                    after = number
                    yield b"event: %s\nid: %d\ndata: %s\n\n" % (kind.encode(), number, orjson.dumps(event))
            await anyio.sleep(TICK)

    async def respond(self, request: Request) -> Response:
        role = self.keys.get(request.headers.get("x-rollout-key", "")) if self.keys else Role.ADMIN
        if role is None:
            return _problem(401, "unauthorized", "the bearer key is missing or wrong")
        path, query = request.url.path, request.url.query
        if self.broken:
            return _problem(503, "shutting_down", "the service is shutting down")
        if path == "/v1/overview/stream":
            return StreamingResponse(self.stream_overview(), media_type="text/event-stream")
        if path == "/v1/events":
            after = int(request.headers.get("last-event-id", self.overview.last_event))
            return StreamingResponse(self.stream_events(after), media_type="text/event-stream")
        body = await request.body()
        self.requests.append(
            (request.method, path + (f"?{query}" if query else ""), orjson.loads(body) if body else None)
        )
        if path == "/v1/overview" and "GET /v1/overview" not in self.answers:
            allowed = self.overview.model_copy(update={"role": role.value})
            return Response(allowed.model_dump_json(), media_type=JSON)
        key = f"{request.method} {path}"
        if key in self.answers:
            status, content = self.answers[key]
            return Response(content, status_code=status, media_type=JSON)
        if key in self.handlers:
            return Response(self.handlers[key](request).model_dump_json(), media_type=JSON)
        return _problem(404, "not_found", f"there is no {path}")


def _problem(status: int, code: str, detail: str) -> Response:
    return problem_response(Problem(title=code, status=status, detail=detail, code=code))


@contextmanager
def fake_service(**changes: Any) -> Iterator[FakeService]:
    """Serve the page within the block."""
    fake = FakeService(**changes)
    app = FastAPI(openapi_url=None)
    dashboard.install(app)
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    app.add_route("/v1/{path:path}", fake.respond, methods=methods, include_in_schema=False)
    with served(app) as url:
        fake.url = url
        try:
            yield fake
        finally:
            fake.ended = True


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an ASGI app on a free port of the loopback, from a thread; yield its address."""
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join(10)
