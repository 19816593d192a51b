"""The heads of kept groups: what a batch says of a group beside its tokens, made once, when the group is closed.

Guarantees: the JSON of a head is that of `RunStore.group`, byte for byte, but for the tokens. A head that was written
under another definition of the wire models is not read: it is made anew.
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
from rollout_service.store.codec.row import Row
from rollout_service.store.columns import Columns
from rollout_service.store.runs_contract import GroupHead

_LEVEL = 1


def group_json(group: Group) -> bytes:
    """Return a group as JSON, made sample by sample: other threads get their turn between two."""
    samples = b",".join(sample.model_dump_json().encode() for sample in group.samples)
    rest = group.model_dump_json(exclude={"samples"}).encode()
    return b'{"samples":[' + samples + b"]," + rest[1:]


def made(row: Row, group: Group, columns: Sequence[Sequence[Columns]]) -> GroupHead:
    """Return the head of a group without tokens, from its row and the columns of its samples' segments."""
    return _head(row, group_json(group), [[len(segment) for segment in sample] for sample in columns])


def encode(head: GroupHead) -> dict[str, Any]:
    """Return what is stored of a head: the row of its group has the rest."""
    data = zstandard.ZstdCompressor(level=_LEVEL).compress(head.json)
    return {"form": _form(), "tokens": json.dumps(head.tokens), "json": data}


def decode(row: Row) -> GroupHead | None:
    """Return the head in a group's row joined with it; None where there is none that this release can use."""
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
    """Return a digest of the wire models that a group consists of."""
    return hashlib.sha256(json.dumps(Group.model_json_schema(), sort_keys=True).encode()).digest()
