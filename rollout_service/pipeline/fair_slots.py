"""Slots for sub-agents, granted to episodes in turn.

Never more than `total` are held; an episode that waits is granted its next slot before another one is granted two,
however many it waits for; a waiter that is cancelled takes no slot with it. Nobody who holds a slot waits for another,
so there is no deadlock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

DEFAULT_SUBAGENT_SLOTS = 64


class FairSlots:
    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        self._waiting: OrderedDict[str, deque[anyio.Event]] = OrderedDict()
        """By episode, in the order in which the episodes are next granted one."""

    @property
    def waiting(self) -> int:
        return sum(len(waiters) for waiters in self._waiting.values())

    @asynccontextmanager
    async def slot(self, episode: str) -> AsyncIterator[HeldSlot]:
        """Hold a slot within the block."""
        held = HeldSlot(self, episode)
        await self._acquire(episode)
        try:
            yield held
        finally:
            held.free()

    async def _acquire(self, episode: str) -> None:
        if self.held < self.total:
            self.held += 1
            return
        waiter = anyio.Event()
        self._waiting.setdefault(episode, deque()).append(waiter)
        try:
            await waiter.wait()
        except BaseException:
            if waiter.is_set():
                self._release()
            else:
                self._forget(episode, waiter)
            raise

    def _forget(self, episode: str, waiter: anyio.Event) -> None:
        waiters = self._waiting[episode]
        waiters.remove(waiter)
        if not waiters:
            del self._waiting[episode]

    def _release(self) -> None:
        if not self._waiting:
            self.held -= 1
            return
        episode, waiters = self._waiting.popitem(last=False)
        waiter = waiters.popleft()
        if waiters:
            self._waiting[episode] = waiters
        waiter.set()


class HeldSlot:
    """Implements `episodes.SubagentSlot`."""

    def __init__(self, slots: FairSlots, episode: str) -> None:
        self._slots = slots
        self._episode = episode
        self._is_held = True

    def free(self) -> None:
        if self._is_held:
            self._is_held = False
            self._slots._release()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Give the slot back within the block, then wait for one."""
        self.free()
        yield
        await self._slots._acquire(self._episode)
        self._is_held = True
