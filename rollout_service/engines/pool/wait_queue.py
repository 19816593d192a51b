"""Requests that wait for a free place in a pool; the oldest rollout's request is next.

A rollout that has begun is finished before others begin, which keeps the number of open ones small. Each request
has its own event, and usually only the next one's is set: a freed place costs the same however many wait.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import anyio


@dataclass(slots=True, order=True)
class Waiter:
    """One request in the queue, ordered by its rollout's arrival and then by its own."""

    arrival: int
    number: int
    event: anyio.Event = field(default_factory=anyio.Event, compare=False)
    has_left: bool = field(default=False, compare=False)

    async def wait(self) -> None:
        """Wait until it is worth looking for a place again."""
        await self.event.wait()
        self.event = anyio.Event()


class WaitQueue:
    """The requests that wait; falsy while there are none."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []
        self._numbers = count()
        self._arrivals: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def arrival(self, rollout: str | None) -> int:
        """Return the rollout's arrival number (lower is older); an anonymous request gets a new one."""
        if rollout is None:
            return next(self._numbers)
        if rollout not in self._arrivals:
            self._arrivals[rollout] = next(self._numbers)
        return self._arrivals[rollout]

    def release(self, rollout: str) -> None:
        self._arrivals.pop(rollout, None)

    @contextmanager
    def join(self, arrival: int) -> Iterator[Waiter]:
        """Stay in the queue while the context lasts."""
        waiter = Waiter(arrival, next(self._numbers))
        heappush(self._waiters, waiter)
        try:
            yield waiter
        finally:
            waiter.has_left = True
            self.wake_next()

    def is_next(self, waiter: Waiter) -> bool:
        return self._waiters[0] is waiter

    def wake_all(self) -> None:
        """Wake everyone after a change of the pool, since each has its own time limit during a pause."""
        for waiter in self._waiters:
            waiter.event.set()

    def wake_next(self) -> None:
        """Wake the next one, because a place may have become free."""
        while self._waiters and self._waiters[0].has_left:
            heappop(self._waiters)
        if self._waiters:
            self._waiters[0].event.set()
