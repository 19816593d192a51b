"""The search for rollouts in Redis.

It looks at the rollouts that the index names for the environment, the run, the error, the reward or the beginning of
the id. If there is nothing of this to look for, it goes through the sorted sets of the states that may match, between
the numbers of the first and the last rollout of a run if one is asked for. Its calls are so short that Redis answers
others in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import islice
from operator import and_, or_
from typing import Any

from pydantic_core import to_json

from api_schemas.rollouts import RolloutState
from api_schemas.views.summaries import RolloutSummary, SummaryFilter, SummaryOrder
from rollout_service.store.codec.summaries import decode_summary
from rollout_service.store.lists_contract import CLOCK_STEP_SECONDS
from rollout_service.store.redis.connection import RedisConnection
from rollout_service.store.redis.replies import STATES, decode_fields
from rollout_service.store.redis.runs.records import ClosedRecord, OpenRecord, RunKeys

ROWS_AT_ONCE = 1_000
"""The most rollouts that one call looks at, which takes Redis about 1 ms."""
LOOKED_AT = 20_000
_WITH_CODE = (RolloutState.QUEUED, RolloutState.FAILED)
"""Only in these states a rollout may have an error's code."""
_LAST = 2**53


async def find_summaries(
    connection: RedisConnection,
    which: SummaryFilter,
    *,
    order: SummaryOrder,
    after: int | None,
    limit: int,
) -> tuple[list[RolloutSummary], int | None]:
    """Return rollouts after a number, and the number after which to go on, None if nothing is left."""
    bounds = await _span(connection, which)
    if bounds is None:
        return [], None
    search = _RowSearch(connection, which, order == "newest", limit)
    low, high = bounds
    if after is not None:
        low, high = (low, min(high, after - 1)) if search.newest else (max(low, after + 1), high)
    if which.run is not None and which.group is not None:
        await search.look(low, high, ids=await _members(connection, which.run, which.group))
    elif plan := await connection.read("lists_plan", search.text(), low, high, ROWS_AT_ONCE):
        await _follow(search, *plan)
    return search.rows, search.after


class _RowSearch:
    def __init__(self, connection: RedisConnection, which: SummaryFilter, newest: bool, limit: int) -> None:
        self.connection = connection
        self.newest = newest
        self.rows: list[RolloutSummary] = []
        self.after: int | None = None
        """The number after which to go on; None if nothing is left."""
        self._filter, self._states, self._limit = _filter(which), _states(which), limit

    @property
    def wanted(self) -> int:
        return self._limit - len(self.rows)

    @property
    def is_full(self) -> bool:
        return self.wanted == 0

    def text(self, **among: Sequence[str] | Sequence[int]) -> bytes:
        given = self._filter | ({"states": self._states} if "ids" in among else {})
        return to_json({"filter": given, "states": self._states, "newest": self.newest} | among)

    async def look(self, low: int, high: int, **among: Sequence[str] | Sequence[int]) -> None:
        """Look at the rollouts from `low` to `high`, only at some if `among` has their `ids` or `numbers`."""
        found, last = await self.connection.read(
            "lists_summaries", self.text(**among), low, high, ROWS_AT_ONCE, self.wanted
        )
        self.rows += [
            decode_summary(decode_fields(_COLUMNS, values) | {"rollout_id": rollout_id.decode()})
            for rollout_id, values in found
        ]
        self.after = int(last) if last else None


