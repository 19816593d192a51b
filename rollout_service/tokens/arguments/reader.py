"""Puts the arguments of a turn's calls, as they were sampled, in the place of those that the library found.

Guarantees:
- No call is added, so no text of a value becomes one.
- A call is well-formed only if the library finds its structure sound, and each value is JSON or may be a string.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from rollout_service.tokens.arguments.syntax import SYNTAX, SYNTAX_BY_PARSER, CallSyntax, MarkerTokens
from rollout_service.tokens.arguments.values import Types, read_value, types_of
from rollout_service.tokens.tokenizer import ChatTokenizer

_OK, _INVALID = "ok", "invalid_json"
"""The library's statuses of calls whose structure is sound."""


class ArgumentReader:
    """The reader of one chat format; it leaves the calls of formats that write JSON as they are."""

    def __init__(self, tokenizer: ChatTokenizer, format_name: str, tool_parser: str | None = None) -> None:
        """`tool_parser` says how calls are written if the format is known only by its template."""
        by_parser = format_name == "default"
        self._syntax = SYNTAX_BY_PARSER.get(tool_parser or "") if by_parser else SYNTAX.get(format_name)
        self._decode = tokenizer.decode
        self._marks: list[int] = []
        if self._syntax is not None and isinstance(self._syntax.argument, MarkerTokens):
            marks = [tokenizer.encode(text) for text in self._syntax.argument.texts]
            self._marks = [ids[0] for ids in marks if len(ids) == 1]
            if len(self._marks) < len(marks):
                self._syntax = None  # the library finds no argument without these tokens

    def read(self, calls: Sequence[Any], ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the library's calls with the arguments that stand in the ids of their turn."""
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
            return [_with_arguments(first, self._in_tokens(ids[start:end]), syntax, tools)]
        parts = [(first.name, first.raw)] if syntax.call is None else syntax.call.read(first.raw)
        return [
            _with_arguments(replace(first, name=name), syntax.argument.read(text), syntax, tools)
            for name, text in parts
        ]

    def _in_tokens(self, ids: Sequence[int]) -> Iterator[tuple[str, str]]:
        """Yield the names of arguments and the texts of their values."""
        at = 0
        while True:
            borders: list[int] = []
            for mark in self._marks:
                try:
                    at = ids.index(mark, at) + 1
                except ValueError:
                    return
                borders.append(at)
            key, key_end, value, value_end = borders
            yield self._decode(ids[key : key_end - 1]), self._decode(ids[value : value_end - 1])


def _with_arguments(
    call: Any, written: Iterable[tuple[str, str]], syntax: CallSyntax, tools: Sequence[Mapping[str, Any]]
) -> Any:
    schema = _parameters(tools, call.name)
    types: dict[str, Types | None] = {}
    arguments: dict[str, Any] = {}
    for name, content in written:
        key, text = name.strip(), content.removeprefix(syntax.wrap).removesuffix(syntax.wrap)
        if key not in types:
            types[key] = types_of(_parameter(schema, key), schema)
        try:
            arguments[key] = read_value(text, types[key], syntax.constants)
        except ValueError:
            return replace(call, arguments=None, status=_INVALID)
    return replace(call, arguments=arguments, status=_OK)


def _parameter(schema: Mapping[str, Any], key: str) -> Any:
    """Return the schema of one parameter, or None."""
    properties = schema.get("properties")
    others = schema.get("additionalProperties")
    return properties.get(key, others) if isinstance(properties, Mapping) else others


def _parameters(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Return the schema of a tool's parameters; empty if there is none."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            return schema if isinstance(schema, Mapping) else {}
    return {}
