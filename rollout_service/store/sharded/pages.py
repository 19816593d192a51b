"""Pages of lists that are merged from those of shards.

A page is in order, and following the cursors gives every record once, also those of a shard that was away for some of
the pages: its place in the cursor stays. Only if nothing but such shards is left, the page fails. A record that arrives
meanwhile may be on a later page, where a shard had none on the pages before.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Generic, TypeVar

from api_schemas.errors import FieldError
from rollout_service.base.errors import InvalidFieldError
from rollout_service.store.sharded.shard import Shard, ask_each

_BETWEEN, _BEGIN, _END = ".", "b", "x"

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True)  # slots would break generic classes that are frozen
class PageSource(Generic[P, R]):
    fetch: Callable[[Shard, str | None, int], Awaitable[P]]
    """Returns a page of a shard, given a cursor and the most rows."""
    rows: Callable[[P], Sequence[R]]
    next: Callable[[P], str | None]
    when: Callable[[R], datetime]
    newest: bool = False


@dataclass(frozen=True)  # as above
class MergedPage(Generic[R]):
    rows: list[R]
    next_cursor: str | None


async def merged_page(
    shards: Sequence[Shard], source: PageSource[P, R], cursor: str | None, limit: int
) -> MergedPage[R]:
    """
    Raises:
        StoreError: Every shard that has rows left fails.
        InvalidFieldError: The cursor is not one of an earlier page.
    """
    places = _parse(cursor, len(shards))
    left = [shard for shard in shards if places[shard.number] != _END]
    first = await ask_each(left, lambda shard: source.fetch(shard, _cursor(places, shard), limit))
    first.some()
    taken = _shares(source, first.found, limit)
    # A page says only where it ends, so a shard that gives fewer rows than it has is asked for just these.
    again = [shard for shard in left if 0 < taken[shard.number] < len(_rows(source, first.found, shard))]
    shorter = await ask_each(again, lambda shard: source.fetch(shard, _cursor(places, shard), taken[shard.number]))
    for number in shorter.failures:
        taken[number] = 0
    used = {number: page for number, page in (first.found | shorter.found).items() if taken[number]}
    ended = {n: page for n, page in first.found.items() if not taken[n] and not source.rows(page)}
    for number, page in (used | ended).items():
        places[number] = source.next(page) or _END
    if not (used or ended):
        first.whole()
        shorter.whole()
    rows = list(_merge(source, used))
    is_last = set(places) == {_END}
    return MergedPage(rows, None if is_last else _BETWEEN.join(places))


def _cursor(places: Sequence[str], shard: Shard) -> str | None:
    place = places[shard.number]
    return None if place == _BEGIN else place


def _rows(source: PageSource[P, R], pages: dict[int, P], shard: Shard) -> Sequence[R]:
    return source.rows(pages[shard.number]) if shard.number in pages else ()


def _shares(source: PageSource[P, R], pages: dict[int, P], limit: int) -> Counter[int]:
    marked = ([(source.when(row), number) for row in source.rows(page)] for number, page in sorted(pages.items()))
    merged = heapq.merge(*marked, key=lambda one: one[0], reverse=source.newest)
    return Counter(number for _, number in islice(merged, limit))


def _merge(source: PageSource[P, R], pages: dict[int, P]) -> Sequence[R]:
    rows = (source.rows(page) for _, page in sorted(pages.items()))
    return list(heapq.merge(*rows, key=source.when, reverse=source.newest))


def _parse(cursor: str | None, shards: int) -> list[str]:
    """Return the cursor of each shard: `_BEGIN` before its first page, `_END` after its last."""
    if cursor is None:
        return [_BEGIN] * shards
    places = cursor.split(_BETWEEN)
    if len(places) != shards or set(places) == {_END}:
        problem = FieldError(path="query.cursor", message=f"{cursor!r} is not a cursor")
        raise InvalidFieldError([problem], hint="Pass `next_cursor` of the previous page, or omit the cursor.")
    return places
