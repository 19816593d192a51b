"""Reads requests of Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_service.gateway.contract import ClientMessage, Dialect, ModelCall
from rollout_service.gateway.dialects.anthropic.messages import MessageReader
from rollout_service.gateway.dialects.anthropic.table import PARAMETERS
from rollout_service.gateway.dialects.base import fingerprint
from rollout_service.gateway.dialects.content import BETWEEN_PARTS, function_tool
from rollout_service.gateway.dialects.fields import Fields, invalid, join_content, parse_object, read_body
from rollout_service.gateway.dialects.lanes import read_lane
from rollout_service.gateway.dialects.parameters import Sorted, sort_parameters
from rollout_service.tokens import ToolSpec

_BILLING = "x-anthropic-billing-header:"
"""How the system block begins in which Claude Code names its version; it differs between otherwise equal prompts."""
_LIMITS = frozenset({"max_tokens"})


def read_call(body: bytes, headers: Mapping[str, str]) -> ModelCall:
    """Return the call that a request makes; requests to count tokens are read alike.

    Raises:
        MalformedBodyError: The body is not JSON.
        InvalidFieldError: A field is wrong, refused, or holds what the policy cannot read.
    """
    fields = read_body(body)
    notes = sort_parameters(fields, PARAMETERS)
    _check_tool_choice(fields)
    offered, deferred = _read_tools(fields, notes)
    reader = MessageReader({tool["function"]["name"]: tool for tool in (*offered, *deferred)}, notes)
    messages = [*_read_system(fields, notes), *reader.read(fields)]
    if not fields.items("messages"):
        invalid("messages", "is required, and must not be empty")
    lane = read_lane(headers, _session(fields))
    return ModelCall(
        dialect=Dialect.ANTHROPIC,
        model=fields.text("model") or "",
        messages=tuple(messages),
        tools=offered,
        deferred_tools=deferred,
        max_tokens=fields.integer("max_tokens"),
        stream=bool(fields.boolean("stream")),
        json_schema=_read_schema(fields),
        stop=fields.texts("stop_sequences"),
        requested=notes.requested,
        ignored=tuple(notes.ignored),
        lane=lane,
        fingerprint=fingerprint(Dialect.ANTHROPIC, fields, lane, limits=_LIMITS),
        size=len(body),
    )


def _read_system(fields: Fields, notes: Sorted) -> list[ClientMessage]:
    def part(block: Fields) -> str | None:
        text = block.text("text") or ""
        if block.text("type") not in (None, "text"):
            notes.ignore(f"system[type={block.text('type')}]")
        return None if text.startswith(_BILLING) else text

    text = join_content(fields, "system", part, BETWEEN_PARTS)
    return [ClientMessage("system", text)] if text else []


def _read_tools(fields: Fields, notes: Sorted) -> tuple[tuple[ToolSpec, ...], tuple[ToolSpec, ...]]:
    """Return the tools of the head, and those that the client makes known later by a reference."""
    offered: list[ToolSpec] = []
    deferred: list[ToolSpec] = []
    for tool in fields.objects("tools"):
        schema = tool.object("input_schema")
        if schema is None:
            if (form := tool.text("type")) in (None, "custom"):
                invalid(tool.at("input_schema"), "is required")
            notes.ignore(f"tools[type={form}]")
            continue
        spec = function_tool(tool.required_text("name"), tool.text("description"), schema.values)
        (deferred if tool.boolean("defer_loading") else offered).append(spec)
    return tuple(offered), tuple(deferred)


def _check_tool_choice(fields: Fields) -> None:
    choice = fields.object("tool_choice")
    if choice is None:
        return
    form = choice.required_text("type")
    if form not in ("auto", "any", "tool", "none"):
        invalid(choice.at("type"), "must be auto, any, tool or none")
    if form == "tool":
        choice.required_text("name")


def _read_schema(fields: Fields) -> Mapping[str, Any] | None:
    config = fields.object("output_config")
    form = (config and config.object("format")) or fields.object("output_format")
    if form is None:
        return None
    if form.required_text("type") != "json_schema":
        invalid(form.at("type"), "must be json_schema")
    schema = form.object("schema") or invalid(form.at("schema"), "is required")
    return schema.values


def _session(fields: Fields) -> str:
    """Return the session that Claude Code names in a JSON text in its metadata."""
    metadata = fields.object("metadata")
    session = (parse_object((metadata and metadata.text("user_id")) or "") or {}).get("session_id")
    return session if isinstance(session, str) else ""
