"""Runs, groups, batches, and the histories of runs as stored records.

A history has one record of fixed size for each group, in the order of their numbers, so it is found, and changed, by
its number alone. A reason is stored as a checksum, since all reasons of a run are the names of its counters. Making a
history of 100,000 groups takes some 20 ms; call it in a thread.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from api_schemas.errors import ErrorInfo
from api_schemas.exports import ExportedSample
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.runs import Group, GroupSample, InlineTasks, RunRequest, RunState
from api_schemas.runs.auxiliary import RewardWeights
from api_schemas.runs.history import RunHistory
from api_schemas.tasks import Task
from rollout_service.base.errors import RecordLostError
from rollout_service.base.ids import BatchId, GroupId
from rollout_service.groups.shares import Owner
from rollout_service.groups.statistics import PHASES, GroupFigures
from rollout_service.store.codec import rollouts as codec
from rollout_service.store.codec.record import Row
from rollout_service.store.codec.rollouts import when
from rollout_service.store.runs_contract import BatchLease, ClosedSample, GroupClosure, GroupMember, RunRecord

_SAMPLES = TypeAdapter(list[ClosedSample])
_OWNERS = {"__all__": {"owner"}}


def without_tasks(request: RunRequest) -> RunRequest:
    """Return the request without its inline tasks, which may be many and are stored one by one."""
    if not isinstance(request.source, InlineTasks):
        return request
    return request.model_copy(update={"source": request.source.model_copy(update={"tasks": []})})


def encode_request(request: RunRequest) -> str:
    return without_tasks(request).model_dump_json()


def encode_tasks(tasks: Sequence[Task]) -> list[str]:
    return [task.model_dump_json() for task in tasks]


def decode_tasks(texts: Iterable[str | bytes]) -> list[Task]:
    return [Task.model_validate_json(text) for text in texts]


def decode_run(row: Row, counters: Mapping[str, int], *, request: RunRequest | None = None) -> RunRecord:
    """Return a run from its row and its counters; `request` is the row's, if it is parsed already."""
    return RunRecord(
        run_id=row["run_id"],
        request=request or RunRequest.model_validate_json(row["request"]),
        state=RunState(row["state"]),
        version=row["version"],
        first_version=row["first_version"],
        tasks=row["tasks"],
        total=row["total"],
        digest=row["digest"],
        cursor=row["cursor"],
        counters=dict(counters),
        problem=ErrorInfo.model_validate_json(row["problem"]) if row["problem"] else None,
        created_at=codec.when(row["created_at"]),
        changed_at=codec.when(row["changed_at"]),
    )


def decode_member(row: Row, now: float, *, sample: int, is_straggler: bool) -> GroupMember | None:
    """Return a member of a group at `now`, in Unix seconds; None if the rollout is gone."""
    if row["state"] is None:
        return None
    state = RolloutState(row["state"])
    return GroupMember(
        sample=sample,
        rollout_id=row["rollout_id"],
        state=state,
        reward=row["reward"],
        rolling_seconds=now - row["changed_at"] if state is RolloutState.ROLLOUT else None,
        oldest_version=row["oldest_version"],
        newest_version=row["newest_version"],
        is_straggler=is_straggler,
        is_erased=bool(row["is_erased"]),
    )


def encode_samples(samples: Sequence[ClosedSample]) -> str:
    is_owned = any(sample.owner is not None for sample in samples)
    return _SAMPLES.dump_json(list(samples), exclude=None if is_owned else _OWNERS).decode()


def decode_samples(text: str) -> list[ClosedSample]:
    return _SAMPLES.validate_json(text)


def owners_of(text: str) -> list[Owner]:
    return [sample.owner for sample in decode_samples(text) if sample.owner is not None]


def rollouts_of(text: str, user: str) -> set[str]:
    samples = decode_samples(text)
    return {one.rollout_id for one in samples if one.owner is not None and one.owner.user == user}


def encode_summary(closure: GroupClosure) -> str:
    fields = ("reward_mean", "reward_std", "oldest_version", "newest_version")
    summary: dict[str, object] = {field: getattr(closure, field) for field in fields}
    if closure.reward_weights is not None:
        summary |= {
            "reward_weights": closure.reward_weights.model_dump(),
            "measured_on": closure.measured_on,
            "filtered_on": list(closure.filtered_on),
        }
    if closure.critical_steps is not None:
        summary["critical_steps"] = closure.critical_steps.model_dump()
    return json.dumps(summary)


