"""Closed groups as stored records: the data for trainers, exports and batches, from the rows of a group and its
rollouts.

A stale sample is delivered without its tokens. The sub-agents of a sample are delivered whole or by reference. A
damaged record raises RecordLostError and names its rollout.

The row of a group has `run_id`, `number`, `epoch`, `samples` and `summary`; the row of a rollout has what
`codec.rollouts.decode_rollout` needs, and its encoded `trajectory` or None. Decoding tokens is slow, so call these in a
thread.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import zstandard

from api_schemas.exports import ExportedSample, RecordedRollout, without_tokens
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.runs import Group
from api_schemas.runs.history import GroupRow, GroupSampleRow
from rollout_service.store import rules
from rollout_service.store.codec import rollouts as rollout_codec
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.codec import trajectories as trajectory_codec
from rollout_service.store.codec.record import Row
from rollout_service.store.codec.rollouts import when
from rollout_service.store.codec.runs import decode_closed
from rollout_service.store.codec.trajectories import Columns
from rollout_service.store.runs_contract import GroupHead

MAX_NODES_BYTES = 1 << 20
"""The sub-agents of a sample whose JSON is longer are delivered by reference."""


def decode_group(row: Row, members: Sequence[Row]) -> Group:
    """Return a group as a trainer gets it: without the tokens of stale samples."""
    kept = _delivered(row)
    rollouts = (
        decode_whole(member) if member["rollout_id"] in kept else rollout_codec.decode_rollout(member)
        for member in members
    )
    return _delivered_group(row, rollouts)


def decode_exported(row: Row, members: Sequence[Row]) -> list[ExportedSample]:
    """Return the samples for an export; none if all rollouts were lost before the group was cancelled."""
    if not members:
        return []
    by_id = {member["rollout_id"]: member for member in members}
    group = run_codec.decode_group(row, {name: decode_whole(member) for name, member in by_id.items()})
    return run_codec.decode_exported(row, group, by_id)


def decode_recorded(rows: Sequence[Row]) -> dict[str, RecordedRollout]:
    return {
        row["rollout_id"]: without_tokens(
            RolloutRequest.model_validate_json(row["request"]),
            _with_trajectory(rollout_codec.decode_rollout(row, rollout_codec.Shown.ALL), row),
        )
        for row in rows
    }


def decode_whole(row: Row) -> Rollout:
    """Return a rollout with all trajectories that its request asks for and that are left."""
    return _with_trajectory(_with_nodes(rollout_codec.decode_rollout(row), row), row)


def _with_trajectory(rollout: Rollout, row: Row) -> Rollout:
    if row["trajectory"] is None:
        return rollout
    with rollout_codec.reading(rollout.rollout_id):
        return rollout.model_copy(update={"trajectory": trajectory_codec.decode(row["trajectory"])})


def _with_nodes(rollout: Rollout, row: Row) -> Rollout:
    if not rollout.nodes:
        return rollout
    with rollout_codec.reading(rollout.rollout_id):
        nodes = rollout_codec.with_trajectories(rollout.nodes, row["trajectory"])
        return rollout.model_copy(update={"nodes": nodes})


def make_head(row: Row, members: Sequence[Row]) -> GroupHead:
    """
    Raises:
        RecordLostError: A rollout of the group is missing or damaged.
        OverflowError: A trajectory does not fit the columns, such as one with token ids beyond 32 bits.
    """
    rollouts: list[Rollout] = []
    columns: dict[str, list[Columns]] = {}
    kept = _delivered(row)
    for member in members:
        rollout = rollout_codec.decode_rollout(member)
        columns[rollout.rollout_id] = []
        if member["trajectory"] is not None and rollout.rollout_id in kept:
            with rollout_codec.reading(rollout.rollout_id):
                trajectory, columns[rollout.rollout_id] = trajectory_codec.split(member["trajectory"])
            rollout = _with_nodes(rollout.model_copy(update={"trajectory": trajectory}), member)
        rollouts.append(rollout)
    group = _delivered_group(row, rollouts)
    tokens = [[len(segment) for segment in columns[sample.rollout.rollout_id]] for sample in group.samples]
    return _head(row, group_json(group), tokens)


def encode_head(row: Row, members: Sequence[Row]) -> Mapping[str, Any] | None:
    """Return the head to store, or None if it cannot be made.

    A group with token ids beyond 32 bits has no head, for example, and is delivered only as JSON.
    """
    try:
        return encode(make_head(row, members))
    except Exception:  # noqa: BLE001 - it must not stop the close; a lease as arrays raises it
        return None


def locate_columns(packed: Sequence[bytes]) -> list[Columns]:
    return [segment for data in packed for segment in trajectory_codec.columns_of(data)]


def _delivered_group(row: Row, rollouts: Iterable[Rollout]) -> Group:
    """Return a group for a batch, in which sub-agents that are too large are left out."""
    delivered, referred = {}, set()
    for rollout in rollouts:
        if sum(len(node.model_dump_json()) for node in rollout.nodes) > MAX_NODES_BYTES:
            referred.add(rollout.rollout_id)
            rollout = rollout.model_copy(update={"nodes": []})
        delivered[rollout.rollout_id] = rollout
    return run_codec.decode_group(row, delivered, referred=referred)


def _delivered(row: Row) -> set[str]:
    return set(rules.delivered_rollouts(run_codec.decode_samples(row["samples"])))


@dataclass(frozen=True, slots=True)
class StoredGroup:
    number: int
    state: str
    reason: str | None
    batch: int | None
    members: Sequence[str]
    """Ids by sample; none once the rollouts are deleted."""
    summary: str | None
    record: bytes
    """Empty for a group without a record."""


@dataclass(frozen=True, slots=True)
class StoredGroups:
    groups: Sequence[StoredGroup]
    rollouts: Mapping[str, Row]
    """Only those that exist, by id."""
    next: int | None
    """The number after which to go on; None if nothing is left."""


def make_row(group: StoredGroup, rollouts: Mapping[str, Row]) -> GroupRow:
    """Return a group with its rollouts, which have `state`, `reward`, `code`, `tokens` and `environment`.

    The row is whole as far as they are still stored; the statistics and the time of its close outlive them.
    """
    closed_at, mean, std = decode_closed(group.record)
    summary = json.loads(group.summary or "{}")
    found = [(sample, name, rollouts[name]) for sample, name in enumerate(group.members) if name in rollouts]
    return GroupRow(
        number=group.number,
        state=group.state,
        reason=group.reason if group.state == "dropped" else None,
        batch=group.batch,
        environment=found[0][2]["environment"] if found else "",
        reward_mean=summary.get("reward_mean", mean),
        reward_std=summary.get("reward_std", std),
        closed_at=None if closed_at is None or group.state == "open" else when(closed_at),
        samples=[
            GroupSampleRow(
                rollout_id=name,
                sample=sample,
                state=RolloutState(row["state"]),
                reward=row["reward"],
                error_code=row["code"],
                tokens=row["tokens"],
            )
            for sample, name, row in found
        ],
    )


# A head, made once when a group is kept, has everything that a batch contains of the group except tokens. Its JSON
# equals that of `RunStore.group`, byte for byte. A head that was written under another definition of the wire models is
# made again.


def group_json(group: Group) -> bytes:
    """Return a group as JSON, made sample by sample so that other threads can run in between."""
    samples = b",".join(sample.model_dump_json().encode() for sample in group.samples)
    rest = group.model_dump_json(exclude={"samples"}).encode()
    return b'{"samples":[' + samples + b"]," + rest[1:]


def encode(head: GroupHead) -> dict[str, Any]:
    data = trajectory_codec.compress(head.json)
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
