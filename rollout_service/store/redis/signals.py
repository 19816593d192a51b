"""Signals for those who wait in this service, from what is published on its topics.

A change is never missed, whichever service made it, and nobody is woken by a change that it has already seen: the
numbers of wake-ups and events say which came first. If messages may be lost, everyone looks anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio

from rollout_service.base.signals import ChangeSignal

_NEVER_SEEN = -1


class NewsSignal:
    """Whether something happened after the last look, by its number."""

    def __init__(self) -> None:
        self._newest = 0
        self._seen = _NEVER_SEEN
        self.changed = ChangeSignal()

    @property
    def is_news(self) -> bool:
        return self._newest > self._seen

    def happened(self, number: int) -> None:
        self._newest = max(self._newest, number)
        self.changed.notify()

    def looked(self, number: int) -> None:
        self._seen = number

    def forget(self) -> None:
        """Let the next `wait` return at once."""
        self._newest, self._seen = 0, _NEVER_SEEN
        self.changed.notify()

    async def wait(self) -> None:
        while not self.is_news:
            await self.changed.wait()


class RolloutSignals:
    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is in seconds, for work that comes without any message."""
        self._clock = clock
        self._due = math.inf
        self.work = NewsSignal()
        self.cancels = NewsSignal()

    def told(self, message: bytes | None) -> None:
        """Wake those whom a message to an owner concerns; None means that some may be lost."""
        if message is None:
            self.work.forget()
            self.cancels.forget()
            return
        what, number = message.split()
        (self.cancels if what == b"cancel" else self.work).happened(int(number))

    def cluster_changed(self, message: bytes | None) -> None:
        """Wake those who wait for work if a node may claim again; before, it got nothing."""
        if message is None or message.startswith((b"node.ready", b"node.joined")):
            self.work.forget()

    def claimed(self, *, due_in: float, lease_seconds: float) -> None:
        """Record in how many seconds a claim found that there may be work, and how long its leases last.

        Others' leases that the claim has not seen cannot end before one that began now. Then it is time to look, also
        since whoever is woken for a rollout may end before it has it.
        """
        self._due = self._clock() + min(due_in, lease_seconds)

    @property
    def may_be_work(self) -> bool:
        return self.work.is_news or self._clock() >= self._due

    async def wait_for_work(self) -> None:
        while not self.may_be_work:
            with anyio.move_on_after(self._due - self._clock()):
                await self.work.changed.wait()
