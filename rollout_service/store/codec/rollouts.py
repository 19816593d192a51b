"""Rollouts, leases and events as stored records.

A rollout's result is stored without what the store keeps elsewhere (the request's fields, the state, the attempt, the
retries, the times), so each fact has one place. Trajectories have a codec of their own.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import compress
from typing import Any

import zstandard
from pydantic import TypeAdapter

from api_schemas.errors import ErrorInfo
from api_schemas.events import Event
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Span, StopReason
from api_schemas.trajectories import Trajectory
from rollout_service.errors import RecordLostError
from rollout_service.store.codec.row import Row
from rollout_service.store.contract import Lease

_RETRIES = TypeAdapter(list[ErrorInfo])
_SPANS = TypeAdapter(list[Span])
_UNREADABLE = (ValueError, KeyError, TypeError, zlib.error, zstandard.ZstdError, struct.error)
"""The errors that decoding a damaged record raises."""
RESTORE = "Restore a backup of the store and resume the run, or end the run."
_RESULT_FIELDS = {"reward", "reward_parts", "notes", "stop_reason", "program", "error", "usage", "spans"}


def when(seconds: float) -> datetime:
    """Convert Unix seconds, as stored, to a time as on the wire."""
    return datetime.fromtimestamp(seconds, UTC)


@contextmanager
def reading(rollout_id: str) -> Iterator[None]:
    """Turn the errors of decoding a damaged record of this rollout into RecordLostError.

    Raises:
        RecordLostError: The block could not decode the record.
    """
    try:
        yield
    except _UNREADABLE as error:
        why = f"the record of the rollout {rollout_id} cannot be read: {type(error).__name__}"
        raise RecordLostError(why, hint=RESTORE) from error


def encode_result(result: Rollout) -> str:
    """Return the part of a result that the store does not keep elsewhere, as JSON."""
    return result.model_dump_json(include=_RESULT_FIELDS)


def encode_failure(error: ErrorInfo) -> str:
    """Return the result of a rollout that failed before it could be read, as JSON."""
    return json.dumps({"error": error.model_dump(mode="json")})


def version_range(trajectory: Trajectory | None) -> dict[str, int | None]:
    """Return the oldest and the newest version that sampled a token to train on; None for both if there is none."""
    pairs = ((s.versions, s.loss_mask) for s in (trajectory.segments if trajectory else []))
    sampled = {version for versions, mask in pairs for version in set(compress(versions, mask))}
    return {"oldest_version": min(sampled, default=None), "newest_version": max(sampled, default=None)}


def trajectory_tokens(trajectory: Trajectory) -> int:
    """Return the number of tokens in a trajectory, to which the cost of encoding it is proportional."""
    return sum(len(segment.token_ids) for segment in (*trajectory.segments, *trajectory.untrained))


def decode_rollout(row: Row) -> Rollout:
    """Return a rollout from its row, joined with its request and, if there is one, its result.

    Raises:
        RecordLostError: The record is damaged.
    """
    with reading(row["rollout_id"]):
        return _decode_rollout(row)


def _decode_rollout(row: Row) -> Rollout:
    request = RolloutRequest.model_validate_json(row["request"])
    state = RolloutState(row["state"])
    result: dict[str, Any] = json.loads(row["result"] or "{}")
    result.setdefault("spans", json.loads(row["spans"]))
    if state is RolloutState.CANCELLED:
        result.setdefault("stop_reason", StopReason.CANCELLED)
    return Rollout(
        rollout_id=row["rollout_id"],
        state=state,
        task=request.task,
        pool=request.pool,
        metadata=request.metadata,
        attempt=row["attempt"],
        retries=_RETRIES.validate_json(row["retries"]),
        created_at=when(row["created_at"]),
        finished_at=when(row["changed_at"]) if state.terminal else None,
        **result,
    )


def encode_spans(spans: Sequence[Span]) -> str:
    """Return spans as a JSON list."""
    return _SPANS.dump_json(list(spans)).decode()


def decode_lease(row: Row) -> Lease:
    """Return a lease from a claimed row joined with its request.

    Raises:
        RecordLostError: The record is damaged.
    """
    with reading(row["rollout_id"]):
        return Lease(
            rollout_id=row["rollout_id"],
            request=RolloutRequest.model_validate_json(row["request"]),
            attempt=row["attempt"] + 1,
            retries=_RETRIES.validate_json(row["retries"]),
            spans=_SPANS.validate_json(row["spans"]),
            created_at=when(row["created_at"]),
            queued_at=when(row["queued_at"]),
            token=row["token"],
            saved_turns=row["saved_turns"],
        )


def decode_event(row: Row) -> Event:
    """Return an event from its row."""
    return Event(
        event_id=row["event_id"],
        time=when(row["time"]),
        kind=row["kind"],
        subject=row["subject"],
        data=json.loads(row["data"]),
    )
