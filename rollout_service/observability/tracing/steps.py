"""Reads the steps of rollouts, stored or not. An attempt at this node is found from its first step on, and once."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import structlog
import zstandard
from pydantic_core import PydanticSerializationError, from_json, to_json

from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import AttemptSteps, RolloutStep, RolloutSteps
from rollout_service.activity import Activity, ActivityBoard, OpenStep, StepObserver
from rollout_service.base.errors import RecordLostError
from rollout_service.base.ids import SampleId
from rollout_service.base.signals import BatchQueue, until_all_done
from rollout_service.store.codec.rollouts import RESTORE, reading
from rollout_service.store.contract import EncodedSteps, Store
from rollout_service.store.retrying import retry_until_stored

ROLLOUTS_AT_ONCE = 64
"""The most rollouts in one read and one piece of the answer."""
FLUSH_SECONDS = 1.0
"""How long a reader waits until an attempt that has just ended is saved; the rest is read even if the store fails."""


class StepArchive:
    def __init__(self, store: Store, board: ActivityBoard, writer: StepWriter) -> None:
        self._store = store
        self._board = board
        self._writer = writer

    async def of_rollout(self, rollout_id: str) -> RolloutSteps:
        """Return the steps of a rollout so far; none if it is unknown.

        Raises:
            RecordLostError: The record is damaged.
        """
        records = (await self._records([rollout_id])).get(rollout_id, [])
        return await anyio.to_thread.run_sync(_all_rows, rollout_id, records)

    async def of_run(self, run_id: str) -> Sequence[str]:
        """Return the ids of a run's rollouts, earlier tries included, about in the order in which they began.

        Raises:
            NotFoundError: There is no such run.
        """
        runs = self._store.runs
        # Open groups first: one that is closed in between is then found twice, not missed.
        members = [member.rollout_id for group in await runs.open_groups(run_id) for member in group.members]
        closed = await runs.rollout_ids(run_id)
        return [name for one in dict.fromkeys((*closed, *members)) for name in _with_earlier(one)]

    async def lines(self, rollout_ids: Sequence[str]) -> AsyncIterator[bytes]:
        """Yield the steps of each rollout that has any as a line of JSON: a `RolloutAttempts`.

        Raises:
            StoreError: The store fails.
        """
        for start in range(0, len(rollout_ids), ROLLOUTS_AT_ONCE):
            some = rollout_ids[start : start + ROLLOUTS_AT_ONCE]
            records = await self._records(some)
            if records:
                yield b"".join(_line(name, records[name]) for name in some if name in records)

    async def _records(self, rollout_ids: Sequence[str]) -> Mapping[str, list[bytes]]:
        live = {name: found for name in rollout_ids if (found := self._board.find(name)) is not None}
        with anyio.move_on_after(FLUSH_SECONDS):
            await self._writer.flush()
        stored = await self._store.saved_steps(rollout_ids)
        records = await anyio.to_thread.run_sync(_decompress_all, stored)
        for name, activity in live.items():
            kept = records.get(name, [])
            if activity.finished is None or not _has(kept, activity):
                records[name] = [*kept, encode(activity)]
        return records


def _has(records: Sequence[bytes], activity: Activity) -> bool:
    mark = b'"started_at":' + to_json(activity.started_at) + b","
    return any(mark in record for record in records)


def _with_earlier(rollout_id: str) -> list[str]:
    """Return the ids of a sample's rollouts up to this one, the first one first."""
    try:
        last = SampleId.parse(rollout_id)
    except ValueError:
        return [rollout_id]
    return [str(SampleId(last.run, last.number, last.sample, retry)) for retry in range(last.retry + 1)]


def _decompress_all(stored: Mapping[str, Sequence[bytes]]) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for rollout_id, records in stored.items():
        with reading(rollout_id):
            found[rollout_id] = [decompress(data) for data in records]
    return found


def _line(rollout_id: str, records: Sequence[bytes]) -> bytes:
    return b'{"rollout_id":%b,"attempts":[%b]}\n' % (to_json(rollout_id), b",".join(records))


