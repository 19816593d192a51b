"""The index of rollouts in Redis, which `index.lua` writes: the numbers that a search finds in it, and how rollouts
that are older than the index get into it.

Guarantees: numbers come in order, few at a time. Entering older rollouts goes on where a crash interrupted it, in calls
so short that Redis answers others in between, and several services may do it at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import and_, or_

import structlog

from rollout_service.store.redis.connection import RedisConnection

log = structlog.get_logger(__name__)

CHUNK = 8_192
"""How many numbers one key has bits for, as in `index.lua`."""
CHUNKS_AT_ONCE = 32
"""How many keys of each name one command reads: 32 kB."""
ENTERED_AT_ONCE = 500
"""How many older rollouts one call enters, which takes Redis about 5 ms."""
PROGRESS_SECONDS = 5.0

_Names = Sequence[Sequence[str]]


def windows(low: int, high: int, *, newest: bool) -> Iterator[range]:
    """Yield the chunks between two numbers, in order, for one command at a time."""
    chunks = range(low // CHUNK, high // CHUNK + 1)
    if newest:
        chunks = chunks[::-1]
    for start in range(0, len(chunks), CHUNKS_AT_ONCE):
        yield chunks[start : start + CHUNKS_AT_ONCE]


async def find_numbers(
    connection: RedisConnection, names: _Names, chunks: range, *, newest: bool
) -> Iterator[int]:
    """Return the numbers in these chunks that have a bit of one name of each list, in order."""
    found = await _read(connection, names, chunks)
    return (number for chunk, bits in zip(chunks, found, strict=True) for number in _set(bits, chunk, newest))


async def _read(connection: RedisConnection, names: _Names, chunks: Sequence[int]) -> list[int]:
    """Return for each chunk the bits of which each list has one name."""
    flat = [name for some in names for name in some]
    if not all(names):
        return [0] * len(chunks)
    keys = [connection.key(f"{name}:{chunk}") for chunk in chunks for name in flat]
    answer = iter(await connection.command("MGET", *keys))
    return [
        reduce(and_, (reduce(or_, (_bits(next(answer)) for _ in some)) for some in names)) for _ in chunks
    ]


def _bits(data: bytes | None) -> int:
    return 0 if data is None else int.from_bytes(data.ljust(CHUNK // 8, b"\0"), "big")


def _set(bits: int, chunk: int, newest: bool) -> Iterator[int]:
    """Yield the numbers whose bits are set, in order."""
    if not bits:
        return
    text = f"{bits:0{CHUNK}b}"
    at = text.rfind("1") if newest else text.find("1")
    while at >= 0:
        yield chunk * CHUNK + at
        at = text.rfind("1", 0, at) if newest else text.find("1", at + 1)


async def enter_older(connection: RedisConnection) -> None:
    """Enter all rollouts that are older than the index, if it lacks some.

    Raises:
        StoreError: The Redis fails.
    """
    begun = said_at = time.monotonic()
    while True:
        is_whole, number, last = map(int, await connection.call("lists_index", ENTERED_AT_ONCE))
        now = time.monotonic()
        if is_whole or now - said_at >= PROGRESS_SECONDS:
            said_at = now
            if now - begun >= PROGRESS_SECONDS:
                state = "indexed the rollouts" if is_whole else "indexing the rollouts"
                log.info(state, rollout=number, of=last, seconds=round(now - begun, 1))
        if is_whole:
            return
