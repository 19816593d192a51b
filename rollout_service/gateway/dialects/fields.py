"""Reading of request bodies, field by field, with the path of whatever is wrong, and the treatment of each parameter.

Any bytes give a value or an `InvalidFieldError`, `MalformedBodyError` or `TooLargeError`. Nesting and the number of
values are bounded. Texts can be encoded: half a surrogate pair, which JavaScript clients send when they cut a text,
becomes the replacement character. Every parameter is honored, recorded, named in `ignored`, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Never

import orjson
from pydantic import JsonValue

from rollout_service.base.errors import InvalidFieldError, MalformedBodyError, TooLargeError
from rollout_service.base.strict_json import MAX_DEPTH, has_more, measure_depth, without_half_pairs
from rollout_service.gateway.contract import ClientToolCall
from rollout_service.gateway.errors import RefusedParameterError, UnsupportedContentError
from rollout_service.tokens import ToolSpec, tool_spec

MAX_VALUES = 500_000
"""The most values of a document. They take up to 200 bytes each, where the document has three: `{},`."""


def parse_json(content: bytes | str) -> JsonValue:
    """Return the value of a JSON document.

    Raises:
        ValueError: It is not JSON, is nested too deep, or has too many values.
    """
    document = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
    if has_too_many_values(document):
        raise ValueError(f"more than {MAX_VALUES} values")
    try:
        value: JsonValue = orjson.loads(document)
    except orjson.JSONDecodeError:
        value = orjson.loads(without_half_pairs(document))
    brackets = document.count(b"{") + document.count(b"[")
    if brackets > MAX_DEPTH and measure_depth(value) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return value


def has_too_many_values(document: bytes) -> bool:
    """Count values by the commas and brackets of a JSON document."""
    return has_more(document, b",{[", MAX_VALUES)


def dump_json(value: object) -> str:
    return orjson.dumps(value).decode()


def invalid(path: str, message: str) -> Never:
    raise InvalidFieldError.at(path, message)


@dataclass(slots=True)
class Fields:
    """An object of a body. A field that is null counts as missing."""

    values: dict[str, Any]
    path: str = ""

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is None or type(value) is str:
            return value
        return invalid(self.at(name), f"must be a string, not {kind(value)}")

    def required_text(self, name: str) -> str:
        """Refuse a text that is missing or empty."""
        return self.text(name) or invalid(self.at(name), "is required, and must be a string that is not empty")

    def boolean(self, name: str) -> bool | None:
        value = self.values.get(name)
        if value is None or type(value) is bool:
            return value
        return invalid(self.at(name), f"must be true or false, not {kind(value)}")

    def integer(self, name: str) -> int | None:
        """Refuse numbers below 1."""
        value = self.values.get(name)
        if type(value) is float and value.is_integer():
            value = int(value)
        if value is None or (type(value) is int and value >= 1):
            return value
        return invalid(self.at(name), "must be an integer of at least 1")

    def object(self, name: str) -> Fields | None:
        value = self.values.get(name)
        return None if value is None else as_fields(value, self.at(name))

    def items(self, name: str) -> list[Any]:
        value = self.values.get(name)
        if value is None:
            return []
        if type(value) is list:
            return value
        return invalid(self.at(name), f"must be a list, not {kind(value)}")

    def objects(self, name: str) -> Iterator[Fields]:
        if not (items := self.items(name)):
            return
        path = self.at(name)
        for index, item in enumerate(items):
            yield Fields(item, f"{path}.{index}") if type(item) is dict else as_fields(item, f"{path}.{index}")

    def texts(self, name: str) -> tuple[str, ...]:
        """Read a list, or the one text that stands for it."""
        value = self.values.get(name)
        if type(value) is str:
            return (value,)
        items = self.items(name)
        for index, item in enumerate(items):
            if type(item) is not str:
                invalid(f"{self.at(name)}.{index}", f"must be a string, not {kind(item)}")
        return tuple(items)


def as_fields(value: JsonValue, path: str) -> Fields:
    if type(value) is dict:
        return Fields(value, path)
    return invalid(path, f"must be an object, not {kind(value)}")


def read_body(body: bytes) -> Fields:
    """Return the fields of a request's body.

    Raises:
        MalformedBodyError: The body is not JSON, or is nested too deep.
        TooLargeError: The body has too many values.
        InvalidFieldError: The body is not an object.
    """
    if has_too_many_values(body):
        raise TooLargeError(f"the body has more than {MAX_VALUES} values", hint="Shorten its lists.")
    try:
        value = parse_json(body)
    except ValueError as error:
        raise MalformedBodyError(f"the body is not JSON that can be read: {error}") from error
    return as_fields(value, "body") if type(value) is not dict else Fields(value)


def kind(value: JsonValue) -> str:
    kinds: dict[type, str] = {str: "a string", bool: "a boolean", list: "a list", dict: "an object"}
    return "null" if value is None else kinds.get(type(value), "a number")


def parse_object(text: str) -> dict[str, Any] | None:
    """Return None if the text does not hold an object."""
    try:
        value = parse_json(text) if text.strip() else {}
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


Part = Callable[[Fields], str | None]
"""None for a part without text."""


def join_content(message: Fields, name: str, part: Part, separator: str) -> str:
    value = message.values.get(name)
    if value is None or type(value) is str:
        return value or ""
    texts = [text for block in message.objects(name) if (text := part(block)) is not None]
    return separator.join(texts)


BETWEEN_PARTS = "\n\n"
"""Separates the parts of a message, other than an assistant's."""


