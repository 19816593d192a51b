"""The tools of an environment's MCP servers, as the built-in agent offers them.

Guarantees: names are those of their servers with the server's name before them, so they are unique; a schema goes to
the policy as it is; a result is text within the environment's limit, and what was left out of it is said.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import orjson

from rollout_service.agents.errors import ToolInputError
from rollout_service.agents.mcp.connection import McpConnection, McpToolInfo, open_connection
from rollout_service.agents.mcp.errors import McpCallError, McpServerError
from rollout_service.agents.mcp.settings import McpSettings
from rollout_service.agents.mcp.transports import JsonObject
from rollout_service.agents.tool_calling.text import with_notes
from rollout_service.agents.tool_calling.tools import ToolContext, ToolResult
from rollout_service.base.errors import did_you_mean
from rollout_service.tokens import ToolSpec
from sandboxes import Sandbox
from sandboxes.task_groups import open_task_group

NAME_CHARS = 64
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")


class McpTool:
    """One tool of a server; implements `tool_calling.tools.Tool`."""

    parallel = False

    def __init__(self, connection: McpConnection, info: McpToolInfo, *, agent_runs_code: bool) -> None:
        """`agent_runs_code` is whether the agent could have ended the server by itself."""
        self._connection = connection
        self._info = info
        self._may_be_ended = agent_runs_code and connection.settings.url is None
        self.name = NOT_IN_NAMES.sub("_", f"{connection.name}__{info.name}")[:NAME_CHARS]
        self.definition: ToolSpec = {
            "type": "function",
            "function": {"name": self.name, "description": info.description, "parameters": info.schema},
        }

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """Call it at the server.

        Raises:
            ToolInputError: The server refused the call as written.
            McpServerError: The server has ended or answers no more, and the agent cannot have done that.
        """
        seconds = min(self._connection.settings.call_seconds or context.seconds, context.seconds)
        try:
            result = await self._connection.call(self._info.name, arguments, seconds)
        except TimeoutError:
            return ToolResult(f"[stopped: it took longer than {seconds:g} s]")
        except McpCallError as error:
            raise ToolInputError(with_notes(str(error), [], context.output_chars)) from error
        except McpServerError as error:
            if not self._may_be_ended:
                raise
            return ToolResult(with_notes(f"[{error}]", [], context.output_chars))
        return ToolResult(result_text(result, context.output_chars))


def result_text(result: JsonObject, limit: int) -> str:
    """Return the text of a tool's result, with a note for each part that is none."""
    texts: list[str] = []
    notes: list[str] = []
    content = result.get("content")
    for part in content if isinstance(content, list) else []:
        _take(part if isinstance(part, dict) else {}, texts, notes)
    if not texts and not notes and "structuredContent" in result:
        texts.append(orjson.dumps(result["structuredContent"]).decode())
    if result.get("isError"):
        notes.append("[the tool reports an error]")
    return with_notes("\n".join(texts), list(dict.fromkeys(notes)), limit)


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
    """Start servers together, and yield their tools in the order of the servers; end them with the block.

    Raises:
        McpServerError: A server does not start, or does not have a tool that it should.
        SandboxError: The sandbox cannot start a program.
    """
    async with AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(open_connection(settings, sandbox)) for settings in servers
        ]
        found: list[list[McpToolInfo]] = [[] for _ in connections]

        async def begin(at: int) -> None:
            found[at] = _chosen(await connections[at].begin(), connections[at].settings)

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
            raise McpServerError(
                f"the MCP server {settings.name!r} has no tool {name!r}{did_you_mean(name, known)}",
                hint=f"It has {', '.join(known) or 'none'}.",
            )
    return [known[name] for name in settings.tools]


def _refuse_doubles(tools: Sequence[McpTool]) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise McpServerError(
                f"two tools of MCP servers would both be named {tool.name!r}",
                hint="Name the tools to offer in `tools` of `[[mcp]]`, or the server otherwise.",
            )
        seen.add(tool.name)
