"""MCP servers in the own settings of a program that is the agent.

Guarantees: the program is told of every server that the environment declares, or the environment is refused; no part of
a server's declaration is taken for a placeholder, or reaches a shell.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from rollout_service.agents.harnesses.preset import HarnessPreset, ServerForm
from rollout_service.agents.mcp.settings import McpSettings
from rollout_service.base.errors import ConfigurationError

Servers = Sequence[McpSettings]


def with_servers(preset: HarnessPreset, servers: Servers) -> HarnessPreset:
    """Return a preset whose program starts with these servers.

    Raises:
        ConfigurationError: The program takes no servers, or not with these settings.
    """
    if not servers:
        return preset
    table = preset.mcp
    if table is None:
        raise ConfigurationError(
            f"[[mcp]]: the harness {preset.name!r} takes no servers",
            hint="Leave [[mcp]] out, or configure the servers in the program's own way, by `[harness] files`.",
        )
    for server in servers:
        if server.tools is not None:
            raise ConfigurationError(
                f"[[mcp]]: the harness {preset.name!r} offers all tools of the server {server.name!r}",
                hint="Leave `tools` out: only the built-in agent can choose among them.",
            )
    text = _WRITERS[table.form](preset.files.get(table.file, ""), servers)
    command = [*preset.command[:1], *table.arguments, *preset.command[1:]]
    return preset.model_copy(update={"command": command, "files": {**preset.files, table.file: text}})


def _literal(value: Any) -> Any:
    """Return a value in which every dollar sign stands for itself."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if isinstance(value, dict):
        return {_literal(key): _literal(item) for key, item in value.items()}
    return value


def _add_json(text: str, key: str, tables: dict[str, Any]) -> str:
    return json.dumps({**json.loads(text or "{}"), key: _literal(tables)}, indent=2)


def _claude(text: str, servers: Servers) -> str:
    def table(server: McpSettings) -> dict[str, Any]:
        if server.url is not None:
            return {"type": "http", "url": server.url, "headers": server.headers}
        return {"type": "stdio", "command": server.command[0], "args": server.command[1:], "env": server.env}

    return _add_json(text, "mcpServers", {server.name: table(server) for server in servers})


def _gemini(text: str, servers: Servers) -> str:
    def table(server: McpSettings) -> dict[str, Any]:
        limit = {} if server.call_seconds is None else {"timeout": round(server.call_seconds * 1000)}
        if server.url is not None:
            return {"httpUrl": server.url, "headers": server.headers, "trust": True, **limit}
        command = {"command": server.command[0], "args": server.command[1:], "env": server.env}
        return {**command, "trust": True, **limit}

    return _add_json(text, "mcpServers", {server.name: table(server) for server in servers})


def _opencode(text: str, servers: Servers) -> str:
    def table(server: McpSettings) -> dict[str, Any]:
        limit = {"enabled": True, "timeout": round(server.start_seconds * 1000)}
        if server.url is not None:
            return {"type": "remote", "url": server.url, "headers": server.headers, **limit}
        return {"type": "local", "command": server.command, "environment": server.env, **limit}

    return _add_json(text, "mcp", {server.name: table(server) for server in servers})


def _codex(text: str, servers: Servers) -> str:
    def lines(server: McpSettings) -> list[str]:
        if server.url is not None:
            settings: dict[str, Any] = {"url": server.url, "http_headers": server.headers}
        else:
            settings = {"command": server.command[0], "args": server.command[1:], "env": server.env}
        settings["startup_timeout_sec"] = server.start_seconds
        if server.call_seconds is not None:
            settings["tool_timeout_sec"] = server.call_seconds
        written = [f"{key} = {_toml(value)}" for key, value in settings.items()]
        return ["", f"[mcp_servers.{server.name}]", *written]

    return text + "\n".join(line for server in servers for line in lines(server)) + "\n"


def _toml(value: Any) -> str:
    """Return a value in TOML, whose strings, numbers and lists are those of JSON but for one character."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(_literal(value), ensure_ascii=False).replace("\x7f", "\\u007f")


_WRITERS: Final[dict[ServerForm, Callable[[str, Servers], str]]] = {
    "claude": _claude,
    "codex": _codex,
    "gemini": _gemini,
    "opencode": _opencode,
}
"""Return the text of a program's settings with the servers added; the text still has placeholders."""
