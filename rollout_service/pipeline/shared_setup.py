"""Setups that rollouts share: the first of an instance prepares its files, and all start from a snapshot of them.

- One rollout prepares a setup, and the others wait, which counts against no deadline. If it fails or is cancelled,
  those that waited prepare their own sandboxes, as without sharing.
- A setup from which a sandbox did not start is not used again, and stays open for those that are starting from it.
- A snapshot is closed once nobody has used it for a while, sooner if the host is under pressure or there are many or
  large ones, at the latest with `running`. Sandboxes that started from it keep their files.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import anyio
from pydantic_core import to_json

from rollout_service.environments.contract import Environment
from rollout_service.episodes import Episode, WorkClock
from sandboxes import SandboxError, Snapshot

IDLE_SECONDS = 60.0
"""After its last use: the rest of its group, and a retry, come soon."""
LOOK_SECONDS = 2.0
MAX_KEPT = 64
"""Setups that are kept while nobody uses them."""
KEPT_BYTES = 4 << 30
"""For all of these, since nothing else bounds what hostile tasks leave."""


@dataclass(frozen=True, slots=True)
class Setup:
    snapshot: Snapshot
    state: dict[str, Any]

    def give(self, episode: Episode) -> None:
        episode.state.update(deepcopy(self.state))


@dataclass(slots=True)
class _Shared:
    users: int = 0
    used_at: float = 0.0
    setup: Setup | None = None
    failures: int = 0
    is_refused: bool = False
    """A sandbox did not start from it."""
    lock: anyio.Lock = field(default_factory=anyio.Lock)


class SharedSetups:
    def __init__(
        self,
        under_pressure: Callable[[], bool] = lambda: False,
        count: Callable[[bool], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`count` is called for each use, with whether the setup was made before."""
        self._under_pressure, self._count, self._clock = under_pressure, count, clock
        self._entries: dict[Hashable, _Shared] = {}
        self._added = anyio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Close unused setups; at the end, close all."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tidy)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await self._close(list(self._entries))

    @asynccontextmanager
    async def use(
        self, key: Hashable, make: Callable[[], Awaitable[Setup]], clock: WorkClock | None = None
    ) -> AsyncIterator[Setup | None]:
        """Make a setup if there is none; it stays open while the block starts a sandbox from it.

        None if another rollout failed to make it while this one waited. The clock stands still meanwhile.
        """
        entry = self._entries.setdefault(key, _Shared())
        entry.users += 1
        try:
            yield await self._made(entry, make, clock or WorkClock())
        except SandboxError:
            if entry.setup is not None and self._entries.get(key) is entry:
                del self._entries[key]
                self._entries[object()] = entry  # where nobody finds it
                entry.is_refused = True
            raise
        finally:
            entry.users -= 1
            entry.used_at = self._clock()
            if entry.setup is None and not entry.users:
                self._entries.pop(key, None)
            else:
                self._added.set()

    async def _made(self, entry: _Shared, make: Callable[[], Awaitable[Setup]], clock: WorkClock) -> Setup | None:
        failures, shown = entry.failures, clock.seconds
        clock.stop()
        async with entry.lock:
            clock.start(shown)
            if entry.failures > failures and entry.setup is None:
                return None
            was_made = entry.setup is not None
            if not was_made:
                try:
                    entry.setup = await make()
                except BaseException:
                    entry.failures += 1
                    raise
            self._count(was_made)
            return entry.setup

    async def _tidy(self) -> None:
        while True:
            await self._added.wait()
            self._added = anyio.Event()
            while self._entries:
                await anyio.sleep(LOOK_SECONDS)
                await self._close(self._find_unused())

    def _find_unused(self) -> list[Hashable]:
        """Return those unused for long or refused, the oldest of too many, and under pressure all unused ones."""
        idle = [(key, entry) for key, entry in self._entries.items() if not entry.users]
        idle.sort(key=lambda one: one[1].used_at, reverse=True)
        if self._under_pressure():
            return [key for key, _ in idle]
        found: list[Hashable] = []
        size, now = 0, self._clock()
        for place, (key, entry) in enumerate(idle):
            own = entry.setup.snapshot.size_bytes if entry.setup is not None else 0
            is_old = entry.is_refused or now - entry.used_at >= IDLE_SECONDS
            if place - len(found) >= MAX_KEPT or size + own > KEPT_BYTES or is_old:
                found.append(key)
            else:
                size += own
        return found

    async def _close(self, keys: list[Hashable]) -> None:
        # Before the first wait, so that nobody begins to use one of them meanwhile.
        setups = [self._entries.pop(key).setup for key in keys]
        for setup in setups:
            if setup is not None:
                await setup.snapshot.close()


def setup_key(environment: Environment, episode: Episode, identity: str) -> Hashable:
    """Return what the prepared files depend on: the environment, the instance, and the image's files."""
    instance = hashlib.sha256(to_json(episode.instance)).digest()
    return environment.spec.name, instance, identity