def _all_rows(rollout_id: str, records: Sequence[bytes]) -> RolloutSteps:
    try:
        attempts = [decode(record) for record in records]
    except ValueError as error:
        raise RecordLostError(f"the steps of rollout {rollout_id} cannot be read", hint=RESTORE) from error
    return RolloutSteps(
        rollout_id=rollout_id,
        steps=[step for attempt in attempts for step in rows(attempt)],
        dropped=sum(attempt.dropped for attempt in attempts),
    )


log = structlog.get_logger(__name__)

COLLECT_SECONDS = 1.0
"""How long to collect attempts for one write, unless somebody reads steps."""
MAX_WAITING = 4_096
"""The most attempts that wait to be saved; the steps of later ones are dropped."""
MAX_AT_ONCE = 64
"""The most attempts in one write, so that other writes do not wait for long."""
CLOSE_SECONDS = 2.0
"""How long the end of the service waits until the last steps are saved."""


class StepWriter(StepObserver):
    """Saves the steps of attempts that have ended, in the background, so that no rollout waits for the store.

    `finished` returns at once; many attempts share one write; memory is bounded. After `flush`, a reader here misses
    nothing; one at another node may miss the last second. A rollout whose steps cannot be saved loses only its
    timeline.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queues = [
            BatchQueue[Activity](most=MAX_WAITING, at_once=MAX_AT_ONCE, collect_seconds=COLLECT_SECONDS)
            for _ in store.shards
        ]
        self.dropped = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Save steps in the block, and at its end those of the last attempts."""
        async with anyio.create_task_group() as tasks:
            for queue, shard in zip(self._queues, self._store.shards, strict=True):
                tasks.start_soon(self._save_forever, queue, shard)
            try:
                yield
            finally:
                with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                    await self.flush()
                tasks.cancel_scope.cancel()

    def finished(self, activity: Activity) -> None:
        queue = self._queues[self._store.shard_of(activity.rollout_id)]
        if activity.ended and not queue.put(activity):
            self.dropped += 1

    async def flush(self) -> None:
        await until_all_done(self._queues)

    async def _save_forever(self, queue: BatchQueue[Activity], shard: Store) -> None:
        while True:
            attempts = await anyio.to_thread.run_sync(_encode_all, await queue.next_batch())
            await retry_until_stored("save steps", partial(shard.save_steps, attempts))
            if self.dropped:
                log.warning("the steps of some attempts were dropped", attempts=self.dropped)
                self.dropped = 0


def _encode_all(batch: list[Activity]) -> list[EncodedSteps]:
    return [EncodedSteps(one.rollout_id, compress(encode(one))) for one in batch]


# A record is the compressed JSON of an `AttemptSteps`, with steps as columns, so that records are joined to a list
# without reading them. Any step can be encoded: text that JSON cannot hold, such as half of a surrogate pair in a
# command, is replaced.

_LEVEL = 3
_MICROSECONDS = 1e6


def encode(activity: Activity) -> bytes:
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
    return zstandard.ZstdCompressor(level=_LEVEL).compress(record)


def decompress(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def decode(record: bytes) -> AttemptSteps:
    return AttemptSteps.model_validate(from_json(record))


def rows(attempt: AttemptSteps) -> list[RolloutStep]:
    began = datetime.fromtimestamp(attempt.started_at, UTC)
    return [
        RolloutStep(
            kind=kind,
            name=attempt.names[number],
            lane=attempt.lanes[number] if attempt.lanes else "",
            stage=stage_at(attempt.stages, attempt.starts[number]),
            attempt=attempt.attempt,
            started_at=began + timedelta(microseconds=attempt.starts[number]),
            seconds=attempt.lengths[number] / _MICROSECONDS,
            error=attempt.errors[number] if attempt.errors else None,
            detail=attempt.details[number],
        )
        for number, kind in enumerate(attempt.kinds)
    ]


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
    """Replace everything that JSON cannot hold."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_clean(str(name)): _clean(inner) for name, inner in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [_clean(inner) for inner in value]
    return value if isinstance(value, bool | int | float | None) else _clean(str(value))
