"""The marks of the turns of a stored part of a session, as a compressed part of the rollout's result.

Guarantee: reading returns what was written, to the last bit.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import zstandard
from pydantic import TypeAdapter

from api_schemas.rollouts.sessions import TurnMark

_MARKS = TypeAdapter(list[TurnMark])
_LEVEL = 1


def encode(marks: Sequence[TurnMark]) -> str:
    """Return marks as text."""
    text = _MARKS.dump_json(list(marks))
    return base64.b64encode(zstandard.ZstdCompressor(level=_LEVEL).compress(text)).decode()


def decode(text: str) -> list[TurnMark]:
    """Return the marks that `encode` wrote."""
    return _MARKS.validate_json(zstandard.ZstdDecompressor().decompress(base64.b64decode(text)))
