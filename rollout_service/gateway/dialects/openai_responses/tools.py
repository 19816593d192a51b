"""The tools of Responses as functions: namespaces get flat names, and tools of other kinds one schema each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from rollout_service.gateway.contract import DeclaredTool
from rollout_service.gateway.dialects.content import custom_tool, function_tool
from rollout_service.gateway.dialects.fields import Fields
from rollout_service.gateway.dialects.parameters import Sorted
from rollout_service.tokens import ToolSpec

LOCAL_SHELL, TOOL_SEARCH = "local_shell", "tool_search"
_STRINGS = {"type": "array", "items": {"type": "string"}}
_SHELL_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": _STRINGS,
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
}
_SEARCH_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
    "required": ["query"],
}


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which a tool of a namespace is offered."""
    return f"{namespace}__{name}" if namespace else name


class ToolReader:
    """Collects the tools of a request, wherever they are declared."""

    def __init__(self, notes: Sorted) -> None:
        self.declared: dict[str, DeclaredTool] = {}
        self._notes = notes

    def read(self, fields: Fields, name: str = "tools") -> Iterator[ToolSpec]:
        """Yield the tools of a list; those that cannot be offered are left out and named."""
        for tool in fields.objects(name):
            yield from self._tool(tool, None)

    def _tool(self, tool: Fields, namespace: str | None) -> Iterator[ToolSpec]:
        form = tool.text("type") or "function"
        match form:
            case "namespace" if namespace is None:
                inner = tool.required_text("name")
                for one in tool.objects("tools"):
                    yield from self._tool(one, inner)
            case "function":
                parameters = tool.object("parameters")
                name = self._declare("function", tool.required_text("name"), namespace)
                yield function_tool(name, tool.text("description"), parameters.values if parameters else None)
            case "custom":
                grammar = tool.object("format")
                name = self._declare("custom", tool.required_text("name"), namespace)
                yield custom_tool(name, tool.text("description"), grammar.values if grammar else None)
            case "local_shell":
                self._declare("local_shell", LOCAL_SHELL, None)
                yield function_tool(LOCAL_SHELL, "Run a command.", _SHELL_PARAMETERS)
            case "tool_search" if tool.text("execution") == "client":
                parameters = tool.object("parameters")
                self._declare("tool_search", TOOL_SEARCH, None)
                description = tool.text("description") or "Find more tools."
                yield function_tool(
                    TOOL_SEARCH, description, parameters.values if parameters else _SEARCH_PARAMETERS
                )
            case _:
                self._notes.ignore(f"tools[type={form}]")

    def _declare(
        self,
        kind: Literal["function", "custom", "local_shell", "tool_search"],
        name: str,
        namespace: str | None,
    ) -> str:
        flat = flat_name(namespace, name)
        if kind != "function" or namespace:
            self.declared[flat] = DeclaredTool(kind, name, namespace)
        return flat