def unsupported(path: str, what: str) -> Never:
    """Refuse content that is not text."""
    raise UnsupportedContentError.at(path, f"the model reads text only, and this is {what}", hint="Leave it out.")


def custom_tool(name: str, description: str | None, form: Mapping[str, Any] | None) -> ToolSpec:
    """Make a function for a tool whose input is one text; the description has its grammar."""
    lines = [description] if description else []
    if form and form.get("type") == "grammar":
        lines.append(f"The input follows this {form.get('syntax', '')} grammar:\n{form.get('definition', '')}")
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return tool_spec(name, BETWEEN_PARTS.join(lines), parameters)


def custom_call(call_id: str | None, name: str, text: str) -> ClientToolCall:
    """Make the call of a function that stands for a custom tool."""
    return ClientToolCall(call_id, name, dump_json({"input": text}))


def custom_input(arguments: str) -> str:
    """Return malformed arguments as they are."""
    fields = parse_object(arguments)
    text = None if fields is None else fields.get("input")
    return text if isinstance(text, str) else arguments


def describe_tools(tools: list[ToolSpec]) -> str:
    """Write tools as text, for a message that makes them known."""
    return "\n".join(f"<tool>{dump_json(tool['function'])}</tool>" for tool in tools)


SCHEMA = "such a turn is not trained on; with tools, the model reads the schema and need not follow it"
FORCES_NOTHING = "the model stays free: tokens that are forced cannot be trained on"
_MAX_NAMES, _MAX_NAME = 64, 80
"""The ignored parameters that are named, and the characters of each name that are kept."""
_MAX_RECORDED = 8_192
"""Bytes of a recorded value, since every turn keeps it; a larger one is ignored, and named."""


class Treatment(StrEnum):
    HONORED = "honored"
    """The answer is as the client asked."""
    RECORDED = "recorded"
    """Sampling is the run's; the client's value is counted, and some are obeyed by a service that is set to."""
    IGNORED = "ignored"
    """It has no effect, and is counted."""
    REFUSED = "refused"
    """A request that sets it is answered with an error."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A row of a dialect's table; a parameter without one is ignored."""

    path: str
    """Names of objects around it and its own, divided by dots."""
    treatment: Treatment
    note: str = ""
    recorded_as: str = ""
    """Its name in `ModelCall.requested`, where dialects differ; else its path."""


def without_notes(treatment: Treatment, paths: str) -> tuple[Parameter, ...]:
    """Make the rows of parameters that need no note; `paths` are separated by spaces."""
    return tuple(Parameter(path, treatment) for path in paths.split())


@dataclass(frozen=True)
class ParameterTable:
    rows: tuple[Parameter, ...]
    by_path: Mapping[str, Parameter] = field(init=False)
    groups: frozenset[str] = field(init=False)
    """Paths of objects whose fields have rows of their own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_path", {row.path: row for row in self.rows})
        groups = {row.path.rpartition(".")[0] for row in self.rows if "." in row.path}
        object.__setattr__(self, "groups", frozenset(groups))


@dataclass
class Sorted:
    """The parameters of a request that have no effect on the answer."""

    requested: dict[str, JsonValue] = field(default_factory=dict)
    ignored: dict[str, None] = field(default_factory=dict)
    """An ordered set."""

    def ignore(self, path: str) -> None:
        if len(self.ignored) < _MAX_NAMES:
            self.ignored[path[:_MAX_NAME]] = None


def sort_parameters(body: Fields, table: ParameterTable) -> Sorted:
    """Sort the parameters of a request by the table.

    Raises:
        RefusedParameterError: The request sets a parameter that is refused.
        InvalidFieldError: A parameter that holds others is no object.
    """
    result = Sorted()
    _sort(body, table, "", result)
    return result


def _sort(fields: Fields, table: ParameterTable, prefix: str, result: Sorted) -> None:
    for name, value in fields.values.items():
        path = prefix + name
        if value is None:
            continue
        if path in table.groups:
            _sort(as_fields(value, path), table, f"{path}.", result)
            continue
        row = table.by_path.get(path)
        if row is None or row.treatment is Treatment.IGNORED:
            result.ignore(path)
        elif row.treatment is Treatment.RECORDED:
            if isinstance(value, str | list | dict) and len(dump_json(value)) > _MAX_RECORDED:
                result.ignore(path)
            else:
                result.requested[row.recorded_as or path] = value
        elif row.treatment is Treatment.REFUSED and _asks(value):
            message = f"is not supported: {row.note}" if row.note else "is not supported"
            raise RefusedParameterError.at(path, message)


def _asks(value: Any) -> bool:
    """Return false for `false`, 0, and an empty text, list or object."""
    return value not in (0, "", [], {})
