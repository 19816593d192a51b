"""Pages of lists that are merged from those of shards.

A page is in order, and following the cursors gives every record once, also those of a shard that was away for some of
the pages: its place in the cursor stays. Only if nothing but such shards is left, the page fails. A record that arrives
meanwhile may be on a later page, where a shard had none on the pages before.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from itertools import islice
from operator import attrgetter
from typing import Protocol, TypeVar

from rollout_service.store.base import wrong_cursor
from rollout_service.store.sharded.shard import Shard, ask_each

_BETWEEN, _BEGIN, _END = ".", "b", "x"
_CREATED_AT = attrgetter("created_at")


class ShardPage(Protocol):
    @property
    def next_cursor(self) -> str | None: ...


class Created(Protocol):
    @property
    def created_at(self) -> datetime: ...


P = TypeVar("P", bound=ShardPage)
R = TypeVar("R", bound=Created)


async def merged_page(
    shards: Sequence[Shard],
    fetch: Callable[[Shard, str | None, int], Awaitable[P]],
    rows: Callable[[P], Sequence[R]],
    cursor: str | None,
    limit: int,
    *,
    newest: bool = False,
) -> tuple[list[R], str | None]:
    """Return the rows of a page, and the cursor of the next one.

    `fetch` returns a page of a shard, given a cursor and the most rows, and `rows` those of such a page.

    Raises:
        StoreError: Every shard that has rows left fails.
        InvalidFieldError: The cursor is not one of an earlier page.
    """
    places = _parse(cursor, len(shards))
    left = [shard for shard in shards if places[shard.number] != _END]
    first = await ask_each(left, lambda shard: fetch(shard, _cursor(places, shard), limit))
    first.some()
    found = {number: rows(page) for number, page in sorted(first.found.items())}
    taken = _shares(found, limit, newest=newest)
    # A page says only where it ends, so a shard that gives fewer rows than it has is asked for just these.
    again = [shard for shard in left if 0 < taken[shard.number] < len(found.get(shard.number, ()))]
    shorter = await ask_each(again, lambda shard: fetch(shard, _cursor(places, shard), taken[shard.number]))
    for number in shorter.failures:
        taken[number] = 0
    used = {number: page for number, page in sorted((first.found | shorter.found).items()) if taken[number]}
    ended = {number: page for number, page in first.found.items() if not found[number]}
    for number, page in (used | ended).items():
        places[number] = page.next_cursor or _END
    if not (used or ended):
        first.whole()
        shorter.whole()
    merged = list(heapq.merge(*map(rows, used.values()), key=_CREATED_AT, reverse=newest))
    return merged, None if set(places) == {_END} else _BETWEEN.join(places)


def _cursor(places: Sequence[str], shard: Shard) -> str | None:
    place = places[shard.number]
    return None if place == _BEGIN else place


def _shares(found: dict[int, Sequence[R]], limit: int, *, newest: bool) -> Counter[int]:
    """Return how many rows of each shard are among the first."""
    marked = ([(row.created_at, number) for row in some] for number, some in found.items())
    merged = heapq.merge(*marked, key=lambda one: one[0], reverse=newest)
    return Counter(number for _, number in islice(merged, limit))


def _parse(cursor: str | None, shards: int) -> list[str]:
    """Return the cursor of each shard: `_BEGIN` before its first page, `_END` after its last."""
    if cursor is None:
        return [_BEGIN] * shards
    places = cursor.split(_BETWEEN)
    if len(places) != shards or set(places) == {_END}:
        raise wrong_cursor(cursor)
    return places
