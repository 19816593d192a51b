"""What the dialects do alike with the parts of messages and with tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never

from api_schemas.errors import FieldError
from rollout_service.gateway.contract import ClientToolCall
from rollout_service.gateway.dialects.fields import dump_json, parse_object
from rollout_service.gateway.errors import UnsupportedContentError
from rollout_service.tokens import ToolSpec

BETWEEN_PARTS = "\n\n"
"""What joins the texts of one message that a client sent in several parts, other than an assistant's."""

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def unsupported(path: str, what: str) -> Never:
    """Refuse an image, a sound or a file."""
    message = f"the model reads text only, and this is {what}"
    raise UnsupportedContentError([FieldError(path=path, message=message)], hint="Leave it out.")


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> ToolSpec:
    """Return a tool in the OpenAI function format."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description or "",
            "parameters": dict(parameters or _NO_PARAMETERS),
        },
    }


def custom_tool(name: str, description: str | None, form: Mapping[str, Any] | None) -> ToolSpec:
    """Return a function for a tool whose input is one text: with one parameter, and its grammar in the description."""
    lines = [description] if description else []
    if form and form.get("type") == "grammar":
        lines.append(
            f"The input follows this {form.get('syntax', '')} grammar:\n{form.get('definition', '')}"
        )
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return function_tool(name, BETWEEN_PARTS.join(lines), parameters)


def custom_call(call_id: str | None, name: str, text: str) -> ClientToolCall:
    """Return the call of a function that stands for a custom tool's call."""
    return ClientToolCall(call_id, name, dump_json({"input": text}))


def custom_input(arguments: str) -> str:
    """Return the text that a custom tool is called with; malformed arguments as they are."""
    fields = parse_object(arguments)
    text = None if fields is None else fields.get("input")
    return text if isinstance(text, str) else arguments


def describe_tools(tools: list[ToolSpec]) -> str:
    """Return tools as text, for a message that makes them known."""
    return "\n".join(f"<tool>{dump_json(tool['function'])}</tool>" for tool in tools)


def raw_call_text(name: str, arguments: str) -> str:
    """Return a malformed call as text, for dialects that can only carry well-formed ones."""
    return f"{name}({arguments})"
