"""The history of a run as stored records, one of fixed size for each group, in the order of their numbers.

Guarantees: the record of a group is found, and changed, by its number alone. A reason is stored as a checksum, since
all reasons of a run are the names of its counters. Making a history of 100,000 groups takes some 20 ms; call it in a
thread.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_schemas.runs.history import RunHistory
from rollout_service.groups.statistics import PHASES, GroupFigures
from rollout_service.store.codec.rollouts import when
from rollout_service.store.runs_contract import GroupClosure

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
"""The bytes of a record."""
REASON_AT = 4
"""Where in a record the reason is."""
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
    """Return the part of a record at `REASON_AT`, for a group that is dropped after it had passed the filters."""
    return np.array([_checksum(reason)], "<u4").tobytes()


def decode_closed(data: bytes) -> tuple[float | None, float | None, float | None]:
    """Return when a group was closed, and the mean and deviation of its rewards; None if it has no record."""
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
        stage_shares={
            phase: _ratios(seconds[:, index], total) if count else [] for index, phase in enumerate(PHASES)
        },
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
        """Return the sum of these values in each interval."""
        if not len(self._edges):
            return np.zeros(0)
        added: NDArray[np.float64] = np.add.reduceat(values.astype(float), self._edges, axis=0)
        return added

    def of(self, name: str) -> NDArray[np.float64]:
        """Return the sum of a field in each interval."""
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
