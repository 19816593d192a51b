"""Runs code for the package `e2b_code_interpreter`, like the server that E2B has in its sandboxes.

A context has a state, which lives from run to run, and runs one piece of code at a time. A client that goes away
interrupts only its own code. The state is kept, unless that code does not stop.
"""

from __future__ import annotations

import math
import secrets
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import anyio
import orjson
from anyio.streams.memory import MemoryObjectSendStream
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollout_service.base.errors import NotFoundError, RequestError
from rollout_service.http.requests import CLIENT_CLOSED_REQUEST
from rollout_service.server.e2b.boxes import CURRENT_BOX, Box, RequestBody, Text
from rollout_service.server.e2b.files import absolute
from sandboxes import (
    BashSession,
    LimitExceededError,
    PythonSession,
    SandboxError,
    SessionDiedError,
    SessionOutput,
)
from sandboxes.task_groups import open_task_group

PORT = "49999"
"""The port of E2B's server for code; requests to its daemon name another."""
LANGUAGES = ("python", "bash")
"""Each has a context of its name, whose session is the sandbox's own."""
MAX_CONTEXTS = 10
"""Contexts in a sandbox, including these two. A Python context takes about 60 MB of its memory."""
OUTPUT_SIZE = 8 * 1024 * 1024
"""Characters of a run's output and values, which wait in memory for a slow client; the rest is left out."""
HEADERS = [(b"content-type", b"application/x-ndjson")]
FORMATS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "text/latex": "latex",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "application/json": "json",
    "application/javascript": "javascript",
}
"""E2B's names of formats; others are `extra`."""
GRACE_SECONDS = 10.0
Event = dict[str, Any]
Session = PythonSession | BashSession
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]


class CodeRun(RequestBody):
    code: str
    context_id: str | None = None
    language: str | None = None
    env_vars: Annotated[dict[Variable, Text], Field(max_length=128)] | None = None


class NewContext(RequestBody):
    cwd: Text | None = None
    language: str | None = None


@dataclass(eq=False, slots=True)
class Context:
    id: str
    language: str
    cwd: str
    session: Session | None = None
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    runs: int = 0

    @property
    def view(self) -> dict[str, str]:
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def open(self, box: Box) -> Session:
        if self.session is None:
            self.session = await (box.sandbox.python() if self.language == "python" else box.sandbox.bash())
        return self.session


def routes() -> list[Route]:
    return [
        Route("/execute", _execute, methods=["POST"]),
        Route("/contexts", _list),
        Route("/contexts", _create, methods=["POST"]),
        Route("/contexts/{id}", _remove, methods=["DELETE"]),
        Route("/contexts/{id}/restart", _restart, methods=["POST"]),
    ]


async def _execute(request: Request) -> Response:
    asked = CodeRun.model_validate_json(await request.body())
    context = _context(asked.context_id or (asked.language or "python").lower())
    if context.language == "bash" and "\0" in asked.code:
        raise RequestError("code: a command of bash has no NUL characters")
    return CodeRunResponse(CURRENT_BOX.get(), context, asked)


class CodeRunResponse(Response):
    """The events of a run, each a line of JSON, sent as they come. It begins with the first, so a start can fail."""

    def __init__(self, box: Box, context: Context, asked: CodeRun) -> None:
        super().__init__()
        self._box, self._context, self._asked, self._begun = box, context, asked, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        async with context.lock:
            if await Request(scope, receive).is_disconnected():
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
                return
            session = await context.open(self._box)
            context.runs += 1
            try:
                await self._run(session, receive, send)
            except SandboxError as error:
                if not self._begun:
                    raise
                await self._tell(send, _error_event(type(error).__name__, str(error)))
            await self._tell(send, {"type": "number_of_executions", "execution_count": context.runs})
        await self._tell(send, {"type": "end_of_execution"})
        await send({"type": "http.response.body"})

    async def _run(self, session: Session, receive: Receive, send: Send) -> None:
        sending, events = anyio.create_memory_object_stream[Event](math.inf)  # `OUTPUT_SIZE` bounds it
        async with events, open_task_group() as tasks:
            tasks.start_soon(_interrupt_at_disconnect, receive, session, tasks.cancel_scope.cancel)
            tasks.start_soon(_run, session, self._asked, self._box.most_seconds, sending)
            async for event in events:
                await self._tell(send, event)
            tasks.cancel_scope.cancel()

    async def _tell(self, send: Send, event: Event) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": orjson.dumps(event) + b"\n", "more_body": True})


