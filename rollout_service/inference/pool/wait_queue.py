"""Requests that wait for a free place in a pool: the one of the oldest rollout is next.

A rollout that has begun ends before others begin, so that the number of those that are open stays small. Each
request has a bell of its own, and mostly only the next one's is rung: a free place costs the same however many wait.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import anyio


@dataclass(slots=True, order=True)
class Place:
    """One request's place in the line."""

    age: int
    number: int
    bell: anyio.Event = field(default_factory=anyio.Event, compare=False)
    has_left: bool = field(default=False, compare=False)

    async def rung(self) -> None:
        """Wait until it is worth looking again."""
        await self.bell.wait()
        self.bell = anyio.Event()


class Line:
    """The requests that wait; false while there are none."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._numbers = count()
        self._ages: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def age(self, rollout: str | None) -> int:
        """When a rollout was first heard of, as a number that grows; one without a name is heard of now."""
        if rollout is None:
            return next(self._numbers)
        if rollout not in self._ages:
            self._ages[rollout] = next(self._numbers)
        return self._ages[rollout]

    def release(self, rollout: str) -> None:
        """The rollout has ended."""
        self._ages.pop(rollout, None)

    @contextmanager
    def place(self, age: int) -> Iterator[Place]:
        """Stand in the line while the context lasts."""
        place = Place(age, next(self._numbers))
        heappush(self._places, place)
        try:
            yield place
        finally:
            place.has_left = True
            self.ring()

    def is_next(self, place: Place) -> bool:
        """Whether nobody stands before it."""
        return self._places[0] is place

    def ring_all(self) -> None:
        """The pool has changed: let everyone look, since a pause has a limit for each."""
        for place in self._places:
            place.bell.set()

    def ring(self) -> None:
        """A place has become free: let the next one look."""
        while self._places and self._places[0].has_left:
            heappop(self._places)
        if self._places:
            self._places[0].bell.set()