def decode_weights(summary: str | None) -> RewardWeights | None:
    """Return None for a group that is open, or without weights."""
    weights = json.loads(summary).get("reward_weights") if summary else None
    return None if weights is None else RewardWeights.model_validate(weights)


def decode_group(row: Row, rollouts: Mapping[str, Rollout], *, referred: Collection[str] = ()) -> Group:
    """Return a closed group; `referred` are rollouts whose sub-agents were left out."""
    closed = decode_samples(row["samples"])
    for gone in (sample.rollout_id for sample in closed if sample.rollout_id not in rollouts):
        raise RecordLostError(f"the rollout {gone} of a group is missing from the store", hint=codec.RESTORE)
    weights = decode_weights(row["summary"])
    summary = json.loads(row["summary"])
    summary.pop("reward_weights", None)
    samples = [
        GroupSample(
            sample=sample.sample,
            rollout=rollouts[sample.rollout_id],
            usable=sample.usable,
            masked_because=sample.masked_because,
            reward=sample.reward,
            reward_weights=weights if sample.usable else None,
            advantage=sample.advantage,
            nodes_by_reference=sample.rollout_id in referred,
        )
        for sample in closed
    ]
    return Group(
        group_id=str(GroupId(row["run_id"], row["number"])),
        number=row["number"],
        epoch=row["epoch"],
        task=samples[0].rollout.task,
        samples=samples,
        usable=sum(sample.usable for sample in samples),
        **summary,
    )


def decode_exported(row: Row, group: Group, members: Mapping[str, Row]) -> list[ExportedSample]:
    """Return the samples of a closed group from its row, which is joined with its batch's."""
    in_batch = None if row["batch_number"] is None else str(BatchId(row["run_id"], row["batch_number"]))
    exported = []
    for sample in group.samples:
        member = members[sample.rollout.rollout_id]
        exported.append(
            ExportedSample(
                group_id=group.group_id,
                number=group.number,
                epoch=group.epoch,
                group_state=row["state"],
                dropped_because=row["reason"] if row["state"] == "dropped" else None,
                batch_id=in_batch,
                reward_mean=group.reward_mean,
                reward_std=group.reward_std,
                measured_on=group.measured_on,
                request=RolloutRequest.model_validate_json(member["request"]),
                sample=sample,
                oldest_version=member["oldest_version"],
                newest_version=member["newest_version"],
            )
        )
    return exported


def decode_batch(row: Row, run_id: str, groups: Sequence[int]) -> BatchLease:
    until: datetime = codec.when(row["lease_until"])
    return BatchLease(
        batch_id=str(BatchId(run_id, row["number"])),
        run_id=run_id,
        number=row["number"],
        groups=groups,
        delivery=row["deliveries"],
        lease_until=until,
        version=row["version"],
        dropped=json.loads(row["dropped"]),
    )


_RECORD = np.dtype(
    [
        ("flags", "<u4"),
        ("reason", "<u4"),
        ("closed_at", "<f8"),
        ("mean", "<f8"),
        ("std", "<f8"),
        ("staleness", "<f4"),
        ("samples", "<u4"),
        ("failed", "<u4"),
        ("turns", "<u4"),
        ("tokens", "<f8"),
        ("seconds", "<f4", (len(PHASES),)),
    ]
)
SIZE = _RECORD.itemsize
REASON_AT = 4
"""Where the reason is in a record, in bytes."""
MAX_GROUPS = 6_000_000
"""The most groups of a run that have a record, since a value of Redis has at most 512 MB."""
_CLOSED, _ACCEPTED = 1, 2


def encode_record(closure: GroupClosure, *, version: int, now: float) -> bytes:
    """Return the record of a group that was closed now, when the run was at this version."""
    figures = closure.figures or GroupFigures()
    oldest = closure.oldest_version
    record = np.zeros(1, _RECORD)
    record["flags"] = _CLOSED | (_ACCEPTED if closure.reason is None else 0)
    record["reason"] = 0 if closure.reason is None else _checksum(closure.reason)
    record["closed_at"] = now
    record["mean"] = math.nan if closure.reward_mean is None else closure.reward_mean
    record["std"] = math.nan if closure.reward_std is None else closure.reward_std
    record["staleness"] = math.nan if oldest is None else version - oldest
    record["samples"], record["failed"] = figures.samples, figures.failed
    record["turns"], record["tokens"] = min(figures.turns, 2**32 - 1), figures.tokens
    record["seconds"] = [figures.seconds.get(phase, 0.0) for phase in PHASES]
    return record.tobytes()


