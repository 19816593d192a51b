"""Reads requests of Chat Completions, by a table of their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from rollout_service.gateway.contract import (
    ClientMessage,
    ClientToolCall,
    DeclaredTool,
    Dialect,
    ModelCall,
)
from rollout_service.gateway.dialects.base import check_tool_choice, fingerprint, read_lane, read_schema
from rollout_service.gateway.dialects.fields import (
    BETWEEN_PARTS,
    FORCES_NOTHING,
    SCHEMA,
    Fields,
    Parameter,
    ParameterTable,
    Sorted,
    Treatment,
    custom_call,
    custom_tool,
    dump_json,
    invalid,
    join_content,
    read_body,
    sort_parameters,
    unsupported,
    without_notes,
)
from rollout_service.gateway.errors import RefusedParameterError
from rollout_service.tokens import ToolSpec, tool_spec

_HONORED, _RECORDED = Treatment.HONORED, Treatment.RECORDED
_IGNORED, _REFUSED = Treatment.IGNORED, Treatment.REFUSED

PARAMETERS = ParameterTable(
    (
        Parameter("model", _HONORED, "any name is the policy, unless the setting says otherwise"),
        Parameter("messages", _HONORED),
        Parameter("tools", _HONORED, "`function` and `custom`; `strict` has no effect"),
        Parameter("tool_choice", _RECORDED, FORCES_NOTHING),
        Parameter("max_tokens", _HONORED),
        Parameter("max_completion_tokens", _HONORED, "goes before `max_tokens`"),
        Parameter("stream", _HONORED),
        Parameter("stream_options.include_usage", _HONORED),
        Parameter("response_format", _HONORED, SCHEMA),
        Parameter("stop", _HONORED),
        Parameter("n", _HONORED, "refused over 1 in a stream"),
        Parameter("modalities", _HONORED, "only `text`"),
        *without_notes(_RECORDED, "temperature top_p top_k min_p seed frequency_penalty presence_penalty"),
        *without_notes(_RECORDED, "repetition_penalty logit_bias reasoning_effort chat_template_kwargs"),
        *without_notes(_IGNORED, "store metadata user safety_identifier service_tier"),
        Parameter("prompt_cache_key", _IGNORED, "names the session of the call's lane"),
        *without_notes(_IGNORED, "prompt_cache_retention parallel_tool_calls prediction verbosity web_search_options"),
        Parameter("logprobs", _HONORED, "of all sampled tokens, calls included; a stream has them at its end"),
        Parameter("top_logprobs", _REFUSED, "only the log-probabilities of the sampled tokens are returned"),
        Parameter("audio", _REFUSED, "the model writes text only"),
        Parameter("functions", _REFUSED, "use `tools`"),
        Parameter("function_call", _REFUSED, "use `tool_choice`"),
    )
)


_ROLES: Mapping[str, Literal["system", "developer", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_MEDIA = {"image_url": "an image", "input_audio": "audio", "file": "a file", "video_url": "a video"}
_CALLS = frozenset({"tool_calls", "function_call"})
_LIMITS = frozenset({"max_tokens", "max_completion_tokens"})


def read_call(body: bytes, headers: Mapping[str, str]) -> ModelCall:
    fields = read_body(body)
    notes = sort_parameters(fields, PARAMETERS)
    options = fields.object("stream_options") or Fields({})
    stream, n = bool(fields.boolean("stream")), fields.integer("n") or 1
    if stream and n > 1:
        raise RefusedParameterError.at("n", "must be 1 in a stream")
    if any(modality != "text" for modality in fields.texts("modalities")):
        unsupported("modalities", "not only text")
    messages = tuple([_read_message(message, notes) for message in fields.objects("messages")])
    if not messages:
        invalid("messages", "is required, and must not be empty")
    check_tool_choice(fields)
    tools = list(_read_tools(fields, notes))
    lane = read_lane(headers, fields.text("prompt_cache_key") or "")
    return ModelCall(
        dialect=Dialect.CHAT,
        model=fields.text("model") or "",
        messages=messages,
        tools=tuple(spec for spec, _ in tools),
        declared_tools={declared.name: declared for _, declared in tools if declared},
        max_tokens=fields.integer("max_completion_tokens") or fields.integer("max_tokens"),
        stream=stream,
        include_usage=bool(options.boolean("include_usage")),
        json_schema=read_schema(fields.object("response_format"), "json_schema"),
        stop=fields.texts("stop"),
        n=n,
        logprobs=bool(fields.boolean("logprobs")),
        requested=notes.requested,
        ignored=tuple(notes.ignored),
        lane=lane,
        fingerprint=fingerprint(Dialect.CHAT, fields, lane, limits=_LIMITS),
        size=len(body),
    )


def _read_message(message: Fields, notes: Sorted) -> ClientMessage:
    role = _ROLES.get(message.required_text("role"))
    if role is None:
        invalid(message.at("role"), f"must be one of {', '.join(_ROLES)}")
    text = message.values.get("content")
    if type(text) is not str:
        between = "" if role == "assistant" else BETWEEN_PARTS
        text = join_content(message, "content", lambda part: _read_part(part, notes), between)
    if role == "tool":
        call_id, name = message.text("tool_call_id"), message.text("name")
        return ClientMessage("tool", text, call_id=call_id or None, tool_name=name)
    if role != "assistant":
        return ClientMessage(role, text)
    reasoning = message.text("reasoning_content") or message.text("reasoning")
    has_calls = not message.values.keys().isdisjoint(_CALLS)
    return ClientMessage(role, text, reasoning, tuple(_read_calls(message)) if has_calls else ())


def _read_part(part: Fields, notes: Sorted) -> str | None:
    form = part.required_text("type")
    if form in ("text", "input_text", "output_text"):
        return part.text("text") or ""
    if form == "refusal":
        return part.text("refusal") or ""
    if form in _MEDIA:
        unsupported(part.path, _MEDIA[form])
    notes.ignore(f"messages[].content[type={form}]")
    return None


def _read_calls(message: Fields) -> Iterator[ClientToolCall]:
    for call in message.objects("tool_calls"):
        call_id = call.text("id") or None
        if custom := call.object("custom"):
            yield custom_call(call_id, custom.required_text("name"), custom.text("input") or "")
            continue
        yield _read_call(call_id, call.object("function") or invalid(call.at("function"), "is required"))
    if not message.items("tool_calls") and (function := message.object("function_call")):
        yield _read_call(None, function)  # the form before `tool_calls`, whose result is named after the function


def _read_call(call_id: str | None, function: Fields) -> ClientToolCall:
    value = function.values.get("arguments")  # some clients send an object in the place of its text
    arguments = dump_json(value) if isinstance(value, dict) else function.text("arguments") or ""
    return ClientToolCall(call_id, function.required_text("name"), arguments)


def _read_tools(fields: Fields, notes: Sorted) -> Iterator[tuple[ToolSpec, DeclaredTool | None]]:
    for tool in fields.objects("tools"):
        form = tool.text("type") or "function"
        if form == "function":
            function = tool.object("function") or invalid(tool.at("function"), "is required")
            parameters = function.object("parameters")
            name, description = function.required_text("name"), function.text("description")
            yield tool_spec(name, description, parameters.values if parameters else None), None
        elif form == "custom":
            custom = tool.object("custom") or invalid(tool.at("custom"), "is required")
            name, grammar = custom.required_text("name"), custom.object("format")
            shape = grammar and (grammar.object("grammar") or grammar)
            details = {"type": "grammar", **shape.values} if shape and shape is not grammar else None
            yield custom_tool(name, custom.text("description"), details), DeclaredTool("custom", name)
        else:
            notes.ignore(f"tools[type={form}]")
