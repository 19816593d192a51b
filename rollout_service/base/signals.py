"""Wake-ups on the event loop, which spare callers from polling. A signal given before the wait is never lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import anyio

T = TypeVar("T")


class ChangeSignal:
    def __init__(self) -> None:
        self._next: anyio.Event | None = None

    @property
    def next(self) -> anyio.Event:
        """The event of the next change; fetch it before looking, to miss no change in between."""
        if self._next is None:
            self._next = anyio.Event()
        return self._next

    def notify(self) -> None:
        if self._next is not None:
            self._next.set()
            self._next = None

    async def wait(self) -> None:
        await self.next.wait()


class ResettableEvent:
    def __init__(self, *, is_set: bool = False) -> None:
        self._event = anyio.Event()
        if is_set:
            self._event.set()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        if self._event.is_set():
            self._event = anyio.Event()

    async def wait(self) -> None:
        await self._event.wait()


class BatchQueue(Generic[T]):
    """A bounded number of items for one worker, which takes several at once."""

    def __init__(self, *, most: int, at_once: int, collect_seconds: float) -> None:
        """Hold at most `most` items; after a rest, a batch is collected for `collect_seconds`."""
        self._most = most
        self._at_once = at_once
        self._collect_seconds = collect_seconds
        self._waiting: deque[T] = deque()
        self._added = ResettableEvent()
        self._awaited = ResettableEvent()
        self._done = ResettableEvent(is_set=True)

    def put(self, item: T) -> bool:
        """Return False, and drop the item, if too many wait."""
        if len(self._waiting) >= self._most:
            return False
        self._waiting.append(item)
        self._done.clear()
        self._added.set()
        return True

    def discard(self, is_unwanted: Callable[[T], bool]) -> None:
        self._waiting = deque(item for item in self._waiting if not is_unwanted(item))

    async def next_batch(self) -> list[T]:
        """Return the waiting items in the order of their arrival; those of the batch before count as done."""
        while not self._waiting:
            self._added.clear()
            self._awaited.clear()
            self._done.set()
            await self._added.wait()
            with anyio.move_on_after(self._collect_seconds):
                await self._awaited.wait()
        self._awaited.clear()
        return [self._waiting.popleft() for _ in range(min(self._at_once, len(self._waiting)))]

    async def until_done(self) -> None:
        """Wait until everything that was added is done, without waiting for more items."""
        if not self._done.is_set:
            self._awaited.set()
        await self._done.wait()


async def until_all_done(queues: Iterable[BatchQueue[Any]]) -> None:
    """Wait for all queues at once, so that none holds up another."""
    async with anyio.create_task_group() as tasks:
        for queue in queues:
            tasks.start_soon(queue.until_done)


class MonotonicCounter:
    def __init__(self, value: int = 0) -> None:
        self.value = value
        self._advanced = ChangeSignal()

    def advance(self, value: int) -> None:
        """Raise the counter to a value; a lower or equal one changes nothing."""
        if value > self.value:
            self.value = value
            self._advanced.notify()

    def increment(self) -> None:
        self.advance(self.value + 1)

    async def wait_above(self, value: int) -> int:
        while self.value <= value:
            await self._advanced.wait()
        return self.value


class KeyedEvents:
    """One event per key, each set once and kept only while somebody holds it."""

    def __init__(self) -> None:
        self._events: WeakValueDictionary[str, anyio.Event] = WeakValueDictionary()

    def get(self, key: str) -> anyio.Event:
        """Hold on to the event while waiting."""
        event = self._events.get(key)
        if event is None:
            event = self._events[key] = anyio.Event()
        return event

    def set(self, key: str) -> None:
        """Wake everyone who waits for this key; a later `get` returns a new event."""
        event = self._events.pop(key, None)
        if event is not None:
            event.set()


async def first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Run these until the first returns; cancel the others."""
    async with anyio.create_task_group() as tasks:

        async def wait(one: Callable[[], Awaitable[object]]) -> None:
            await one()
            tasks.cancel_scope.cancel()

        for one in waits:
            tasks.start_soon(wait, one)
