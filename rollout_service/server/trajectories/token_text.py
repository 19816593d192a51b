"""The text of a range of tokens, and where each token ends in it.

Guarantee: the bytes of every token can be had back: those of `pieces` from there, all others from their part of the
text. So nothing is lost where a range, or a token, cuts a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

LONGEST_CHARACTER = 4


@dataclass(slots=True)
class TokenText:
    """A text with the ends of its tokens, in UTF-16 code units."""

    text: str = ""
    ends: list[int] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)
    """The positions of tokens that are no whole characters."""
    pieces: dict[int, str] = field(default_factory=dict)
    """The bytes of each of them, in hexadecimal."""


def join(tokens: Sequence[bytes]) -> TokenText:
    """Return the text of tokens, given by their bytes."""
    result = TokenText()
    parts: list[str] = []
    length, pending, partial = 0, b"", set[int]()
    for position, token in enumerate(tokens):
        held, data = pending, pending + token
        text, pending = _decode(data)
        if held or pending or "\ufffd" in text:
            partial.add(position)
        parts.append(text)
        length += _units(text)
        result.ends.append(length)
    if pending:  # the range ends within a character
        parts.append("\ufffd")
        result.ends[-1] += 1
    result.text = "".join(parts)
    result.partial = sorted(partial)
    result.pieces = {position: tokens[position].hex() for position in result.partial}
    return result


def _decode(data: bytes) -> tuple[str, bytes]:
    """Return the text of bytes, and the begun character at their end."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return data[: error.start].decode(), data[error.start :]
    cut = _begun_character(data)
    return data[: len(data) - cut].decode(errors="replace"), data[len(data) - cut :]


def _begun_character(data: bytes) -> int:
    """Return how many bytes at the end begin a character that needs more; 0 if there is none."""
    for size in range(1, min(LONGEST_CHARACTER, len(data) + 1)):
        try:
            data[-size:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return size
    return 0


def _units(text: str) -> int:
    if text.isascii() or max(text) <= "\uffff":
        return len(text)
    return len(text.encode("utf-16-le")) // 2
