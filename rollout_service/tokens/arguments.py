"""Arguments of tool calls that a chat format writes without quotes, exactly as they were sampled.

The `renderers` library strips the white space around such values, guesses their types, and ends a value at the first
text that looks like its end. This module reads them again. No call is added, so no text of a value becomes one; a call
is well-formed only if its structure is sound, and each value is JSON or may be a string. A value that quotes the
format's own markup is read as the format would have written it. An argument or a call that was begun and not ended is
never left out: its call is malformed.

It is needed for `renderers` up to at least 0.1.13.dev17: `tests/unit/tokens/test_tokens_arguments.py` fails once the
library reads a format exactly by itself. That format can then leave the table `SYNTAX`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from rollout_service.tokens.tokenizer import ChatTokenizer

_OK, _INVALID = "ok", "invalid_json"
"""The library's statuses of calls whose structure is sound."""
_BROKEN = "malformed_structure"


class ArgumentReader:
    """Leaves the calls of formats that write JSON as they are."""

    def __init__(self, tokenizer: ChatTokenizer, format_name: str, tool_parser: str | None = None) -> None:
        """`tool_parser` says how calls are written if the format is known only by its template."""
        by_parser = format_name == "default"
        self._syntax = SYNTAX_BY_PARSER.get(tool_parser or "") if by_parser else SYNTAX.get(format_name)
        self._decode = tokenizer.decode
        self._marks: list[int] = []
        self._reserved: frozenset[int] = frozenset()
        if self._syntax is not None and isinstance(self._syntax.argument, MarkerTokens):
            marks = [tokenizer.encode(text) for text in self._syntax.argument.texts]
            self._marks = [ids[0] for ids in marks if len(ids) == 1]
            self._reserved = frozenset([*self._marks, *tokenizer.encode(self._syntax.argument.call)])
            if len(self._marks) < len(marks):
                self._syntax = None  # the library finds no argument without these tokens

    def read(self, calls: Sequence[Any], ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the library's calls with the arguments that the ids have."""
        if self._syntax is None:
            return list(calls)
        found: list[Any] = []
        for _, block in groupby(calls, lambda call: call.token_span):
            found += self._read_block(self._syntax, list(block), ids, tools)
        return found

    def _read_block(
        self,
        syntax: CallSyntax,
        calls: list[Any],
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[Any]:
        first = calls[0]
        if first.status not in (_OK, _INVALID):
            return calls
        if isinstance(syntax.argument, MarkerTokens):
            start, end = first.token_span
            return [_with_arguments(first, self._in_tokens(ids[start + 1 : end]), syntax, tools)]
        if syntax.unended is not None and syntax.unended.search(first.raw):
            return [_broken(first)]
        parts: Iterable[Part] = [(first.name, first.raw)] if syntax.call is None else syntax.call.read(first.raw)
        return [
            _broken(first, name)
            if text is None
            else _with_arguments(replace(first, name=name), syntax.argument.read(text), syntax, tools)
            for name, text in parts
        ]

    def _in_tokens(self, ids: Sequence[int]) -> Iterator[Part]:
        borders: list[int] = []
        for i, token in enumerate(ids):
            if token not in self._reserved:
                continue
            if token == self._marks[len(borders)]:
                borders.append(i)
            elif len(borders) < 3:  # only a value may hold marks
                yield "", None
                return
            if len(borders) == 4:
                key, key_end, value, value_end = borders
                yield self._decode(ids[key + 1 : key_end]), self._decode(ids[value + 1 : value_end])
                borders = []


Part = tuple[str, str | None]
"""A name and a content, which is None if the part was begun and not ended."""


def _broken(call: Any, name: str | None = None) -> Any:
    return replace(call, name=name or call.name, arguments=None, status=_BROKEN)


def _with_arguments(call: Any, written: Iterable[Part], syntax: CallSyntax, tools: Sequence[Mapping[str, Any]]) -> Any:
    schema = _parameters(tools, call.name)
    types: dict[str, Types | None] = {}
    arguments: dict[str, Any] = {}
    held: set[str] = set()
    for name, content in written:
        if content is None:
            return _broken(call)
        if isinstance(syntax.argument, Tag):
            held.add(syntax.argument.begun_in(content))
        key, text = name.strip(), content.removeprefix(syntax.wrap).removesuffix(syntax.wrap)
        if key not in types:
            types[key] = types_of(_parameter(schema, key), schema)
        try:
            arguments[key] = read_value(text, types[key], syntax.constants)
        except ValueError:
            return replace(call, arguments=None, status=_INVALID)
    # A value may quote an argument, but hardly one that the tool takes and the call lacks.
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and not (held & properties.keys()) <= arguments.keys():
        return _broken(call)
    return replace(call, arguments=arguments, status=_OK)


def _parameter(schema: Mapping[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    others = schema.get("additionalProperties")
    return properties.get(key, others) if isinstance(properties, Mapping) else others


def _parameters(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            return schema if isinstance(schema, Mapping) else {}
    return {}


@dataclass(frozen=True, slots=True)
class Tag:
    """A part of a call that is written as text: an opening that holds a name, a content, and a close.

    A close counts only where the format goes on: where another part begins, or the end follows.
    """

    word: str
    """Begins each opening, and is nowhere else outside a content."""
    opening: re.Pattern[str]
    close: str
    proper_close: re.Pattern[str]

    @classmethod
    def of(cls, begins: str, rest: str, close: str, end: str = "") -> Tag:
        """Make a tag that begins with a text, and goes on with a pattern whose group is the name.

        `end` is a pattern of the text that may stand between the last close and the end.
        """
        begin = re.escape(begins)
        return cls(
            begins.rstrip('=> "').removesuffix(" name"),
            re.compile(begin + rest, re.DOTALL),
            close,
            re.compile(rf"{re.escape(close)}(?=\s*(?:{begin}|{end}\Z))"),
        )

    def read(self, text: str) -> Iterator[Part]:
        closes = (match.start() for match in self.proper_close.finditer(text))
        close: int | None = -1
        at = 0
        while (begin := text.find(self.word, at)) >= 0:
            opening = self.opening.match(text, begin)
            if opening is None:
                yield "", None
                return
            while close is not None and close < opening.end():
                close = next(closes, None)
            # No reason to drop a value that was closed: a policy may write more after its last close.
            end = text.find(self.close, opening.end()) if close is None else close
            if end < 0:
                yield opening[1], None
                return
            yield opening[1], text[opening.end() : end]
            at = end + len(self.close)

    def begun_in(self, content: str) -> str:
        """Return the name of the last part that begins in a content and does not end there, or nothing."""
        begin = content.rfind(self.word)
        opening = self.opening.match(content, begin) if begin >= 0 else None
        return "" if opening is None or self.close in content[opening.end() :] else opening[1].strip()


@dataclass(frozen=True, slots=True)
class MarkerTokens:
    """The control tokens around an argument's name and its value; text that looks like one is text."""

    texts: tuple[str, str, str, str]
    """Around the name, then around the value."""
    call: str
    """Begins a call."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a chat format writes arguments; those that the library reads exactly have none."""

    argument: Tag | MarkerTokens
    call: Tag | None = None
    """The markup around each call, where one block holds several."""
    unended: re.Pattern[str] | None = None
    """Text of a block in which a call begins before the last one has ended."""
    wrap: str = ""
    """Written by the format before and after a value."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Words for values that the format does not write as JSON."""


_XML = CallSyntax(
    Tag.of("<parameter=", r"([^>]+)>", "</parameter>", r"(?:</function>\s*)?"),
    unended=re.compile(r"</parameter>\s*(?:</function>\s*)?(?:<tool_call>\s*)?<function="),
    wrap="\n",
)
_XML_OF_PYTHON = replace(_XML, constants={"True": True, "False": False, "None": None})
"""For templates that write every value but lists and objects with Python's `str`."""
_MINIMAX = CallSyntax(
    Tag.of('<parameter name="', r'([^"]+)">', "</parameter>"),
    call=Tag.of('<invoke name="', r'([^"]+)">', "</invoke>"),
    unended=re.compile(r'</parameter>\s*<invoke name="'),
)
_LAGUNA = CallSyntax(
    Tag.of("<arg_key>", r"([^<]*)</arg_key>\s*<arg_value>", "</arg_value>"),
    unended=re.compile(r"</arg_value>\s*<tool_call>"),
)
_GLM, _HY3 = (
    CallSyntax(MarkerTokens((f"<{key}>", f"</{key}>", f"<{value}>", f"</{value}>"), call))
    for key, value, call in (
        ("arg_key", "arg_value", "<tool_call>"),
        ("arg_key:opensource", "arg_value:opensource", "<tool_call:opensource>"),
    )
)

SYNTAX = {
    **dict.fromkeys(("qwen3.6", "qwen3.8"), _XML),
    **dict.fromkeys(("qwen3.5", "prime-qwen3", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), _XML_OF_PYTHON),
    "minimax-m2": _MINIMAX,
    **dict.fromkeys(("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"), _LAGUNA),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), _GLM),
    "hy3": _HY3,
}
"""By the name of the chat format."""

SYNTAX_BY_PARSER = {"qwen3.5": _XML_OF_PYTHON, "glm": _GLM}
"""By `tool_parser`, for a format that is known only by its template."""


_TYPES = {
    bool: "boolean",
    type(None): "null",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
Types = Set[str]


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):  # as JSON has no infinity, it is not read from 1e999 or Infinity either
        raise ValueError(f"{number} is not a finite number")
    return value


_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def read_value(text: str, types: Types | None, constants: Mapping[str, Any]) -> Any:
    """Read a value that is written without quotes; `types` are those that the schema allows, None for any.

    Where the schema allows a string, a text stays as it is unless it is a value of another type that the schema allows
    too. A JSON string in quotes is never unquoted, since no format here writes one. `constants` are words that a format
    writes for values, such as `True`; they count where the schema names their type.

    Raises:
        ValueError: The text is not JSON, and the schema does not allow a string.
    """
    if types == {"string"}:
        return text
    word = text.strip()
    if types is not None and word in constants and _is_allowed(constants[word], types):
        return constants[word]
    takes_text = types is None or "string" in types
    try:
        value = _JSON.decode(word)
    except (ValueError, RecursionError) as error:
        if takes_text:
            return text
        raise ValueError("the value is not JSON") from error
    # A value of a wrong type is for the tool to refuse, which knows its whole schema.
    return text if takes_text and not _is_allowed(value, types) else value


def _is_allowed(value: Any, types: Types | None) -> bool:
    """Return whether it has one of these types, and is not a string."""
    if isinstance(value, str):
        return False
    name = _TYPES[type(value)]
    return types is None or name in types or (name == "integer" and "number" in types)


def types_of(schema: Any, root: Any) -> Types | None:
    """Return the allowed JSON types, or None if the schema does not say. `root` is where its references begin."""
    found: set[str] = set()
    references: set[str] = set()
    parts = [schema]
    while parts:
        part = parts.pop()
        if not isinstance(part, Mapping):
            return None
        if isinstance(reference := part.get("$ref"), str):
            if reference not in references:  # so that schemas that refer to themselves end
                references.add(reference)
                parts.append(_resolve(reference, root))
            continue
        branches = next((part[key] for key in ("anyOf", "oneOf", "allOf") if part.get(key)), None)
        named = _named_types(part)
        if named:
            found |= named
        elif isinstance(branches, list):
            parts += branches
        else:
            return None
    return found or None


def _named_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names, or those of the values that it lists."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return {_TYPES.get(type(value), "string") for value in listed} if isinstance(listed, list) else set()


def _resolve(reference: str, root: Any) -> Any:
    """Return the part that a reference such as `#/$defs/Color` names, or None."""
    head, *path = reference.split("/")
    found = root if head == "#" else None
    for step in path:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
