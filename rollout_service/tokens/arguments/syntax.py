"""How chat formats write the arguments of a call, as a table; those that the library reads exactly are not in it. Pure.

Guarantee: a value that quotes the format's own markup is read as the format would have written it. A close counts only
where the format goes on: where another part begins, or the end follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Tag:
    """A part of a call that is written as text: an opening that holds a name, a content, and a close."""

    opening: re.Pattern[str]
    close: str
    proper_close: re.Pattern[str]

    @classmethod
    def of(cls, begins: str, rest: str, close: str, end: str = "") -> Tag:
        """Make a tag that begins with a text, and goes on with a pattern whose group is the name.

        `end` is a pattern of what may stand between the last close and the end.
        """
        begin = re.escape(begins)
        return cls(
            re.compile(begin + rest, re.DOTALL),
            close,
            re.compile(rf"{re.escape(close)}(?=\s*(?:{begin}|{end}\Z))"),
        )

    def read(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the name and the content of each part."""
        closes = (match.start() for match in self.proper_close.finditer(text))
        close: int | None = -1
        at = 0
        while opening := self.opening.search(text, at):
            while close is not None and close < opening.end():
                close = next(closes, None)
            # No reason to drop a value that was closed: a policy may write more after its last close.
            end = text.find(self.close, opening.end()) if close is None else close
            if end < 0:
                return
            yield opening[1], text[opening.end() : end]
            at = end + len(self.close)


@dataclass(frozen=True, slots=True)
class MarkerTokens:
    """The control tokens around an argument's name and its value; text that looks like one is text."""

    texts: tuple[str, str, str, str]
    """The tokens at the begin and the end of the name, and of the value."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a chat format writes arguments."""

    argument: Tag | MarkerTokens
    call: Tag | None = None
    """The markup around each call, where one block holds several."""
    wrap: str = ""
    """The text that the format itself writes before and after a value."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Words that the format writes for values which are not JSON in it."""


_XML = CallSyntax(Tag.of("<parameter=", r"([^>]+)>", "</parameter>", r"(?:</function>\s*)?"), wrap="\n")
_XML_OF_PYTHON = replace(_XML, constants={"True": True, "False": False, "None": None})
"""That of templates which write every value but lists and objects by Python's `str`."""
_MINIMAX = CallSyntax(
    Tag.of('<parameter name="', r'([^"]+)">', "</parameter>"),
    call=Tag.of('<invoke name="', r'([^"]+)">', "</invoke>"),
)
_LAGUNA = CallSyntax(Tag.of("<arg_key>", r"(.*?)</arg_key>\s*<arg_value>", "</arg_value>"))
_GLM = CallSyntax(MarkerTokens(("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")))
_HY3 = CallSyntax(
    MarkerTokens(
        (
            "<arg_key:opensource>",
            "</arg_key:opensource>",
            "<arg_value:opensource>",
            "</arg_value:opensource>",
        )
    )
)

SYNTAX = {
    **dict.fromkeys(("qwen3.6", "qwen3.8"), _XML),
    **dict.fromkeys(
        ("qwen3.5", "prime-qwen3", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), _XML_OF_PYTHON
    ),
    "minimax-m2": _MINIMAX,
    **dict.fromkeys(("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"), _LAGUNA),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), _GLM),
    "hy3": _HY3,
}
"""By the name of the chat format."""

SYNTAX_BY_PARSER = {"qwen3.5": _XML_OF_PYTHON, "glm": _GLM}
"""By `tool_parser`, for a format that is known only by its template."""
