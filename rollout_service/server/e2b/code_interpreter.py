"""Runs code for the package `e2b_code_interpreter`, like the server that E2B has in its sandboxes.

A language has one context, whose state lives from run to run, and which runs one piece of code at a time. A client that
goes away interrupts only its own code. The state is kept, unless that code does not stop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive

from rollout_service.base.errors import RequestError
from rollout_service.http.requests import CLIENT_CLOSED_REQUEST
from rollout_service.server.e2b.boxes import CURRENT_BOX, Box
from sandboxes import (
    BashResult,
    BashSession,
    LimitExceededError,
    PythonResult,
    PythonSession,
    SessionDiedError,
)
from sandboxes.task_groups import open_task_group

PORT = "49999"
"""The port of E2B's server for code; requests to its daemon name another."""
LANGUAGES = ("python", "bash")
"""Each has a context of its name."""
OUTPUT_BYTES = 4 * 1024 * 1024
"""The middle of a longer output is left out."""
GRACE_SECONDS = 10.0
Events = Iterator[dict[str, Any]]
Session = PythonSession | BashSession


class CodeRun(BaseModel):
    model_config = ConfigDict(strict=True)

    code: str
    context_id: str | None = None
    language: str | None = None
    env_vars: dict[str, str] | None = None


def routes() -> list[Route]:
    return [
        Route("/execute", _execute, methods=["POST"]),
        Route("/contexts", _list),
        Route("/contexts", _refuse_context, methods=["POST"]),
        Route("/contexts/{id}", _refuse_context, methods=["DELETE"]),
        Route("/contexts/{id}/restart", _restart, methods=["POST"]),
    ]


async def _execute(request: Request) -> Response:
    asked, box = CodeRun.model_validate_json(await request.body()), CURRENT_BOX.get()
    if asked.env_vars:
        raise RequestError("env_vars: code has no variables of its own here", hint="Give them to the sandbox.")
    language = asked.context_id or (asked.language or "python").lower()
    if language not in LANGUAGES:
        return _no_context(language)
    async with box.code_locks[language]:
        if await request.is_disconnected():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        box.code_runs[language] += 1
        events = [*await _run(box, language, asked.code, request.receive)]
    more = [
        {"type": "number_of_executions", "execution_count": box.code_runs[language]},
        {"type": "end_of_execution"},
    ]
    return Response("".join(f"{json.dumps(event)}\n" for event in events + more), media_type="application/x-ndjson")


async def _run(box: Box, language: str, code: str, receive: Receive) -> list[dict[str, Any]]:
    session, seconds = await _session(box, language), box.most_seconds
    events: list[dict[str, Any]] = []
    async with open_task_group() as tasks:
        tasks.start_soon(_interrupt_at_disconnect, receive, session, tasks.cancel_scope.cancel)
        try:
            if isinstance(session, PythonSession):
                done = await session.execute(code, timeout=seconds, output_limit=OUTPUT_BYTES)
                events = [*_of_python(done)]
            else:
                events = [*_of_bash(await session.run(code, timeout=seconds, output_limit=OUTPUT_BYTES))]
        except (SessionDiedError, LimitExceededError) as error:
            events = [*_output(error.output), _error(type(error).__name__, str(error))]
        tasks.cancel_scope.cancel()
    return events


async def _session(box: Box, language: str) -> Session:
    return await (box.sandbox.python() if language == "python" else box.sandbox.bash())


async def _interrupt_at_disconnect(receive: Receive, session: Session, cancel: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    await session.interrupt()
    await anyio.sleep(GRACE_SECONDS)
    cancel()


def _of_python(done: PythonResult) -> Events:
    """Yield the events of a cell. As in E2B, a result that is a string has no quotes."""
    yield from _output(done.output)
    if done.result is not None:
        quoted = len(done.result) > 1 and done.result[0] == done.result[-1] and done.result[0] in "'\""
        yield {"type": "result", "text": done.result[1:-1] if quoted else done.result, "is_main_result": True}
    if done.error is not None:
        yield _error(done.error.ename, done.error.evalue, done.error.traceback)


def _of_bash(done: BashResult) -> Events:
    yield from _output(done.output)
    if done.exit_code:
        yield _error("ExitCode", str(done.exit_code))


def _output(text: str) -> Events:
    if text:
        yield {"type": "stdout", "text": text, "timestamp": time.time_ns()}


def _error(name: str, value: str, traceback: str = "") -> dict[str, Any]:
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


async def _list(_: Request) -> Response:
    workdir = CURRENT_BOX.get().sandbox.workdir
    return JSONResponse([{"id": one, "language": one, "cwd": workdir} for one in LANGUAGES])


async def _restart(request: Request) -> Response:
    language, box = request.path_params["id"], CURRENT_BOX.get()
    if language not in LANGUAGES:
        return _no_context(language)
    async with box.code_locks[language]:
        await (await _session(box, language)).restart()
    return JSONResponse(None)


async def _refuse_context(_: Request) -> Response:
    text = f"a sandbox has one context for each language, {' and '.join(LANGUAGES)}; create another sandbox instead"
    return PlainTextResponse(text, 501)


def _no_context(name: str) -> Response:
    return PlainTextResponse(f"there is no context or language {name[:64]!r}; there are {', '.join(LANGUAGES)}", 404)
