"""The search for rollouts in Redis.

It goes through the sorted sets of the states that may match, between the numbers of the first and the last rollout of a
run if one is asked for, in calls so short that Redis answers others in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from api_schemas.rollouts import RolloutState
from api_schemas.views.summaries import RolloutSummary, SummaryFilter, SummaryOrder
from rollout_service.store.codec.summaries import decode_summary
from rollout_service.store.lists_contract import CLOCK_STEP_SECONDS, LOOKED_AT
from rollout_service.store.redis.connection import RedisConnection
from rollout_service.store.redis.replies import STATES, RolloutRow
from rollout_service.store.redis.runs.keys import RunKeys
from rollout_service.store.redis.runs.records import ClosedRecord, OpenRecord

ROWS_AT_ONCE = 2_000
"""The most rollouts that one call looks at, which takes Redis about 5 ms."""
_WITH_CODE = (RolloutState.QUEUED, RolloutState.FAILED)
"""The states in which a rollout has the code of an error."""
_LAST = 2**53


async def find_summaries(
    connection: RedisConnection,
    which: SummaryFilter,
    *,
    order: SummaryOrder,
    after: int | None,
    limit: int,
) -> tuple[list[RolloutSummary], int | None]:
    """Return rollouts after a number, and the number after which to go on, None if nothing is left.

    Raises:
        StoreError: The Redis fails.
        RecordLostError: A record is damaged.
    """
    bounds = await _span(connection, which)
    if bounds is None:
        return [], None
    (low, high), newest = bounds, order == "newest"
    search = to_json(
        {"filter": _filter(which), "states": _states(which), "newest": newest}
        | await _members(connection, which)
    )
    rows: list[RolloutSummary] = []
    for _ in range(LOOKED_AT // ROWS_AT_ONCE):
        if after is not None:
            low, high = (low, min(high, after - 1)) if newest else (max(low, after + 1), high)
        found, last = await connection.read(
            "lists_summaries", search, low, high, ROWS_AT_ONCE, limit - len(rows)
        )
        rows += [decode_summary(_row(*reply)) for reply in found]
        after = int(last) if last else None
        if after is None or len(rows) == limit:
            break
    return rows, after


async def _span(connection: RedisConnection, which: SummaryFilter) -> tuple[int, int] | None:
    """Return the lowest and the highest number that a rollout may have; None if there are none."""
    if which.run is None:
        return 0, _LAST
    key = RunKeys(connection.config.root, which.run).run
    state, first, last = await connection.command("HMGET", key, "state", "rollouts_after", "rollouts_until")
    if state is None:
        return None
    return int(first or 0), _LAST if last is None else int(last)


async def _members(connection: RedisConnection, which: SummaryFilter) -> dict[str, list[str]]:
    """Return the ids of the rollouts of a group, if one is asked for."""
    if which.run is None or which.group is None:
        return {}
    keys = RunKeys(connection.config.root, which.run)
    started = await connection.command("HGET", keys.open, which.group)
    closed = await connection.command("HGET", keys.closed, which.group)
    if started is not None:
        record = OpenRecord.decode(started)
        return {"ids": [*record.members, *record.earlier]}
    return {"ids": [] if closed is None else ClosedRecord.decode(closed).rollout_ids}


def _states(which: SummaryFilter) -> Sequence[str]:
    possible = _WITH_CODE if which.error is not None else STATES
    return [state.value for state in possible if not which.states or state in which.states]


def _filter(which: SummaryFilter) -> dict[str, Any]:
    since = None if which.since is None else which.since.timestamp()
    until = None if which.until is None else which.until.timestamp()
    given = {
        "states": [str(state) for state in which.states]
        if which.states and which.group is not None
        else None,
        "run": which.run,
        "group": which.group,
        "environment": which.environment,
        "code": which.error,
        "reward_min": which.reward_min,
        "reward_max": which.reward_max,
        "from": since,
        "till": until,
        "after": None if since is None else since - CLOCK_STEP_SECONDS,
        "before": None if until is None else until + CLOCK_STEP_SECONDS,
        "text": which.text or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _row(rollout_id: bytes, values: Sequence[bytes | None], result: bytes | None) -> RolloutRow:
    texts = [None if value is None else value.decode() for value in values]
    (
        _,
        state,
        attempt,
        pool,
        environment,
        run,
        group,
        reward,
        stop_reason,
        code,
        created,
        changed,
        *figures,
    ) = texts
    turns, tokens, worked = figures
    return RolloutRow(
        {
            "rollout_id": rollout_id.decode(),
            "state": state,
            "attempt": int(attempt or 0),
            "pool": pool,
            "environment": environment,
            "run_id": run,
            "group_number": None if group is None else int(group),
            "reward": None if reward is None else float(reward),
            "stop_reason": stop_reason,
            "code": code,
            "created_at": float(created or 0),
            "changed_at": float(changed or 0),
            "turns": None if turns is None else int(turns),
            "tokens": None if tokens is None else int(tokens),
            "worked": None if worked is None else float(worked),
            "result": result,
        }
    )
