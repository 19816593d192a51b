"""How messages get to a server and back: over the pipes of a program in the sandbox, or by HTTP from inside it.

A message has a largest size; messages that answer nothing, or come after the caller's deadline, are dropped; requests
of the server are refused, except `ping`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, Protocol

import anyio
import httpcore
import orjson
from anyio.streams.buffered import BufferedByteReceiveStream

from api_schemas.errors import Boundary
from rollout_service.agents.mcp.settings import McpSettings
from rollout_service.agents.web.tunnel import HTTP_ERRORS, connection_pool
from rollout_service.base.errors import ServiceError
from rollout_service.base.strict_json import without_half_pairs
from sandboxes import RunningProgram, Sandbox
from sandboxes.runtime.execution import ProgramStream

MESSAGE_BYTES = 4 * 1024 * 1024
ERROR_CHARS = 1_000
NO_METHOD = -32_601
NO_PROGRAM = (126, 127)
"""Exit codes of a shell for a program that is not there, or cannot be executed."""
SESSION, VERSION = b"mcp-session-id", b"mcp-protocol-version"

JsonObject = dict[str, Any]


class Transport(Protocol):
    """Carries messages of JSON-RPC, for one caller at a time."""

    version: str

    async def ask(self, message: JsonObject) -> JsonObject: ...

    async def tell(self, message: JsonObject) -> None: ...


class PipeTransport:
    """One message a line, over a program's standard streams."""

    def __init__(self, name: str, program: RunningProgram) -> None:
        self.version = ""
        self._name = name
        self._program = program
        self._lines = BufferedByteReceiveStream(ProgramStream(program))
        self._writing = False

    async def ask(self, message: JsonObject) -> JsonObject:
        await self.tell(message)
        while True:
            answer = _parse(await self._line())
            if answer is None:
                continue
            if "method" in answer:
                await self._refuse(answer)
            elif answer.get("id") == message["id"]:
                return answer

    async def tell(self, message: JsonObject) -> None:
        if self._writing:
            raise McpServerError(f"the MCP server {self._name!r} has not read a whole message in time")
        self._writing = True
        if not await self._program.send(_encoded(message) + b"\n"):
            raise await self._ended()
        self._writing = False

    async def _refuse(self, asked: JsonObject) -> None:
        """Support only `ping`, since no capability for other requests is advertised."""
        if "id" in asked:
            await self.tell({"jsonrpc": "2.0", "id": asked["id"], **_answer_to(asked)})

    async def _line(self) -> bytes:
        try:
            return await self._lines.receive_until(b"\n", MESSAGE_BYTES)
        except anyio.IncompleteRead:
            raise await self._ended() from None
        except anyio.DelimiterNotFound:
            raise McpUnusableError(
                f"the MCP server {self._name!r} sent a message of more than {MESSAGE_BYTES} bytes"
            ) from None

    async def _ended(self) -> McpServerError:
        code = await self._program.wait()
        said = self._program.errors().strip()[-ERROR_CHARS:]
        kind = McpUnusableError if code in NO_PROGRAM else McpServerError
        return kind(
            f"the MCP server {self._name!r} has ended with exit code {code}: {said or 'it printed nothing'}",
            hint="Run its command in the sandbox that `rollout-service env shell DIR` opens. Whatever is not a message "
            "belongs on standard error.",
        )


