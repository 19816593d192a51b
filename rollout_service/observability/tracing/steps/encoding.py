"""The steps of an attempt as bytes: columns, as JSON, compressed.

Guarantee: any step can be encoded. What JSON cannot hold, such as half of a surrogate pair in a command, is replaced.

A record is the JSON of an `AttemptSteps`, so that a list of many rollouts is joined from records without reading them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from typing import Any

import zstandard
from pydantic_core import PydanticSerializationError, from_json, to_json

from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import AttemptSteps, RolloutStep
from rollout_service.activity import Activity, OpenStep

_LEVEL = 3
_MICROSECONDS = 1e6


def encode(activity: Activity) -> bytes:
    """Return the steps of an attempt that have ended, as JSON."""
    began = activity.started
    until = activity.finished if activity.finished is not None else time.perf_counter()
    steps = sorted(activity.ended.copy(), key=lambda step: step.started)
    columns: dict[str, Any] = {
        "attempt": activity.attempt,
        "environment": activity.environment,
        "run_id": activity.run_id,
        "group": activity.group,
        "started_at": activity.started_at,
        "us": _us(until - began),
        "outcome": activity.outcome,
        "dropped": activity.dropped,
        "stages": [[stage.value, _us(at - began)] for stage, at in activity.stages],
        "kinds": [step.kind.value for step in steps],
        "names": [step.name for step in steps],
        "starts": [_us(step.started - began) for step in steps],
        "lengths": [_us((step.ended or until) - step.started) for step in steps],
        "details": [_known(step) for step in steps],
    }
    if any(step.lane for step in steps):
        columns["lanes"] = [step.lane for step in steps]
    if any(step.error for step in steps):
        columns["errors"] = [step.error for step in steps]
    return _as_json(columns)


def compress(record: bytes) -> bytes:
    """Return an encoded attempt, compressed."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(record)


def decompress(data: bytes) -> bytes:
    """Return an attempt as JSON."""
    return zstandard.ZstdDecompressor().decompress(data)


def decode(record: bytes) -> AttemptSteps:
    """Return an attempt from its JSON."""
    return AttemptSteps.model_validate(from_json(record))


def rows(attempt: AttemptSteps) -> list[RolloutStep]:
    """Return the steps of an attempt, each on its own."""
    began = datetime.fromtimestamp(attempt.started_at, UTC)
    found = []
    columns = zip_longest(attempt.lanes, attempt.errors)
    for kind, name, start, length, detail in zip(
        attempt.kinds, attempt.names, attempt.starts, attempt.lengths, attempt.details, strict=True
    ):
        lane, error = next(columns, ("", None))
        found.append(
            RolloutStep(
                kind=kind,
                name=name,
                lane=lane or "",
                stage=stage_at(attempt.stages, start),
                attempt=attempt.attempt,
                started_at=began + timedelta(microseconds=start),
                seconds=length / _MICROSECONDS,
                error=error,
                detail=detail,
            )
        )
    return found


def stage_at(stages: Sequence[tuple[Stage, int]], moment: int) -> Stage | None:
    """Return the stage that an attempt was in, `moment` microseconds after its start."""
    return next((stage for stage, began in reversed(stages) if began <= moment), None)


def _us(seconds: float) -> int:
    return round(seconds * _MICROSECONDS)


def _known(step: OpenStep) -> dict[str, Any]:
    return {name: value for name, value in step.detail.copy().items() if value is not None}


def _as_json(columns: dict[str, Any]) -> bytes:
    try:
        return to_json(columns)
    except (PydanticSerializationError, ValueError):
        return to_json(_clean(columns))


def _clean(value: Any) -> Any:
    """Return a value with everything replaced that JSON cannot hold."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_clean(str(name)): _clean(inner) for name, inner in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [_clean(inner) for inner in value]
    return value if isinstance(value, bool | int | float | None) else _clean(str(value))
