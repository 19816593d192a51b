"""Reads requests of Google's generateContent."""

from __future__ import annotations

import base64
import binascii
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any
from urllib.parse import parse_qs

from rollout_service.gateway.contract import ClientMessage, ClientToolCall, Dialect, ModelCall
from rollout_service.gateway.dialects.base import FoldedAnswer, fingerprint, read_lane, user_messages
from rollout_service.gateway.dialects.fields import (
    BETWEEN_PARTS,
    FORCES_NOTHING,
    SCHEMA,
    Fields,
    Parameter,
    ParameterTable,
    Sorted,
    Treatment,
    as_fields,
    dump_json,
    invalid,
    read_body,
    sort_parameters,
    unsupported,
)
from rollout_service.gateway.errors import RefusedParameterError
from rollout_service.tokens import ToolSpec, tool_spec

_HONORED, _RECORDED = Treatment.HONORED, Treatment.RECORDED
_IGNORED, _REFUSED = Treatment.IGNORED, Treatment.REFUSED


def _generation(name: str, treatment: Treatment, note: str = "", recorded_as: str = "") -> Parameter:
    return Parameter(f"generationConfig.{name}", treatment, note, recorded_as)


PARAMETERS = ParameterTable(
    (
        Parameter("contents", _HONORED),
        Parameter("systemInstruction", _HONORED),
        Parameter("tools", _HONORED, "`functionDeclarations`; tools that Google runs are left out and counted"),
        Parameter("toolConfig.functionCallingConfig", _RECORDED, FORCES_NOTHING),
        Parameter("toolConfig.retrievalConfig", _IGNORED),
        _generation("maxOutputTokens", _HONORED),
        _generation("stopSequences", _HONORED),
        _generation("candidateCount", _HONORED, "refused over 1 in a stream"),
        _generation("responseMimeType", _HONORED, "`application/json` without a schema is any object"),
        _generation("responseSchema", _HONORED, SCHEMA),
        _generation("responseJsonSchema", _HONORED, "as `responseSchema`"),
        _generation("responseModalities", _HONORED, "only `TEXT`"),
        _generation("temperature", _RECORDED, recorded_as="temperature"),
        _generation("topP", _RECORDED, recorded_as="top_p"),
        _generation("topK", _RECORDED, recorded_as="top_k"),
        _generation("seed", _RECORDED, recorded_as="seed"),
        _generation("presencePenalty", _RECORDED, recorded_as="presence_penalty"),
        _generation("frequencyPenalty", _RECORDED, recorded_as="frequency_penalty"),
        _generation("thinkingConfig", _RECORDED, recorded_as="thinking"),
        _generation("mediaResolution", _IGNORED),
        _generation("enableEnhancedCivicAnswers", _IGNORED),
        _generation("responseLogprobs", _REFUSED, "log-probabilities are in the trajectory"),
        _generation("logprobs", _REFUSED, "log-probabilities are in the trajectory"),
        _generation("speechConfig", _REFUSED, "the model writes text only"),
        Parameter("safetySettings", _IGNORED),
        Parameter("cachedContent", _REFUSED, "nothing is kept between requests; send the whole history"),
        Parameter("labels", _IGNORED),
        Parameter("model", _IGNORED, "the path names the model"),
    )
)


def sign(turn_key: str, call_id: str = "") -> str:
    """Make a thought signature, which clients send back unread; Google's require base64."""
    return base64.b64encode(f"{turn_key}.{call_id}".encode()).decode()


def read_signature(signature: str) -> tuple[str, str | None]:
    """Return the key of the turn and the id of the call; another service's signature is a key of no turn."""
    try:
        text = base64.b64decode(signature, altchars=b"-_" if set("-_") & set(signature) else None).decode("ascii")
    except (binascii.Error, ValueError):
        return signature, None
    turn_key, _, call_id = text.partition(".")
    return turn_key, call_id or None


