"""Commands as one argument of a function, in MessagePack, since a function takes only some thousand arguments."""

from __future__ import annotations

import struct
from collections.abc import Sequence

Word = str | bytes | int | float
Command = Sequence[Word]

_ARRAY = struct.Struct(">BI")
_ARRAY_32, _TEXT_32 = 0xDD, 0xDB


def pack(commands: Sequence[Command]) -> bytes:
    """Return commands as an array of arrays of texts."""
    parts = [_ARRAY.pack(_ARRAY_32, len(commands))]
    for command in commands:
        parts.append(_ARRAY.pack(_ARRAY_32, len(command)))
        for word in command:
            data = word if isinstance(word, bytes) else _text(word).encode()
            parts += (_ARRAY.pack(_TEXT_32, len(data)), data)
    return b"".join(parts)


def _text(word: str | float) -> str:
    return repr(word) if isinstance(word, float) else str(word)
