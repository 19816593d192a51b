"""Simulated hardware for a scripted engine: a prefix cache, a batch of bounded size, and time per token.

A model of an engine with continuous batching, simple enough to calculate by hand. Requests are admitted in order, as
many as fit in the batch. Prompts are read one after the other, each in the time that its uncached tokens take. Then a
request samples, more slowly the more others run. The content of the cache depends only on the order of the requests.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from rollout_service.testing.kv_cache import CacheHold, KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Sizes in tokens, times in seconds."""

    kv_tokens: int | None = 65_536
    """Size of the prefix cache, for prompts and answers alike; None for no bound."""
    prefill_seconds: float = 1e-4
    """Time to read one prompt token that is not cached."""
    decode_seconds: float = 8e-3
    """Time to sample one token while no other request runs."""
    batch_slowdown: float = 0.02
    """The fraction of `decode_seconds` that each other running request adds to it."""
    max_running: int = 32


@dataclass(slots=True)
class Admission:
    """One request in the batch."""

    hold: CacheHold
    seconds_per_token: float

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were cached when the engine began to read the prompt."""
        return self.hold.cached_tokens


class Accelerator:
    """Runs the requests of one engine."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.cache = KVCache(hardware.kv_tokens)
        self.running = 0
        """Requests in the batch."""
        self.waiting_tokens = 0
        """Tokens of the prompts that have not been read yet, cached or not."""
        self.waiting = 0
        """Requests that wait for a place in the batch."""
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