async def _run(session: Session, asked: CodeRun, seconds: float, events: MemoryObjectSendStream[Event]) -> None:
    def pass_on(output: SessionOutput) -> None:
        events.send_nowait(_event(output))

    code, env = asked.code, asked.env_vars or {}
    with events:
        try:
            if isinstance(session, PythonSession):
                done = await session.execute(
                    code, timeout=seconds, output_limit=OUTPUT_SIZE, env=env, on_output=pass_on
                )
                if done.error is not None:
                    found = done.error
                    events.send_nowait(_error_event(found.ename, found.evalue, found.traceback))
            else:
                if env:
                    given = (f"{name}={shlex.quote(value)}" for name, value in env.items())
                    code = f"{' '.join(given)} eval {shlex.quote(code)}"
                ended = await session.run(code, timeout=seconds, output_limit=OUTPUT_SIZE, on_output=pass_on)
                if ended.exit_code:
                    events.send_nowait(_error_event("ExitCode", str(ended.exit_code)))
        except (SessionDiedError, LimitExceededError) as error:
            events.send_nowait(_error_event(type(error).__name__, str(error)))


async def _interrupt_at_disconnect(receive: Receive, session: Session, cancel: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    await session.interrupt()
    await anyio.sleep(GRACE_SECONDS)
    cancel()


def _event(output: SessionOutput) -> Event:
    """Return the event of a piece of output. As in E2B, a value that is a string has no quotes."""
    text = output.formats.get("text/plain", "")
    if output.kind in ("stdout", "stderr"):
        return {"type": output.kind, "text": text, "timestamp": time.time_ns()}
    event: Event = {"type": "result", "is_main_result": output.kind == "result", "extra": {}}
    for name, value in output.formats.items():
        fields, key = (event, FORMATS[name]) if name in FORMATS else (event["extra"], name)
        fields[key] = orjson.Fragment(value) if name.endswith("json") else value
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        event["text"] = text[1:-1]
    return event


def _error_event(name: str, value: str, traceback: str = "") -> Event:
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


async def _list(_: Request) -> Response:
    return JSONResponse([context.view for context in _contexts().values()])


async def _create(request: Request) -> Response:
    asked, box = NewContext.model_validate_json(await request.body()), CURRENT_BOX.get()
    language = _context((asked.language or "python").lower()).language
    cwd = absolute(box.sandbox, asked.cwd or "")
    async with box.creating_context:
        if len(box.contexts) == MAX_CONTEXTS:
            raise RequestError(f"a sandbox has at most {MAX_CONTEXTS} contexts", hint="Remove one that is not used.")
        session = await box.sandbox.open_session("bash" if language == "bash" else "python", cwd=cwd)
        context = Context(secrets.token_hex(8), language, cwd, session)
        box.contexts[context.id] = context
    return JSONResponse(context.view)


async def _remove(request: Request) -> Response:
    context, box = _context(request.path_params["id"]), CURRENT_BOX.get()
    if context.id in LANGUAGES:
        raise RequestError(f"each sandbox has the context {context.id}", hint="Restart it to clear its state.")
    del box.contexts[context.id]
    await (await context.open(box)).close()
    return JSONResponse(None)


async def _restart(request: Request) -> Response:
    session = await _context(request.path_params["id"]).open(CURRENT_BOX.get())
    await session.restart()
    return JSONResponse(None)


def _contexts() -> dict[str, Context]:
    box = CURRENT_BOX.get()
    for language in LANGUAGES:
        box.contexts.setdefault(language, Context(language, language, box.sandbox.workdir))
    return box.contexts


def _context(name: str) -> Context:
    if (found := _contexts().get(name)) is None:
        raise NotFoundError(
            f"there is no context or language {name[:64]!r}", hint=f"Languages are {' and '.join(LANGUAGES)}."
        )
    return found