def read_call(body: bytes, headers: Mapping[str, str], path: str) -> ModelCall:
    """Read a request for an answer, or one to count tokens."""
    model, method, server_sent_events = _read_path(path)
    fields = _read_fields(body)
    notes = sort_parameters(fields, PARAMETERS)
    options = fields.object("generationConfig") or Fields({})
    stream, n = method == "streamGenerateContent", options.integer("candidateCount") or 1
    if stream and n > 1:
        raise RefusedParameterError.at("generationConfig.candidateCount", "must be 1 in a stream")
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
    unlimited = {name: value for name, value in options.values.items() if name != "maxOutputTokens"}
    hashed = Fields({**fields.values, "generationConfig": unlimited})
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
        fingerprint=fingerprint(Dialect.GOOGLE, hashed, lane, model),
        size=len(body),
    )


def _read_path(path: str) -> tuple[str, str, bool]:
    """Return model, method, and whether a stream has server-sent events."""
    called, _, query = path.partition("?")
    model, _, method = called.partition("/models/")[2].rpartition(":")
    return model, method, parse_qs(query).get("alt") == ["sse"]


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
            yield tool_spec(name, description, schema.values if schema else None)


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


_TYPES = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
_OF_SCHEMAS = frozenset({"properties", "$defs", "defs", "patternProperties"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE = frozenset({"items", "additionalProperties", "not"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
"""64-bit integers, of up to 19 digits, which Google's JSON writes as strings."""
_WITHOUT_MEANING = frozenset({"propertyOrdering", "nullable"})


def to_json_schema(schema: Any) -> Any:
    """Translate an OpenAPI schema, in which Google's clients declare functions; other values are unchanged."""
    if not isinstance(schema, dict):
        return schema
    translated: dict[str, Any] = {}
    for spelling, value in schema.items():
        if (name := _camel(spelling)) not in _WITHOUT_MEANING:
            translated[name] = _translate(name, value)
    kind = translated.get("type")
    if schema.get("nullable") is True and isinstance(kind, str):
        translated["type"] = [kind, "null"]
    return translated


def _translate(name: str, value: Any) -> Any:
    if name == "type" and isinstance(value, str):
        return value.lower() if value in _TYPES else value
    if name in _COUNTS and isinstance(value, str) and value.isdecimal() and len(value) <= 19:
        return int(value)
    if name in _OF_SCHEMAS and isinstance(value, Mapping):
        return {key: to_json_schema(inner) for key, inner in value.items()}
    if name in _LISTS and isinstance(value, list):
        return [to_json_schema(inner) for inner in value]
    return to_json_schema(value) if name in _SINGLE else value


_MEDIA = {"inlineData": "an image or a sound", "fileData": "a file"}
_RESULTS = ("output", "result", "content", "error")
"""Names under which clients put the text of a function's response."""


def camel_case(fields: Fields) -> Fields:
    """Spell names as Google's API writes them; it accepts underscores too."""
    if not any("_" in name for name in fields.values):
        return fields
    return Fields({_camel(name): value for name, value in fields.values.items()}, fields.path)


def _camel(name: str) -> str:
    first, *rest = name.lstrip("_").split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


class _OpenCalls:
    """Calls of one answer that are not answered yet; finding one takes no longer among many."""

    def __init__(self, calls: Sequence[ClientToolCall] = ()) -> None:
        self._calls = calls
        self._answered: set[int] = set()
        self._places: dict[tuple[str | None, str | None], deque[int]] = defaultdict(deque)
        """By id and name, either of which may be None for any."""
        for place, call in enumerate(calls):
            for key in product({call.id, None}, (call.name, None)):
                self._places[key].append(place)

    def take(self, call_id: str | None, name: str) -> ClientToolCall | None:
        """Return the first call with this id, or with any for None; prefer one with this name."""
        for key in ((call_id, name), (call_id, None)):
            places = self._places.get(key, deque())
            while places:
                place = places.popleft()
                if place not in self._answered:
                    self._answered.add(place)
                    return self._calls[place]
        return None


def _ends(answer: FoldedAnswer, content: Fields) -> bool:
    """Return whether a content of the model is signed as part of another answer."""
    signatures = (part.text("thoughtSignature") for part in _parts(content))
    keys = {read_signature(signature)[0] for signature in signatures if signature}
    return answer.turn_key is not None and bool(keys - {answer.turn_key})


class ContentReader:
    def __init__(self, notes: Sorted) -> None:
        self._notes = notes
        self._open_calls = _OpenCalls()
        """From the last answer, for responses without an id."""

    def read(self, fields: Fields) -> Iterator[ClientMessage]:
        """Make each response of a function a message of its own, and one of the contents of an answer.

        Google's client keeps each chunk of a stream as a content.
        """
        answer: FoldedAnswer | None = None
        for content in fields.objects("contents"):
            role = content.text("role") or "user"
            if role not in ("model", "user", "function"):
                invalid(content.at("role"), "must be user or model")
            if answer and (role != "model" or _ends(answer, content)):
                yield self._model(answer)
                answer = None
            if role == "model":
                answer = answer or FoldedAnswer()
                self._fold(content, answer)
            else:
                yield from user_messages(map(self._user_part, _parts(content)))
        if answer:
            yield self._model(answer)

    def system(self, fields: Fields) -> str:
        value = fields.values.get("systemInstruction")
        if value is None or isinstance(value, str):
            return value or ""
        content = as_fields(value, "systemInstruction")
        texts = (self._text(part) for part in _parts(content))
        return BETWEEN_PARTS.join(text for text in texts if text is not None)

    def _fold(self, content: Fields, answer: FoldedAnswer) -> None:
        for part in _parts(content):
            signed_call = None
            if signature := part.text("thoughtSignature"):
                answer.turn_key, signed_call = read_signature(signature)
            if call := part.object("functionCall"):
                answer.calls.append(_call(call, signed_call))
            elif (text := self._text(part)) is not None:
                (answer.thoughts if part.boolean("thought") else answer.texts).append(text)

    def _model(self, answer: FoldedAnswer) -> ClientMessage:
        self._open_calls = _OpenCalls(answer.calls)
        return answer.message()

    def _user_part(self, part: Fields) -> str | ClientMessage | None:
        response = part.object("functionResponse")
        return self._response(response) if response else self._text(part)

    def _response(self, response: Fields) -> ClientMessage:
        name = response.required_text("name")
        if any(_MEDIA.keys() & camel_case(part).values.keys() for part in response.objects("parts")):
            unsupported(response.at("parts"), "not only text")
        call_id = self._answered(response.text("id") or None, name)
        return ClientMessage("tool", _result(response.values.get("response")), call_id=call_id, tool_name=name)

    def _answered(self, call_id: str | None, name: str) -> str | None:
        """Return the id that a response names, else that of the first open call."""
        call = self._open_calls.take(call_id, name)
        return call_id or (call.id if call else None)

    def _text(self, part: Fields) -> str | None:
        if (text := part.text("text")) is not None:
            return text
        for name in part.values:
            if name in _MEDIA:
                unsupported(part.path, _MEDIA[name])
            if name not in ("thought", "thoughtSignature"):
                self._notes.ignore(f"contents[].parts[].{name}")
        return None


def _parts(content: Fields) -> Iterator[Fields]:
    for part in content.objects("parts"):
        yield camel_case(part)


def _call(call: Fields, signed_id: str | None) -> ClientToolCall:
    arguments = call.object("args")
    text = dump_json(arguments.values if arguments else {})
    return ClientToolCall(call.text("id") or signed_id, call.required_text("name"), text)


def _result(response: Any) -> str:
    """Write an object that holds more than one text as JSON."""
    if isinstance(response, dict):
        for name in _RESULTS:
            if isinstance(text := response.get(name), str) and not response.keys() - {name, "name"}:
                return text
    return "" if response is None else dump_json(response)