async def _follow(
    search: _RowSearch,
    first: bytes,
    last: bytes,
    ids: Sequence[bytes] | None,
    names: Sequence[Sequence[bytes]],
) -> None:
    low, high = (int(min(float(number), _LAST)) for number in (first, last))
    if ids is not None:
        await search.look(low, high, ids=[name.decode() for name in ids])
    elif names:
        await _look_at_numbers(search, low, high, [[name.decode() for name in some] for some in names])
    else:
        for _ in range(LOOKED_AT // ROWS_AT_ONCE):
            await search.look(low, high)
            if search.after is None or search.is_full:
                break
            low, high = (low, search.after - 1) if search.newest else (search.after + 1, high)


async def _look_at_numbers(search: _RowSearch, low: int, high: int, names: Sequence[Sequence[str]]) -> None:
    left = LOOKED_AT
    for chunks in windows(low, high, newest=search.newest):
        found = await find_numbers(search.connection, names, chunks, newest=search.newest)
        numbers = (number for number in found if low <= number <= high)
        at_once = search.wanted + 1  # often, all of these match
        while some := list(islice(numbers, min(at_once, ROWS_AT_ONCE))):
            await search.look(low, high, numbers=some)
            if search.after is None or not search.is_full:
                search.after = some[-1]
            left, at_once = left - len(some), ROWS_AT_ONCE
            if search.is_full or left <= 0:
                return
    search.after = None


async def _span(connection: RedisConnection, which: SummaryFilter) -> tuple[int, int] | None:
    """Return the lowest and the highest number that a rollout may have; None if there are none."""
    if which.run is None:
        return 0, _LAST
    key = RunKeys(connection.config.root, which.run).run
    state, first, last = await connection.command("HMGET", key, "state", "rollouts_after", "rollouts_until")
    if state is None:
        return None
    return int(first or 0), _LAST if last is None else int(last)


async def _members(connection: RedisConnection, run: str, group: int) -> Sequence[str]:
    keys = RunKeys(connection.config.root, run)
    started = await connection.command("HGET", keys.open, group)
    closed = await connection.command("HGET", keys.closed, group)
    if started is not None:
        record = OpenRecord.decode(started)
        return [*record.members, *record.earlier]
    return [] if closed is None else ClosedRecord.decode(closed).rollout_ids


def _states(which: SummaryFilter) -> Sequence[str]:
    possible = _WITH_CODE if which.error is not None else STATES
    return [state.value for state in possible if not which.states or state in which.states]


def _filter(which: SummaryFilter) -> dict[str, Any]:
    since = None if which.since is None else which.since.timestamp()
    until = None if which.until is None else which.until.timestamp()
    given = {
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


_COLUMNS = (
    *("seq", "state", "attempt", "pool", "environment", "run_id", "group_number", "reward", "stop_reason"),
    *("code", "created_at", "changed_at", "turns", "tokens", "worked", "branch_of"),
)
"""The fields of a row, in the order of `lists.lua`."""


CHUNK = 8_192
"""How many numbers one key has bits for, as in `index.lua`."""
CHUNKS_AT_ONCE = 32
"""How many keys of each name one command reads: 32 kB."""

_Names = Sequence[Sequence[str]]


def windows(low: int, high: int, *, newest: bool) -> Iterator[range]:
    """Yield the chunks between two numbers, in order, for one command at a time."""
    chunks = range(low // CHUNK, high // CHUNK + 1)
    if newest:
        chunks = chunks[::-1]
    for start in range(0, len(chunks), CHUNKS_AT_ONCE):
        yield chunks[start : start + CHUNKS_AT_ONCE]


async def find_numbers(connection: RedisConnection, names: _Names, chunks: range, *, newest: bool) -> Iterator[int]:
    """Return, in order, the numbers in these chunks that have a bit of one name of each list."""
    found = await _read(connection, names, chunks)
    return (number for chunk, bits in zip(chunks, found, strict=True) for number in _set(bits, chunk, newest))


async def _read(connection: RedisConnection, names: _Names, chunks: Sequence[int]) -> list[int]:
    flat = [name for some in names for name in some]
    if not all(names):
        return [0] * len(chunks)
    keys = [connection.key(f"{name}:{chunk}") for chunk in chunks for name in flat]
    answer = iter(await connection.command("MGET", *keys))
    return [reduce(and_, (reduce(or_, (_bits(next(answer)) for _ in some)) for some in names)) for _ in chunks]


def _bits(data: bytes | None) -> int:
    return 0 if data is None else int.from_bytes(data.ljust(CHUNK // 8, b"\0"), "big")


def _set(bits: int, chunk: int, newest: bool) -> Iterator[int]:
    if not bits:
        return
    text = f"{bits:0{CHUNK}b}"
    at = text.rfind("1") if newest else text.find("1")
    while at >= 0:
        yield chunk * CHUNK + at
        at = text.rfind("1", 0, at) if newest else text.find("1", at + 1)
