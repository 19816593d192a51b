"""Wake-ups on the event loop, so that nobody polls the store. None of them is ever lost."""

from __future__ import annotations

from weakref import WeakValueDictionary

import anyio


class Flag:
    """Up or down; whoever waits goes on once it is up."""

    def __init__(self, *, up: bool = False) -> None:
        self._event = anyio.Event()
        if up:
            self._event.set()

    def put_up(self) -> None:
        """Let everyone go on who waits now or later, until it is put down."""
        self._event.set()

    def put_down(self) -> None:
        """Make those who wait from now on wait for the next `put_up`."""
        if self._event.is_set():
            self._event = anyio.Event()

    async def wait(self) -> None:
        """Wait until it is up."""
        await self._event.wait()


class Level:
    """A number that only grows."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self._grown = anyio.Event()

    def rise(self, value: int) -> None:
        """Raise it to a value; one that is not above changes nothing."""
        if value > self.value:
            self.value = value
            self._grown.set()
            self._grown = anyio.Event()

    async def wait_above(self, value: int) -> int:
        """Wait until it is above a value, and return what it is then."""
        while self.value <= value:
            await self._grown.wait()
        return self.value


class Watch:
    """Something that happens once."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def happen(self) -> None:
        """Let everyone go on."""
        self._event.set()

    async def wait(self) -> None:
        """Wait until it has happened."""
        await self._event.wait()


class Watches:
    """A `Watch` per name, kept for as long as somebody holds it."""

    def __init__(self) -> None:
        self._watches: WeakValueDictionary[str, Watch] = WeakValueDictionary()

    def on(self, name: str) -> Watch:
        """The watch of this name; hold it while waiting."""
        watch = self._watches.get(name)
        if watch is None:
            watch = self._watches[name] = Watch()
        return watch

    def happened(self, name: str) -> None:
        """Let everyone go on who watches this name."""
        watch = self._watches.pop(name, None)
        if watch is not None:
            watch.happen()
