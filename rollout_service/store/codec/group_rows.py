"""Groups of a run as rows of a list.

Guarantees: every store makes the same row of the same group. A row is whole as far as its rollouts are still stored;
the statistics and the time of its close outlive them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from api_schemas.rollouts import RolloutState
from api_schemas.runs.history import GroupRow, GroupSampleRow
from rollout_service.store.codec.history import decode_closed
from rollout_service.store.codec.rollouts import when
from rollout_service.store.codec.row import Row


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as a store has it."""

    number: int
    state: str
    reason: str | None
    """Why it was dropped, or is being cancelled."""
    batch: int | None
    members: Sequence[str]
    """The ids of its rollouts, by sample; none once they are deleted."""
    summary: str | None
    """What `codec.runs.encode_summary` wrote."""
    record: bytes
    """What `codec.history.encode_record` wrote; empty for a group that it was not written for."""


def make_row(group: StoredGroup, rollouts: Mapping[str, Row]) -> GroupRow:
    """Return a group with its rollouts; these have `state`, `reward`, `code`, `tokens` and `environment`."""
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
