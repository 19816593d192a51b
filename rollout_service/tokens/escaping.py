"""Escapes the texts of messages to keep control tokens out of them.

A chat format joins its control tokens with the texts of messages, and most do so before the text is tokenized: a tool's
output that contains `<|im_end|>` would end its own turn. The escaper puts a mark inside everything that looks like a
control token; the tokenizer cuts the text at the marks, encodes the pieces one by one and drops the marks. The ids
still decode to the same text.

Guarantees: a tokenizer finds no control token inside an escaped text, or across its end, in any chat format whose texts
go through this package's tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

MARK = "\ufdd0"
"""A code point that Unicode reserves for internal use; it is not a character."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class SpecialTokenEscaper:
    """Finds the control tokens of one tokenizer in texts, and marks them."""

    def __init__(self, tokens: Iterable[str], normalize: Callable[[str], str] | None = None) -> None:
        """`normalize` is the normalization that the tokenizer applies to a text before it looks for tokens."""
        # Runs of blanks are added tokens in some vocabularies; nothing can be forged with them.
        self._tokens = frozenset(token for token in tokens if token.strip())
        self._beginnings = frozenset(token[:n] for token in self._tokens for n in range(1, len(token)))
        self._lengths: dict[str, set[int]] = {}  # by the first two characters, which few texts hold
        for token in self._tokens:
            self._lengths.setdefault(token[:2], set()).add(len(token))
        # Searching for a set of characters is fast; searching for "anything, if this follows" is not.
        starts = sorted(self._lengths)
        self._candidates = re.compile("|".join(f"{re.escape(s[0])}(?={re.escape(s[1:])})" for s in starts))
        self._longest = max(map(len, self._tokens), default=0)
        self._firsts = frozenset(token[:1] for token in self._tokens)
        self._any_first = re.compile("|".join(map(re.escape, sorted(self._firsts))) or "(?!)")
        self._normalize = normalize

    def escape(self, text: str) -> str:
        """Return the text with a mark inside each control token, and at its end if one could form there."""
        text = text.replace(MARK, _REPLACEMENT)
        if self._normalize is None and self._any_first.search(text) is None:
            return text  # the usual case
        starts = self._starts(text)
        if self._normalize is not None:
            normal = self._normalize(text)
            found = self._starts(normal)
            if len(found) != len(starts):  # normalizing made a token, for example from full-width characters
                text, starts = normal, found
        cuts = [0, *(start + 1 for start in starts), len(text)]
        escaped = MARK.join(text[begin:end] for begin, end in pairwise(cuts))
        return escaped + MARK if self._may_go_on(text) else escaped

    def escape_all(self, value: Any) -> Any:
        """Escape every text inside a JSON value."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, list):
            return [self.escape_all(item) for item in value]
        if isinstance(value, dict):
            return {self.escape_all(key): self.escape_all(item) for key, item in value.items()}
        return value

    def _starts(self, text: str) -> list[int]:
        if not self._tokens:
            return []
        return [
            start
            for start in (match.start() for match in self._candidates.finditer(text))
            if self._is_token(text, start)
        ]

    def _is_token(self, text: str, start: int) -> bool:
        found = (self._lengths.get(text[start : start + width], set()) for width in (1, 2))
        return any(text[start : start + length] in self._tokens for lengths in found for length in lengths)

    def _may_go_on(self, text: str) -> bool:
        end = text.rstrip()[-self._longest :]  # many formats trim texts
        if self._firsts.isdisjoint(end):
            return False
        return any(end[start:] in self._beginnings for start in range(len(end)))


def pieces(text: str) -> list[str]:
    """Return the parts of a text between its marks."""
    return [piece for piece in text.split(MARK) if piece]
