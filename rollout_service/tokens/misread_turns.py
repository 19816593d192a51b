"""Turns whose calls the `renderers` library (up to 0.1.13.dev17) loses or makes up, though their format is clear.

Only for parsing: a trajectory holds what was sampled. The calls of malformed turns are told, and never run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_service.tokens.tokenizer import ChatTokenizer

_SECTIONS = {
    **dict.fromkeys(("kimi-k2", "kimi-k2.5"), "<|tool_calls_section_begin|>"),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), "<\uff5ctool\u2581calls\u2581begin\uff5c>"),
}
"""The beginning of the only section of calls that a turn may have; the library reads none after the first."""
_NO_FUNCTION = re.compile(r"\A((?>.*?assistant).*?\bto=)(?!functions\.|assistant\b)", re.DOTALL)
"""Looks at each character once, whatever a policy writes into a header."""
_PYTHON_TAG = "<|python_tag|>"
_BARE_CALL = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"')


class MisreadTurns:
    def __init__(self, tokenizer: ChatTokenizer, format_name: str) -> None:
        self._tokenizer = tokenizer
        self._name = format_name

    def framed(self, ids: list[int]) -> list[int]:
        """Return the turn with the parts of its frame that the policy left out, and the library needs."""
        if self._name == "inkling":
            return self._end_messages(ids, self._token("<|message_model|>"), self._token("<|end_message|>"))
        if self._name == "gpt-oss":
            return self._name_functions(ids, self._token("<|start|>"), self._token("<|message|>"))
        return ids

    def read(self, parsed: Any, ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Any]]:
        """Return the text and the calls of a turn that the library has parsed."""
        calls = list(parsed.tool_calls)
        if self._name == "llama-3":
            return read_bare_call(calls[0].raw if calls else parsed.content, tools)
        if calls and self._name in _SECTIONS:
            calls += self._later_section(calls[-1].token_span[1], ids)
        return parsed.content, calls

    def _token(self, text: str) -> int:
        return self._tokenizer.encode(text)[0]

    def _end_messages(self, ids: Sequence[int], begin: int, end: int) -> list[int]:
        """End each message of Inkling where the next one begins."""
        framed: list[int] = []
        for token in ids:
            if token == begin and framed and framed[-1] != end:
                framed.append(end)
            framed.append(token)
        return framed

    def _name_functions(self, ids: list[int], start: int, message: int) -> list[int]:
        """Write the namespace of Harmony's calls that lack it; the library takes their arguments for an answer."""
        framed: list[int] = []
        at = 0
        while True:
            try:
                begin = ids.index(start, at) + 1
                end = ids.index(message, begin)
            except ValueError:
                return framed + ids[at:]
            header = self._tokenizer.decode(ids[begin:end])
            named = _NO_FUNCTION.sub(r"\1functions.", header, count=1)
            framed += [*ids[at:begin], *(ids[begin:end] if named == header else self._tokenizer.encode(named))]
            at = end

    def _later_section(self, end: int, ids: Sequence[int]) -> list[Any]:
        from renderers.base import ParsedToolCall, ToolCallParseStatus

        rest = list(ids[end:])
        begin = self._token(_SECTIONS[self._name])
        if begin not in rest:
            return []
        raw = self._tokenizer.decode(rest[rest.index(begin) :])
        return [ParsedToolCall(raw=raw, status=ToolCallParseStatus.MALFORMED_STRUCTURE)]


def read_bare_call(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Any]]:
    """Read a turn of Llama 3, whose calls have no marks: it is one JSON object, or this is after `<|python_tag|>`.

    An answer in JSON is no call. What begins like a call of a tool and is not one object is a malformed call.
    """
    from renderers.base import ParsedToolCall, ToolCallParseStatus

    before, tag, after = text.partition(_PYTHON_TAG)
    content, body = (before.strip(), after.strip()) if tag else ("", text.strip())
    names = _names(tools)
    begin = _BARE_CALL.match(body)
    try:
        found = json.loads(body) if tools and body.startswith("{") else {}
    except (ValueError, RecursionError):
        if begin is None or begin[1] not in names:
            return text, []
        return content, [ParsedToolCall(raw=body, name=begin[1], status=ToolCallParseStatus.INVALID_JSON)]
    name = found.get("name")
    if not isinstance(name, str) or not (name in names or {"parameters", "arguments"} & found.keys()):
        return text, []
    arguments = found.get("parameters", found.get("arguments", {}))
    return content, [ParsedToolCall(raw=body, name=name, arguments=arguments)]


def read_fenced_calls_in_full() -> None:
    """Give formats known only by their template the library's other reader of DeepSeek's calls.

    The one that they have takes only the last part of a name such as `get-weather`, ends the arguments at the first
    fence in them, and makes them empty if there is none.
    """
    from renderers.parsers import TOOL_PARSERS, DeepSeekV3ToolParser
    from renderers.parsing import _parse_deepseek_tool_calls

    class FencedToolParser:
        def __init__(self, tokenizer: ChatTokenizer) -> None:
            self._tokenizer = tokenizer
            self._library = DeepSeekV3ToolParser(tokenizer)

        def extract(self, ids: list[int]) -> tuple[list[int], list[Any]]:
            known = self._library
            content, calls = known.extract(ids)
            if calls:
                marks = (known._tcs_begin, known._tcs_end, known._tc_begin, known._tc_end, known._sep)
                calls = _parse_deepseek_tool_calls(self._tokenizer, ids, *marks, section_offset=0)
            return content, calls

    TOOL_PARSERS["deepseek-v3"] = FencedToolParser


def _names(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    return {str(tool.get("function", tool).get("name")) for tool in tools}
