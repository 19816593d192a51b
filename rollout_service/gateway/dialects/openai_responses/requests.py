"""Reads requests of Responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api_schemas.errors import FieldError
from rollout_service.gateway.contract import ClientMessage, Dialect, ModelCall
from rollout_service.gateway.dialects.base import check_tool_choice, fingerprint, read_lane
from rollout_service.gateway.dialects.fields import Fields, invalid, read_body, sort_parameters
from rollout_service.gateway.dialects.openai_responses.items import ItemReader, ToolReader
from rollout_service.gateway.dialects.openai_responses.table import PARAMETERS
from rollout_service.gateway.errors import RefusedParameterError

_LOGPROBS = "message.output_text.logprobs"
_LIMITS = frozenset({"max_output_tokens"})


def read_call(body: bytes, headers: Mapping[str, str]) -> ModelCall:
    """Return the call that a request makes.

    Raises:
        MalformedBodyError: The body is not JSON.
        InvalidFieldError: A field is wrong, refused, or holds content that the policy cannot read.
    """
    fields = read_body(body)
    notes = sort_parameters(fields, PARAMETERS)
    if _LOGPROBS in fields.items("include"):
        message = "is not supported: log-probabilities are in the trajectory"
        raise RefusedParameterError([FieldError(path="include", message=message)])
    check_tool_choice(fields)
    tools = ToolReader(notes)
    head = list(tools.read(fields))
    items = ItemReader(tools, notes)
    instructions = fields.text("instructions")
    messages = [ClientMessage("system", instructions)] if instructions else []
    messages += items.read(fields)
    if not fields.values.get("input"):
        invalid("input", "is required, and must not be empty")
    lane = read_lane(headers, fields.text("prompt_cache_key") or "")
    return ModelCall(
        dialect=Dialect.RESPONSES,
        model=fields.text("model") or "",
        messages=tuple(messages),
        tools=(*head, *items.head_tools),
        deferred_tools=tuple(items.found_tools),
        declared_tools=tools.declared,
        max_tokens=fields.integer("max_output_tokens"),
        stream=bool(fields.boolean("stream")),
        json_schema=_read_schema(fields),
        requested=notes.requested,
        ignored=tuple(notes.ignored),
        lane=lane,
        fingerprint=fingerprint(Dialect.RESPONSES, fields, lane, limits=_LIMITS),
        size=len(body),
    )


def _read_schema(fields: Fields) -> Mapping[str, Any] | None:
    text = fields.object("text")
    form = text and text.object("format")
    if form is None:
        return None
    match form.required_text("type"):
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            schema = form.object("schema")
            return schema.values if schema else {"type": "object"}
    return invalid(form.at("type"), "must be text, json_object or json_schema")
