"""The steps of attempts in a Redis.

They are in Redis itself, beside the results, also where trajectories are in files: a record of one or two kilobytes
would keep a whole file of trajectories alive after these were pruned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout_service.store.contract import MAX_RECORDS, EncodedSteps
from rollout_service.store.redis.connection import RedisConnection

AT_ONCE = 256
"""The most records that one call writes or reads."""


async def save(connection: RedisConnection, attempts: Sequence[EncodedSteps]) -> int:
    """Store the steps of attempts; see `StepStore.save_steps`."""
    saved = 0
    for start in range(0, len(attempts), AT_ONCE):
        values: list[str | int | bytes] = []
        for attempt in attempts[start : start + AT_ONCE]:
            values += [attempt.rollout_id, attempt.data]
        saved += await connection.call("rollouts_save_steps", MAX_RECORDS, *values)
    return saved


async def saved(connection: RedisConnection, rollout_ids: Sequence[str]) -> Mapping[str, list[bytes]]:
    """Return the stored steps of these rollouts; see `StepStore.saved_steps`."""
    found: dict[str, list[bytes]] = {}
    for start in range(0, len(rollout_ids), AT_ONCE):
        some = rollout_ids[start : start + AT_ONCE]
        answer = await connection.read("rollouts_saved_steps", *some)
        found |= {name: records for name, records in zip(some, answer, strict=True) if records}
    return found