def encode_reason(reason: str) -> bytes:
    """Encode the part at `REASON_AT`, for a group that is dropped after it had passed the filters."""
    return np.array([_checksum(reason)], "<u4").tobytes()


def decode_closed(data: bytes) -> tuple[float | None, float | None, float | None]:
    """Return when a group was closed, and the mean and deviation of its rewards; None without a record."""
    if len(data) < SIZE:
        return None, None, None
    record = np.frombuffer(data, _RECORD, 1)[0]
    if not record["flags"] & _CLOSED:
        return None, None, None
    return float(record["closed_at"]), _number(record["mean"]), _number(record["std"])


def make_history(run_id: str, data: bytes, reasons: Collection[str], points: int) -> RunHistory:
    """Return a run over time, from all its records and the reasons for which groups were dropped."""
    records = _in_order(np.frombuffer(data, _RECORD, len(data) // SIZE))
    count = len(records)
    edges = np.arange(min(points, count), dtype=np.int64) * count // max(1, min(points, count))
    sums = _Sums(records, edges)
    samples, seconds = sums.of("samples"), sums.of("seconds")
    total = seconds.sum(axis=1) if count else seconds
    return RunHistory(
        run_id=run_id,
        at=[when(float(at)) for at in records["closed_at"][_lasts(edges, count)]],
        groups=[int(n) for n in sums.groups],
        reward_mean=sums.means("mean"),
        reward_std=sums.means("std"),
        acceptance=_ratios(sums.add((records["flags"] & _ACCEPTED != 0).astype(float)), sums.groups),
        staleness=sums.means("staleness"),
        turns=_ratios(sums.of("turns"), samples),
        tokens=_ratios(sums.of("tokens"), samples),
        failed=_ratios(sums.of("failed"), samples),
        stage_shares={phase: _ratios(seconds[:, index], total) if count else [] for index, phase in enumerate(PHASES)},
        dropped=_dropped(records, sums, reasons),
    )


def _in_order(records: NDArray[Any]) -> NDArray[Any]:
    """Return the records of closed groups in the order in which they were closed."""
    closed = np.flatnonzero(records["flags"] & _CLOSED)
    times = records["closed_at"][closed]
    if len(closed) == len(records) and bool((np.diff(times) >= 0).all()):
        return records  # copying takes as long as all the rest
    return records[closed[np.argsort(times, kind="stable")]]


class _Sums:
    """Sums over the records of each interval."""

    def __init__(self, records: NDArray[Any], edges: NDArray[np.int64]) -> None:
        self._records = records
        self._edges = edges
        self.groups = np.diff(np.append(edges, len(records))).astype(float)

    def add(self, values: NDArray[Any]) -> NDArray[np.float64]:
        if not len(self._edges):
            return np.zeros(0)
        added: NDArray[np.float64] = np.add.reduceat(values.astype(float), self._edges, axis=0)
        return added

    def of(self, name: str) -> NDArray[np.float64]:
        return self.add(self._records[name])

    def means(self, name: str) -> list[float | None]:
        """Return the mean of a field in each interval, of the groups that have it."""
        values = self._records[name].astype(float)
        known = ~np.isnan(values)
        return _ratios(self.add(np.where(known, values, 0.0)), self.add(known.astype(float)))


def _dropped(records: NDArray[Any], sums: _Sums, reasons: Collection[str]) -> dict[str, list[int]]:
    found = {}
    for reason in sorted(reasons):
        counts = sums.add((records["reason"] == _checksum(reason)).astype(float))
        if counts.any():
            found[reason] = [int(n) for n in counts]
    return found


def _lasts(edges: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the place of the last record of each interval."""
    return np.append(edges[1:], count)[: len(edges)] - 1


def _ratios(parts: NDArray[np.float64], wholes: NDArray[np.float64]) -> list[float | None]:
    pairs = zip(parts.tolist(), wholes.tolist(), strict=True)
    return [part / whole if whole else None for part, whole in pairs]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _checksum(reason: str) -> int:
    return zlib.crc32(reason.encode()) or 1
