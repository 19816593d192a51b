"""The tools of an environment's MCP servers, as the built-in agent offers them.

The server's name precedes a tool's, so names are unique; a schema goes to the policy as it is; a result is text within
the environment's limit, with a note on anything left out.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import orjson
from pydantic import ValidationError

from rollout_service.agents.mcp.settings import McpSettings
from rollout_service.agents.mcp.transports import (
    HttpTransport,
    JsonObject,
    McpCallError,
    McpServerError,
    McpUnusableError,
    Transport,
    open_transport,
)
from rollout_service.agents.tool_calling.tools import ToolContext, ToolInputError, ToolResult, with_notes
from rollout_service.base.errors import did_you_mean
from rollout_service.base.validation import path_as_sent
from rollout_service.tokens import tool_spec
from sandboxes import Sandbox
from sandboxes.task_groups import open_task_group

NAME_CHARS = 64
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")


class McpTool:
    """Implements `tool_calling.tools.Tool`."""

    parallel = False

    def __init__(self, connection: McpConnection, info: McpToolInfo, *, agent_runs_code: bool) -> None:
        """`agent_runs_code` is whether the agent or a sub-agent could have ended the server by itself."""
        self._connection = connection
        self._info = info
        self._may_be_ended = agent_runs_code and connection.settings.url is None
        self.name = NOT_IN_NAMES.sub("_", f"{connection.name}__{info.name}")[:NAME_CHARS]
        self.definition = tool_spec(self.name, info.description, info.schema)

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        seconds = min(self._connection.settings.call_seconds or context.seconds, context.seconds)
        try:
            result = await self._connection.call(self._info.name, arguments, seconds)
        except TimeoutError:
            return ToolResult(f"[stopped: it took longer than {seconds:g} s]", failed=True)
        except McpCallError as error:
            raise ToolInputError(with_notes(str(error), [], context.output_chars)) from error
        except McpServerError as error:
            if not self._may_be_ended:
                raise
            return ToolResult(with_notes(f"[{error}]", [], context.output_chars), failed=True)
        return ToolResult(result_text(result, context.output_chars), failed=bool(result.get("isError")))


def result_text(result: JsonObject, limit: int) -> str:
    """Return the text, with a note for each part that is not text."""
    texts: list[str] = []
    notes: list[str] = []
    content = result.get("content")
    for part in content if isinstance(content, list) else []:
        _take(part if isinstance(part, dict) else {}, texts, notes)
    if not texts and not notes and "structuredContent" in result:
        texts.append(orjson.dumps(result["structuredContent"]).decode())
    failed = ["[the tool reports an error]"] if result.get("isError") else []
    return with_notes("\n".join([*texts, *dict.fromkeys(notes)]), failed, limit)


def _take(part: dict[str, Any], texts: list[str], notes: list[str]) -> None:
    resource = part.get("resource")
    match part.get("type"):
        case "text":
            texts.append(str(part.get("text", "")))
        case "resource" if isinstance(resource, dict) and "text" in resource:
            texts.append(str(resource["text"]))
        case "resource_link":
            texts.append(f"{part.get('name', 'resource')}: {part.get('uri', '')}")
        case kind:
            what = f"{kind} ({str(part.get('mimeType', 'no type'))[:64]})"
            notes.append(f"[a part was left out: {str(what)[:128]}; only text can be shown]")


@asynccontextmanager
async def open_servers(
    servers: Sequence[McpSettings], sandbox: Sandbox, *, agent_runs_code: bool
) -> AsyncIterator[list[McpTool]]:
    """Start servers together, and yield their tools in order; end them with the block.

    Raises:
        McpServerError: A server does not start, or does not have a tool that it should.
        SandboxError: The sandbox cannot start a program.
    """
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(open_connection(settings, sandbox)) for settings in servers]
        found: list[list[McpToolInfo]] = [[] for _ in connections]

        async def begin(at: int) -> None:
            found[at] = _chosen(await connections[at].begin(), connections[at].settings)
            for info in found[at]:
                _check_types(info, connections[at].settings)

        async with open_task_group() as tasks:
            for at in range(len(connections)):
                tasks.start_soon(begin, at)
        make = partial(McpTool, agent_runs_code=agent_runs_code)
        pairs = zip(connections, found, strict=True)
        tools = [make(connection, info) for connection, infos in pairs for info in infos]
        _refuse_doubles(tools)
        yield tools


def _chosen(infos: Sequence[McpToolInfo], settings: McpSettings) -> list[McpToolInfo]:
    if settings.tools is None:
        return list(infos)
    known = {info.name: info for info in infos}
    for name in settings.tools:
        if name not in known:
            raise McpUnusableError(
                f"the MCP server {settings.name!r} has no tool {name!r}{did_you_mean(name, known)}",
                hint=f"It has {', '.join(known) or 'none'}.",
            )
    return [known[name] for name in settings.tools]


def _check_types(info: McpToolInfo, settings: McpSettings) -> None:
    """Refuse types that JSON Schema does not have: a policy would learn from them, and other engines refuse them.

    The rest of a schema goes on as it is, since servers use many drafts of the language.
    """
    from fastapi.openapi.models import Schema  # all of FastAPI, which `env check` does not need

    try:
        Schema.model_validate(info.schema)
    except ValidationError as error:
        wrong = [item for item in error.errors(include_url=False) if item["type"] == "literal_error"]
        if wrong:
            path = ".".join(map(str, path_as_sent(wrong[-1]["loc"], info.schema, missing=False)))
            raise McpUnusableError(
                f"the schema of the tool {info.name!r} of the MCP server {settings.name!r} says {path} is "
                f"{wrong[-1]['input']!r:.64}, which is not a type of JSON Schema",
                hint="Mend the server, or name the tools to offer in `tools` of its `[[mcp]]`. Types are "
                "array, boolean, integer, null, number, object and string.",
            ) from error


def _refuse_doubles(tools: Sequence[McpTool]) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise McpUnusableError(
                f"two tools of MCP servers would both be named {tool.name!r}",
                hint="Name the tools to offer in `tools` of `[[mcp]]`, or the server otherwise.",
            )
        seen.add(tool.name)


PROTOCOL = "2025-06-18"
PAGES = 20
MOST_TOOLS = 128
SCHEMA_BYTES = 64 * 1024
DESCRIPTION_CHARS = 4_096
PING_SECONDS = 3.0
END_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class McpToolInfo:
    name: str
    description: str
    schema: dict[str, Any]


class McpConnection:
    """An open session; `open_connection` makes one.

    It makes one call at a time; every wait has a deadline, and an answer that comes after it is dropped.
    """

    def __init__(self, settings: McpSettings, transport: Transport) -> None:
        self.settings = settings
        self._transport = transport
        self._lock = anyio.Lock()
        self._last_id = 0

    @property
    def name(self) -> str:
        return self.settings.name

    async def begin(self) -> list[McpToolInfo]:
        try:
            with anyio.fail_after(self.settings.start_seconds):
                await self._shake_hands()
                return await self._tools()
        except TimeoutError as error:
            raise McpServerError(
                f"the MCP server {self.name!r} was not ready within {self.settings.start_seconds:g} s",
                hint="Raise its `start_seconds`, or see what its program waits for.",
            ) from error
        except McpCallError as error:
            raise McpUnusableError(f"the MCP server {self.name!r} refuses to begin: {error}") from error

    async def _shake_hands(self) -> None:
        answer = await self._ask(
            "initialize",
            {
                "protocolVersion": PROTOCOL,
                "capabilities": {},
                "clientInfo": {"name": "rollout-service", "version": "1"},
            },
        )
        version = answer.get("protocolVersion")
        if not isinstance(version, str):
            raise self._nonsense("its first answer names no version of the protocol")
        self._transport.version = version
        await self._transport.tell({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def _tools(self) -> list[McpToolInfo]:
        found: list[McpToolInfo] = []
        cursor: dict[str, Any] = {}
        for _ in range(PAGES):
            page = await self._ask("tools/list", cursor)
            tools = page.get("tools")
            if not isinstance(tools, list) or len(found) + len(tools) > MOST_TOOLS:
                raise self._nonsense(f"its list of tools is none, or has more than {MOST_TOOLS}")
            found += [self._info(tool) for tool in tools]
            if not page.get("nextCursor"):
                return found
            cursor = {"cursor": page["nextCursor"]}
        raise self._nonsense(f"its list of tools has more than {PAGES} pages")

    def _info(self, tool: Any) -> McpToolInfo:
        name = tool.get("name") if isinstance(tool, dict) else None
        schema = tool.get("inputSchema") if isinstance(tool, dict) else None
        if not isinstance(name, str) or not name or not isinstance(schema, dict):
            raise self._nonsense("a tool of its list has no name or no inputSchema")
        if len(orjson.dumps(schema)) > SCHEMA_BYTES:
            raise self._nonsense(f"the schema of its tool {name[:64]!r} has more than {SCHEMA_BYTES} bytes")
        return McpToolInfo(name, str(tool.get("description") or "")[:DESCRIPTION_CHARS], schema)

    async def call(self, tool: str, arguments: dict[str, Any], seconds: float) -> JsonObject:
        async with self._lock:
            try:
                with anyio.fail_after(seconds):
                    return await self._ask("tools/call", {"name": tool, "arguments": arguments})
            except TimeoutError:
                await self._cancel_last(seconds)
                raise

    async def _cancel_last(self, seconds: float) -> None:
        """Let the server stop a late call, and see that it still answers."""
        try:
            with anyio.fail_after(PING_SECONDS):
                late = {"requestId": self._last_id, "reason": "its deadline has passed"}
                cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": late}
                await self._transport.tell(cancelled)
                await self._ask("ping", {})
        except TimeoutError as error:
            raise McpServerError(
                f"the MCP server {self.name!r} did not answer a call within {seconds:g} s, nor a ping after it",
                hint="Let its tools run apart from its messages, or raise its `call_seconds` and `tool_seconds`.",
            ) from error
        except McpCallError:
            return  # it does not know ping, but it answers

    async def _ask(self, method: str, params: dict[str, Any]) -> JsonObject:
        self._last_id += 1
        asked = {"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params}
        answer = await self._transport.ask(asked)
        if isinstance(error := answer.get("error"), dict):
            raise McpCallError(str(error.get("message") or error.get("code"))[:DESCRIPTION_CHARS])
        result = answer.get("result")
        if not isinstance(result, dict):
            raise self._nonsense(f"its answer to {method} has neither a result nor an error")
        return result

    def _nonsense(self, what: str) -> McpUnusableError:
        return McpUnusableError(
            f"the MCP server {self.name!r} does not speak the protocol: {what}",
            hint="Try the server with another client.",
        )


@asynccontextmanager
async def open_connection(settings: McpSettings, sandbox: Sandbox) -> AsyncIterator[McpConnection]:
    """Open a session; end it, and the server's program, with the block."""
    async with open_transport(settings, sandbox) as transport:
        try:
            yield McpConnection(settings, transport)
        finally:
            if isinstance(transport, HttpTransport):
                with anyio.move_on_after(END_SECONDS, shield=True):
                    await transport.end()
