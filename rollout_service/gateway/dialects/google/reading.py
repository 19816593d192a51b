"""Reads requests of Google's generateContent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from api_schemas.errors import FieldError
from rollout_service.gateway.contract import ClientMessage, Dialect, ModelCall
from rollout_service.gateway.dialects.base import fingerprint
from rollout_service.gateway.dialects.content import function_tool, unsupported
from rollout_service.gateway.dialects.fields import Fields, invalid, read_body
from rollout_service.gateway.dialects.google.contents import ContentReader, camel_case
from rollout_service.gateway.dialects.google.schemas import to_json_schema
from rollout_service.gateway.dialects.google.table import PARAMETERS
from rollout_service.gateway.dialects.lanes import read_lane
from rollout_service.gateway.dialects.parameters import Sorted, sort_parameters
from rollout_service.gateway.errors import RefusedParameterError
from rollout_service.tokens import ToolSpec

_METHOD = re.compile(r"/models/(?P<model>[^?]+):(?P<method>\w+)$")


def read_call(body: bytes, headers: Mapping[str, str], path: str) -> ModelCall:
    """Return the call that a request makes; requests to count tokens are read alike.

    Raises:
        MalformedBodyError: The body is not JSON.
        InvalidFieldError: A field is wrong, refused, or holds what the policy cannot read.
    """
    model, method, server_sent_events = _read_path(path)
    fields = _read_fields(body)
    notes = sort_parameters(fields, PARAMETERS)
    options = fields.object("generationConfig") or Fields({})
    stream, n = method == "streamGenerateContent", options.integer("candidateCount") or 1
    if stream and n > 1:
        path = "generationConfig.candidateCount"
        raise RefusedParameterError([FieldError(path=path, message="must be 1 in a stream")])
    if any(modality.upper() != "TEXT" for modality in options.texts("responseModalities")):
        unsupported(options.at("responseModalities"), "not only text")
    _check_tool_choice(fields)
    reader = ContentReader(notes)
    system = reader.system(fields)
    messages = [ClientMessage("system", system)] if system else []
    messages += reader.read(fields)
    if not fields.items("contents"):
        invalid("contents", "is required, and must not be empty")
    lane = read_lane(headers)
    return ModelCall(
        dialect=Dialect.GOOGLE,
        model=model,
        messages=tuple(messages),
        tools=tuple(_read_tools(fields, notes)),
        max_tokens=options.integer("maxOutputTokens"),
        stream=stream,
        server_sent_events=server_sent_events,
        json_schema=_read_schema(options),
        stop=options.texts("stopSequences"),
        n=n,
        requested=notes.requested,
        ignored=tuple(notes.ignored),
        lane=lane,
        fingerprint=fingerprint(Dialect.GOOGLE, fields, lane, model, limits=frozenset()),
        size=len(body),
    )


def _read_path(path: str) -> tuple[str, str, bool]:
    """Return the model, the method, and whether a stream is to be one of server-sent events."""
    parts = urlsplit(path)
    found = _METHOD.search(unquote(parts.path))
    sse = parse_qs(parts.query).get("alt") == ["sse"]
    return (found["model"], found["method"], sse) if found else ("", "", sse)


def _read_fields(body: bytes) -> Fields:
    fields = camel_case(read_body(body))
    if inner := fields.object("generateContentRequest"):
        fields = Fields(camel_case(inner).values)
    for name in ("generationConfig", "toolConfig"):
        if options := fields.object(name):
            fields.values[name] = camel_case(options).values
    return fields


def _read_tools(fields: Fields, notes: Sorted) -> Iterator[ToolSpec]:
    for tool in fields.objects("tools"):
        own = camel_case(tool)
        for name in own.values:
            if name != "functionDeclarations":
                notes.ignore(f"tools[].{name}")
        for declared in own.objects("functionDeclarations"):
            function = camel_case(declared)
            schema = function.object("parametersJsonSchema")
            if schema is None and (parameters := function.object("parameters")):
                schema = Fields(to_json_schema(parameters.values))
            name, description = function.required_text("name"), function.text("description")
            yield function_tool(name, description, schema.values if schema else None)


def _check_tool_choice(fields: Fields) -> None:
    config = fields.object("toolConfig")
    calling = config and config.object("functionCallingConfig")
    if calling is None:
        return
    options = camel_case(calling)
    if options.text("mode") not in (None, "MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"):
        invalid(options.at("mode"), "must be AUTO, ANY, NONE or VALIDATED")
    options.texts("allowedFunctionNames")


def _read_schema(options: Fields) -> Mapping[str, Any] | None:
    if schema := options.object("responseJsonSchema"):
        return schema.values
    if schema := options.object("responseSchema"):
        translated: dict[str, Any] = to_json_schema(schema.values)
        return translated
    return {"type": "object"} if options.text("responseMimeType") == "application/json" else None
