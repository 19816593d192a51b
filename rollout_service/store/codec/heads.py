"""The heads of kept groups: everything a batch contains of a group except tokens, made once, when the group is closed.

Guarantees: except for the tokens, the JSON of a head equals that of `RunStore.group`, byte for byte. A head that was
written under another definition of the wire models is not read but made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import zstandard

from api_schemas.runs import Group
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.codec.record import Row
from rollout_service.store.columns import Columns
from rollout_service.store.runs_contract import GroupHead

_LEVEL = 1


def group_json(group: Group) -> bytes:
    """Return a group as JSON, made sample by sample so that other threads can run in between."""
    samples = b",".join(sample.model_dump_json().encode() for sample in group.samples)
    rest = group.model_dump_json(exclude={"samples"}).encode()
    return b'{"samples":[' + samples + b"]," + rest[1:]


def make(row: Row, group: Group, columns: Sequence[Sequence[Columns]]) -> GroupHead:
    """Return the head of a group without tokens, from its row and the columns of its samples' segments."""
    return _head(row, group_json(group), [[len(segment) for segment in sample] for sample in columns])


def encode(head: GroupHead) -> dict[str, Any]:
    """Return the stored part of a head; the row of its group has the rest."""
    data = zstandard.ZstdCompressor(level=_LEVEL).compress(head.json)
    return {"form": _form(), "tokens": json.dumps(head.tokens), "json": data}


def decode(row: Row) -> GroupHead | None:
    """Return the head from a group's row joined with it; None if it is of other wire models, or there is none."""
    if row["form"] != _form():
        return None
    return _head(row, zstandard.ZstdDecompressor().decompress(row["json"]), json.loads(row["tokens"]))


def _head(row: Row, text: bytes, tokens: Sequence[Sequence[int]]) -> GroupHead:
    summary = json.loads(row["summary"])
    return GroupHead(
        number=row["number"],
        json=text,
        samples=run_codec.decode_samples(row["samples"]),
        tokens=tokens,
        oldest_version=summary["oldest_version"],
        newest_version=summary["newest_version"],
    )


@cache
def _form() -> bytes:
    """Return a digest of the definition of the wire models in a group."""
    return hashlib.sha256(json.dumps(Group.model_json_schema(), sort_keys=True).encode()).digest()
