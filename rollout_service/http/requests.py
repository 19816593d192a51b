"""Bounds the bytes of the request bodies that are being read at once.

A sender is given no more than is then left for all others. So a flood under one key, or under several, does not keep
out the usual requests of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

import anyio
from starlette.types import Receive

from rollout_service.base.errors import TooManyBytesError
from rollout_service.base.signals import ChangeSignal

T = TypeVar("T")

WAIT_SECONDS = 10.0
"""How long a body waits for room. Its sender is not read meanwhile, so nothing has to be sent again."""


class BodiesInFlight:
    def __init__(self, most: int, largest: int, *, wait_seconds: float | None = None) -> None:
        """Hold at most `most` bytes, or enough to admit one body of the `largest` size."""
        self._left = max(most, 2 * largest)
        self._wait_seconds = WAIT_SECONDS if wait_seconds is None else wait_seconds
        self._held: Counter[Hashable] = Counter()
        self._released = ChangeSignal()

    def reading(self, owner: Hashable) -> HeldBytes:
        return HeldBytes(self, owner)

    async def take(self, owner: Hashable, size: int) -> None:
        """Wait until there is room.

        Raises:
            TooManyBytesError: There was none in time.
        """
        if not self._has_room(owner, size):
            with anyio.move_on_after(self._wait_seconds):
                while not self._has_room(owner, size):
                    await self._released.wait()
        if not self._has_room(owner, size):
            raise TooManyBytesError(
                "the bodies of too many requests are being read",
                hint="Repeat the request later, or raise `max_bytes_in_flight`.",
            )
        self._held[owner] += size
        self._left -= size

    def _has_room(self, owner: Hashable, size: int) -> bool:
        return self._held[owner] + size <= self._left - size

    def release(self, owner: Hashable, size: int) -> None:
        self._left += size
        self._held[owner] -= size
        if not self._held[owner]:
            del self._held[owner]
        if size:
            self._released.notify()


class HeldBytes:
    """The bytes held for one body, released on exit."""

    __slots__ = ("_bodies", "_bytes", "_owner")

    def __init__(self, bodies: BodiesInFlight, owner: Hashable) -> None:
        self._bodies = bodies
        self._owner = owner
        self._bytes = 0

    async def grow_to(self, size: int) -> None:
        """Wait until there is room for the growth.

        Raises:
            TooManyBytesError: There was none in time.
        """
        if size > self._bytes:
            await self._bodies.take(self._owner, size - self._bytes)
            self._bytes = size

    def release(self) -> None:
        self._bodies.release(self._owner, self._bytes)
        self._bytes = 0

    def __enter__(self) -> HeldBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


CLIENT_CLOSED_REQUEST = 499
"""Only the log has this status: the client disconnected before it was answered."""


async def cancel_on_disconnect(receive: Receive, work: Callable[[], Awaitable[T]]) -> T | None:
    """Return the result, or None if the client disconnects first, which cancels the work at once.

    So no batch is leased to a client that is gone. The body must have been read before. Errors are raised as they are,
    not in a group.
    """
    scope = anyio.CancelScope()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    result: T | None = None
    failure: Exception | None = None
    async with anyio.create_task_group() as watching:
        watching.start_soon(watch)
        with scope:
            try:
                result = await work()
            except Exception as error:  # noqa: BLE001 - raised below, where no group wraps it
                failure = error
        watching.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result
