"""Reads requests of Responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api_schemas.errors import FieldError
from rollout_service.gateway.contract import ClientMessage, Dialect, ModelCall
from rollout_service.gateway.dialects.base import check_tool_choice, fingerprint, read_lane
from rollout_service.gateway.dialects.fields import (
    FORCES_NOTHING,
    Fields,
    Parameter,
    ParameterTable,
    Treatment,
    invalid,
    read_body,
    sort_parameters,
)
from rollout_service.gateway.dialects.openai_responses.items import ItemReader, ToolReader
from rollout_service.gateway.errors import RefusedParameterError

_HONORED, _RECORDED = Treatment.HONORED, Treatment.RECORDED
_IGNORED, _REFUSED = Treatment.IGNORED, Treatment.REFUSED
_WHOLE_HISTORY = "nothing is kept between requests; send the whole history"

PARAMETERS = ParameterTable(
    (
        Parameter("model", _HONORED, "any name is the policy, unless the setting says otherwise"),
        Parameter("input", _HONORED),
        Parameter("instructions", _HONORED),
        Parameter(
            "tools",
            _HONORED,
            "`function`, `custom`, `namespace`, `local_shell`, `tool_search`; others are left out",
        ),
        Parameter("tool_choice", _RECORDED, FORCES_NOTHING),
        Parameter("max_output_tokens", _HONORED),
        Parameter("stream", _HONORED),
        Parameter("text.format", _HONORED, "a turn that must fit a schema is not trained on"),
        Parameter("text.verbosity", _IGNORED),
        Parameter("temperature", _RECORDED),
        Parameter("top_p", _RECORDED),
        Parameter("reasoning", _RECORDED),
        Parameter("store", _IGNORED, "nothing is kept"),
        Parameter("include", _IGNORED, "reasoning always has its `encrypted_content`"),
        Parameter("metadata", _IGNORED),
        Parameter("client_metadata", _IGNORED),
        Parameter("user", _IGNORED),
        Parameter("safety_identifier", _IGNORED),
        Parameter("service_tier", _IGNORED),
        Parameter("prompt_cache_key", _IGNORED, "names the session of the call's lane"),
        Parameter("prompt_cache_retention", _IGNORED),
        Parameter("parallel_tool_calls", _IGNORED),
        Parameter("max_tool_calls", _IGNORED),
        Parameter("stream_options", _IGNORED),
        Parameter("truncation", _IGNORED, "a prompt that is too long is an error"),
        Parameter("context_management", _IGNORED),
        Parameter("top_logprobs", _REFUSED, "log-probabilities are in the trajectory"),
        Parameter("previous_response_id", _REFUSED, _WHOLE_HISTORY),
        Parameter("conversation", _REFUSED, _WHOLE_HISTORY),
        Parameter("background", _REFUSED, _WHOLE_HISTORY),
        Parameter("prompt", _REFUSED, "no prompts are stored; send its text"),
    )
)


_LOGPROBS = "message.output_text.logprobs"
_LIMITS = frozenset({"max_output_tokens"})


def read_call(body: bytes, headers: Mapping[str, str]) -> ModelCall:
    """Return the call that a request makes."""
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
