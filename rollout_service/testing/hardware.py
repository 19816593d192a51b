"""Simulated hardware for a scripted engine: a prefix cache, a batch of bounded size, and time per token.

It models an engine with continuous batching, simply enough to calculate by hand. Requests are admitted in order, as
many as fit in the batch. Prompts are read one after the other, each in the time that its uncached tokens take. Then a
request samples, more slowly the more others run. The content of the cache depends only on the order of the requests.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Sizes in tokens, times in seconds."""

    kv_tokens: int | None = 65_536
    """The size of the prefix cache, for prompts and answers alike; None for no bound."""
    prefill_seconds: float = 1e-4
    """Time to read one prompt token that is not cached."""
    decode_seconds: float = 8e-3
    """Time to sample one token while no other request runs."""
    batch_slowdown: float = 0.02
    """The fraction of `decode_seconds` that each other running request adds to it."""
    max_running: int = 32


@dataclass(slots=True, eq=False)
class _Page:
    tokens: tuple[int, ...]
    above: "_Page | None"
    below: dict[tuple[int, ...], "_Page"] = field(default_factory=dict)
    users: int = 0


@dataclass(slots=True, eq=False)
class CacheHold:
    cached_tokens: int
    pages: list[_Page]


class KVCache:
    """A prefix cache like an engine's, as a tree of pages; it counts tokens and holds no tensors.

    The least recently used pages go first, and pages in use stay.

    Args:
        capacity: tokens that fit; None for no bound.
        page: tokens per page, which are cached together or not at all.
    """

    def __init__(self, capacity: int | None = None, *, page: int = 16) -> None:
        self._capacity = capacity
        self._page = page
        self._root = _Page((), None)
        self._pages: dict[_Page, None] = {}

    @property
    def used_tokens(self) -> int:
        return len(self._pages) * self._page

    def take(self, ids: Sequence[int]) -> CacheHold:
        """Hold the cached pages of `ids`, and add its other whole pages as far as there is room.

        As in an engine, the last token counts as uncached: it has to be read for the next one to be sampled.
        """
        pages: list[_Page] = []
        cached = self._grow(pages, ids) * self._page
        return CacheHold(min(cached, len(ids) - 1), pages)

    def extend(self, hold: CacheHold, ids: Sequence[int]) -> None:
        """Add the pages of an answer; `ids` are prompt and answer."""
        self._grow(hold.pages, ids)

    def release(self, hold: CacheHold) -> None:
        """Release the pages; they stay cached until their room is needed."""
        for page in reversed(hold.pages):  # so a page is evicted after those that follow it
            page.users -= 1
            self._touch(page)
        hold.pages.clear()

    def flush(self) -> None:
        while self._evict_one():
            continue

    def _split(self, ids: Sequence[int], start: int) -> Iterator[tuple[int, ...]]:
        for begin in range(start * self._page, len(ids) - self._page + 1, self._page):
            yield tuple(ids[begin : begin + self._page])

    def _grow(self, pages: list[_Page], ids: Sequence[int]) -> int:
        """Hold the whole pages of `ids` behind these, as far as there is room; return how many were cached."""
        cached = 0
        for tokens in self._split(ids, len(pages)):
            above = pages[-1] if pages else self._root
            page = above.below.get(tokens)
            if page is not None:
                cached += 1
            elif self._has_room():
                page = above.below[tokens] = _Page(tokens, above)
            else:
                break
            page.users += 1
            self._touch(page)
            pages.append(page)
        return cached

    def _touch(self, page: _Page) -> None:
        self._pages.pop(page, None)
        self._pages[page] = None

    def _has_room(self) -> bool:
        return self._capacity is None or self.used_tokens + self._page <= self._capacity or self._evict_one()

    def _evict_one(self) -> bool:
        """Evict the least recently used free leaf; return whether there was one."""
        for page in self._pages:
            if not page.users and not page.below and page.above is not None:
                del self._pages[page]
                del page.above.below[page.tokens]
                return True
        return False


@dataclass(slots=True)
class Admission:
    hold: CacheHold
    seconds_per_token: float

    @property
    def cached_tokens(self) -> int:
        return self.hold.cached_tokens


class Accelerator:
    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.cache = KVCache(hardware.kv_tokens)
        self.running = 0
        self.waiting_tokens = 0
        """Tokens of prompts that have not been read yet, cached or not."""
        self.waiting = 0
        # Both serve waiting requests in the order of arrival.
        self._batch = anyio.Semaphore(hardware.max_running)
        self._reader = anyio.Lock()

    @asynccontextmanager
    async def admit(self, ids: Sequence[int]) -> AsyncIterator[Admission]:
        """Wait for a place in the batch and read the prompt; leaving the context frees the place."""
        self.waiting += 1
        self.waiting_tokens += len(ids)
        is_read = False
        try:
            async with self._batch:
                self.waiting -= 1
                self.running += 1
                try:
                    hold = await self._read(ids)
                    is_read = True
                    self.waiting_tokens -= len(ids)
                    try:
                        yield Admission(hold, self._pace())
                    finally:
                        self.cache.release(hold)
                finally:
                    self.running -= 1
                    self.waiting += 1
        finally:
            self.waiting -= 1
            if not is_read:
                self.waiting_tokens -= len(ids)

    def keep(self, admission: Admission, ids: Sequence[int]) -> None:
        """Cache the answer too; `ids` are prompt and answer without the last token, which the engine has not read."""
        self.cache.extend(admission.hold, ids)

    def load(self) -> dict[str, float]:
        """Return the load, in the format of SGLang's `/v1/loads`."""
        used, room = self.cache.used_tokens, self.hardware.kv_tokens
        load = {
            "num_running_reqs": self.running,
            "num_waiting_reqs": self.waiting,
            "num_waiting_uncached_tokens": self.waiting_tokens,
            "num_used_tokens": used,
            "token_usage": used / room if room else 0.0,
        }
        return load | ({"max_total_num_tokens": room} if room else {})

    async def _read(self, ids: Sequence[int]) -> CacheHold:
        async with self._reader:
            hold = self.cache.take(ids)
            try:
                await anyio.sleep((len(ids) - hold.cached_tokens) * self.hardware.prefill_seconds)
            except BaseException:
                self.cache.release(hold)
                raise
            return hold

    def _pace(self) -> float:
        hardware = self.hardware
        return hardware.decode_seconds * (1 + hardware.batch_slowdown * (self.running - 1))
