"""The bytes of each token of a vocabulary, for showing tokens one by one.

A byte-level vocabulary cuts characters, so decoding ids one by one gives replacement characters. The bytes of tokens,
put together, are the text.

Guarantee: a vocabulary whose way of writing bytes is not known has no table; nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import tokenizers

BYTE_LEVEL, BYTE_FALLBACK = "ByteLevel", "ByteFallback"
_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of every id; immutable."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table

    @classmethod
    def of(cls, vocabulary: tokenizers.Tokenizer) -> TokenBytes | None:
        """Return the table of a vocabulary, or None if it is of no known kind. Takes 0.1 s for 150,000 tokens."""
        kind = repr(vocabulary.decoder)
        if BYTE_LEVEL in kind:
            read = _read_byte_level
        elif BYTE_FALLBACK in kind:
            read = _read_byte_fallback
        else:
            return None
        ids = vocabulary.get_vocab(True)
        table = [b""] * (max(ids.values(), default=-1) + 1)
        for token, number in ids.items():
            table[number] = read(token)
        for number, added in vocabulary.get_added_tokens_decoder().items():
            table[number] = added.content.encode()
        return cls(table)

    def __len__(self) -> int:
        return len(self._table)

    def of_ids(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each id; an id outside of the vocabulary has none."""
        table, size = self._table, len(self._table)
        return [table[number] if 0 <= number < size else b"" for number in ids]


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable bytes of Latin-1 stand for themselves; the others, in order, are the characters from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def _read_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # not of this alphabet, as in a token that was added by hand
        return token.encode()


def _read_byte_fallback(token: str) -> bytes:
    if byte := _BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE, " ").encode()
