"""The record of a rollout's tokens: its own trajectory's, followed by those of its sub-agents if they have any.

The bytes of its own trajectory are the same whether others follow or not, and without others they are the whole record.

Layout with others: the byte 2, then the length (uint64, little-endian) and the bytes of each trajectory, its own first.
The length 0 stands for a sub-agent without a trajectory.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import BaseModel

from rollout_service.base.errors import ConflictError

_JOINED = b"\x02"
_LENGTH = struct.Struct("<Q")


def join(own: bytes, others: Sequence[bytes]) -> bytes:
    """Return the record of encoded trajectories; empty bytes stand for a missing one."""
    if not any(others):
        return own
    parts = [_JOINED]
    for data in (own, *others):
        parts += (_LENGTH.pack(len(data)), data)
    return b"".join(parts)


def own_part(record: bytes) -> bytes:
    """
    Raises:
        ValueError: The record was cut off.
    """
    return _parts(record)[0] if record.startswith(_JOINED) else record


def other_parts(record: bytes) -> list[bytes] | None:
    """Return empty bytes for sub-agents without a trajectory, and None if the record has no sub-agents."""
    return _parts(record)[1:] if record.startswith(_JOINED) else None


def _parts(record: bytes) -> list[bytes]:
    parts = []
    at = len(_JOINED)
    while at < len(record):
        (length,) = _LENGTH.unpack_from(record, at)
        at += _LENGTH.size
        parts.append(record[at : at + length])
        at += length
    if at > len(record) or not parts:
        raise ValueError("the record was cut off")
    return parts


def fingerprint(request: BaseModel) -> bytes:
    """Return the SHA-256 of the request's canonical JSON: sorted keys, defaults filled in, no white space.

    It tells a repeated request from another one with the same id. The caller's trace does not count, since a client
    that repeats a request may do so within another span.
    """
    canonical = json.dumps(request.model_dump(mode="json", exclude={"trace"}), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()


def id_taken(noun: str, name: str) -> ConflictError:
    return ConflictError(
        f"the {noun} {name} already exists with a different request",
        hint=f"Choose another {noun}_id, or send exactly the same request again.",
    )


class Row(Protocol):
    def __getitem__(self, name: str, /) -> Any: ...