class HttpTransport:
    """One HTTP request for each message, from inside the sandbox."""

    def __init__(self, settings: McpSettings, pool: httpcore.AsyncConnectionPool) -> None:
        self.version = ""
        self._settings = settings
        self._pool = pool
        self._session: bytes | None = None

    async def ask(self, message: JsonObject) -> JsonObject:
        answer = await self._post(message)
        if answer is not None:
            return answer
        raise McpServerError(f"the MCP server {self._settings.name!r} did not answer {message['method']!r}")

    async def tell(self, message: JsonObject) -> None:
        await self._post(message)

    async def _post(self, message: JsonObject) -> JsonObject | None:
        url, name = str(self._settings.url), self._settings.name
        try:
            content = _encoded(message)
            async with self._pool.stream("POST", url, headers=self._headers(), content=content) as response:
                return await self._read(response, message.get("id"))
        except (*HTTP_ERRORS, ValueError) as error:
            raise McpServerError(
                f"the MCP server {name!r} at {url} cannot be reached: {str(error) or type(error).__name__}",
                hint="List its host in `network` of `[sandbox]`, and see that it is up.",
            ) from error

    async def _read(self, response: httpcore.Response, asked: object) -> JsonObject | None:
        """Read one message, or a stream of events, which may go on after the answer."""
        name = self._settings.name
        headers = {key.lower(): value for key, value in response.headers}
        self._session = headers.get(SESSION, self._session)
        streamed = b"text/event-stream" in headers.get(b"content-type", b"") and response.status < 300
        body = bytearray()
        async for part in response.aiter_stream():
            at = max(0, len(body) - 1)  # what was read before holds no end of an event, but may end with half of one
            body += part.replace(b"\r", b"")
            if len(body) > MESSAGE_BYTES:
                raise McpUnusableError(f"the MCP server {name!r} sent an answer of more than {MESSAGE_BYTES} bytes")
            while streamed and (end := body.find(b"\n\n", at)) >= 0:
                event, at = bytes(body[:end]), 0
                del body[: end + 2]
                if (found := _answering(_data(event), asked)) is not None:
                    return found
        if response.status >= 300:
            text = body.decode(errors="replace")[:ERROR_CHARS]
            raise McpServerError(f"the MCP server {name!r} answered HTTP {response.status}: {text}")
        return _answering(_data(bytes(body)) if streamed else bytes(body), asked)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        own = [(name.encode(), value.encode()) for name, value in self._settings.headers.items()]
        if self._session is not None:
            own.append((SESSION, self._session))
        if self.version:
            own.append((VERSION, self.version.encode()))
        return [
            (b"content-type", b"application/json"),
            (b"accept", b"application/json, text/event-stream"),
            (b"accept-encoding", b"identity"),
            *own,
        ]

    async def end(self) -> None:
        """End the session; the server need not answer."""
        if self._session is not None:
            with suppress(*HTTP_ERRORS):
                await self._pool.request("DELETE", str(self._settings.url), headers=self._headers())


@asynccontextmanager
async def open_transport(settings: McpSettings, sandbox: Sandbox) -> AsyncIterator[Transport]:
    """Start a server's program, or prepare to reach its address; end both with the block."""
    if settings.url is None:
        async with sandbox.program(settings.command, env=settings.env) as program:
            yield PipeTransport(settings.name, program)
        return
    try:
        pool = await connection_pool(sandbox, settings.url)
    except HTTP_ERRORS as error:
        raise McpServerError(f"the MCP server {settings.name!r} cannot be reached: {error}") from error
    async with pool:
        yield HttpTransport(settings, pool)


def _data(event: bytes) -> bytes:
    lines = event.split(b"\n")
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))


def _answering(data: bytes, asked: object) -> JsonObject | None:
    """Return None unless the message answers this request."""
    found = _parse(data)
    return found if found is not None and "method" not in found and found.get("id") == asked else None


def _encoded(message: JsonObject) -> bytes:
    """Encode numbers of any length, too, which a policy may write."""
    return json.dumps(message, ensure_ascii=False).encode()


def _parse(data: bytes) -> JsonObject | None:
    """Return None for a line that is no message. Characters that UTF-8 lacks do not make an answer one."""
    try:
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError:
            value = orjson.loads(without_half_pairs(data.decode(errors="replace").encode()))
        orjson.dumps(value)  # what is nested deeper than this can write, Python cannot print either
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
    return value if isinstance(value, dict) else None


def _answer_to(asked: JsonObject) -> JsonObject:
    if asked.get("method") == "ping":
        return {"result": {}}
    return {"error": {"code": NO_METHOD, "message": "this client offers nothing"}}


class McpServerError(ServiceError):
    """A server did not start, has ended, does not answer, or does not speak the protocol."""

    code = "mcp_server_failed"
    boundary: ClassVar[Boundary] = Boundary.ENVIRONMENT
    retryable = True


class McpUnusableError(McpServerError):
    """A server has no program, other tools than its environment says, or answers that are none: it is so each time."""

    retryable = False


class McpCallError(Exception):
    """A server answered a request with an error of the protocol, such as wrong arguments."""
