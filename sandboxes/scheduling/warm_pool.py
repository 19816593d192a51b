"""Start sandboxes ahead of demand, so a caller gets one in milliseconds with its sessions open.

Guarantees:
- Single use: a sandbox is handed out once, and ends with its user.
- A warm sandbox equals one that a cold start would give now: the same specification except for its label, the same
  image and bound files by identity, alive with all its sessions.
- The sandboxes alive, in use and warm together, never exceed the ceiling. A cold start that needs the place ends a warm
  one.
- Nothing is started ahead while a cold start is under way, or while there is no headroom.
- A cancelled start takes nothing, and leaving `running` ends every warm sandbox.

The pool learns from demand which kinds to keep. A refill that fails is counted, logged, and retried after a delay that
doubles. Until then cold starts serve the demand, and report the problem.
"""

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self

import anyio
import structlog
from anyio.abc import TaskGroup

from sandboxes.config import WarmPoolConfig
from sandboxes.contract import Pausing, Sandbox, SandboxInfo, SandboxProvider, SandboxSpec, SweepReport
from sandboxes.egress.messages import EgressCounts
from sandboxes.errors import SandboxError, SandboxStartError
from sandboxes.sessions.serial_session import open_sessions

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
RETRY_SECONDS = 1.0
RETRY_LIMIT = 60.0

Kind = Hashable
"""Interchangeable sandboxes have the same."""


class WarmPoolObserver(Protocol):
    def acquired(self, *, warm: bool, seconds: float) -> None: ...

    def refill_failed(self) -> None: ...


class SilentWarmPoolObserver:
    def acquired(self, *, warm: bool, seconds: float) -> None: ...

    def refill_failed(self) -> None: ...


@dataclass(slots=True)
class _Demand:
    spec: SandboxSpec
    wanted_at: float
    delay: float = 0.0
    """Of the last failure; 0 after a start that succeeded."""
    retry_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Warm:
    kind: Kind
    sandbox: Sandbox


class WarmPool(SandboxProvider):
    """Refills itself only within `running`."""

    def __init__(
        self,
        provider: SandboxProvider,
        config: WarmPoolConfig | None = None,
        *,
        ceiling: int,
        headroom: Callable[[int], int] | None = None,
        promised: Callable[[], int] | None = None,
        observer: WarmPoolObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            provider: all of its sandboxes count toward the ceiling.
            config: how many sandboxes of each kind to keep; by default one.
            ceiling: the most sandboxes that may be alive at once.
            headroom: returns, for the number alive, how many more may be started ahead now; if negative, that many warm
                ones are ended. By default only the ceiling decides.
            promised: returns how many sandboxes callers are entitled to, which may exceed a ceiling that was lowered.
            observer: receives the pool's events.
            clock: monotonic, in seconds.
        """
        self.name, self.isolates = provider.name, provider.isolates
        self._provider = provider
        self._config = config or WarmPoolConfig()
        self._ceiling = ceiling
        self._headroom = headroom or (lambda alive: self._ceiling - alive)
        self._promised = promised or (lambda: 0)
        self._observer = observer or SilentWarmPoolObserver()
        self._clock = clock
        self._demands: dict[Kind, _Demand] = {}  # the most recently wanted kind last
        self._warm: list[_Warm] = []
        self._refills: Counter[Kind] = Counter()
        self._labels: dict[str, str] = {}
        self._starting = 0
        self._cold = 0
        self._ending = 0
        self._changed = anyio.Event()

    def resize(self, ceiling: int) -> None:
        """End warm sandboxes above the ceiling; those in use stay."""
        self._ceiling = ceiling
        self._notify()

    @property
    def enforced(self) -> frozenset[str]:
        return self._provider.enforced

    @property
    def known_failures(self) -> Mapping[str, str]:
        return self._provider.known_failures

    @property
    def limit_violations(self) -> Mapping[str, int]:
        return self._provider.limit_violations

    @property
    def lingering(self) -> int:
        return self._provider.lingering

    @property
    def used_seconds(self) -> float:
        return self._provider.used_seconds

    async def egress_counts(self) -> EgressCounts:
        return await self._provider.egress_counts()

    @property
    def warm(self) -> int:
        return len(self._warm)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Start sandboxes ahead until the block exits, then end the warm ones."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep, tasks, name="warm pool")
            try:
                yield self
            finally:
                tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as ends:
                while self._warm:
                    ends.start_soon(self._end, self._warm.pop())

    @property
    def pausing(self) -> Pausing:
        return self._provider.pausing

    async def takes_snapshots(self, spec: SandboxSpec) -> bool:
        return await self._provider.takes_snapshots(spec)

    async def saves(self, spec: SandboxSpec) -> bool:
        return await self._provider.saves(spec)

    async def identity(self, spec: SandboxSpec) -> str:
        return await self._provider.identity(spec)

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Return a warm sandbox of this kind, or start one.

        Raises:
            SandboxStartError: The start failed, or sandboxes in use have reached the ceiling.
        """
        began = self._clock()
        kind = await self._record_demand(spec)
        # Nothing is awaited from here until a warm sandbox is returned, so a cancelled start cannot have taken it.
        sandbox = self._take(kind, spec)
        warm = sandbox is not None
        if sandbox is None:
            sandbox, warm = await self._start_cold(kind, spec)
        self._observer.acquired(warm=warm, seconds=self._clock() - began)
        self._notify()
        return sandbox

    async def sweep(self) -> SweepReport:
        return await self._provider.sweep()

    def live(self) -> list[SandboxInfo]:
        warm = {kept.sandbox.id for kept in self._warm}
        found = self._provider.live()
        self._labels = {info.id: self._labels[info.id] for info in found if info.id in self._labels}
        return [
            replace(info, state="warm")
            if info.id in warm
            else replace(info, label=self._labels.get(info.id, info.label))
            for info in found
        ]

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            self._demands.clear()
            self._warm.clear()
            await self._provider.close()

    async def _record_demand(self, spec: SandboxSpec) -> Kind:
        identity = await self._provider.identity(spec)
        kept = replace(spec, label="")
        kind = _make_kind(kept, identity)
        begins_alike = spec.snapshot is None and spec.saved is None
        lasts = begins_alike and spec.lifetime_seconds is None  # a lifetime begins with the start
        if self._config.size and lasts:
            demand = self._demands.pop(kind, None) or _Demand(kept, 0.0)
            demand.wanted_at = self._clock()
            rebuilt = [
                old for old, other in self._demands.items() if _make_kind(other.spec, "") == _make_kind(kept, "")
            ]
            for old in rebuilt:
                del self._demands[old]
            self._demands[kind] = demand
            while len(self._demands) > self._config.max_kinds:
                del self._demands[next(iter(self._demands))]
        return kind

    def _take(self, kind: Kind, spec: SandboxSpec) -> Sandbox | None:
        """Return a healthy warm sandbox that is now the caller's, if there is one. `_keep` ends the others."""
        for kept in self._warm:
            if kept.kind == kind and kept.sandbox.healthy:
                self._warm.remove(kept)
                self._labels[kept.sandbox.id] = spec.label
                return kept.sandbox
        return None

    async def _start_cold(self, kind: Kind, spec: SandboxSpec) -> tuple[Sandbox, bool]:
        """Return whether the sandbox is warm, since one may become ready during the wait for a place."""
        self._cold += 1
        try:
            while self._count_alive() >= max(self._ceiling, self._promised()):
                await self._make_place()
                if sandbox := self._take(kind, spec):
                    return sandbox, True
            return await self._launch(spec), False
        finally:
            self._cold -= 1

    async def _launch(self, spec: SandboxSpec) -> Sandbox:
        self._starting += 1
        try:
            return await self._provider.start(spec)
        finally:
            self._starting -= 1
            self._notify()

    def _count_alive(self) -> int:
        return len(self._provider.live()) + self._starting

    async def _make_place(self) -> None:
        """End the warm sandbox of the least recently requested kind, or wait for refills and ends under way."""
        if self._warm:
            order = list(self._demands)
            last = min(self._warm, key=lambda kept: order.index(kept.kind) if kept.kind in order else -1)
            self._warm.remove(last)
            await self._end(last)
        elif self._refills.total() or self._ending:
            await self._changed.wait()
        else:
            raise SandboxStartError(
                f"the ceiling is reached: {self._count_alive()} sandboxes are alive",
                hint="raise sandboxes.ceiling, or close sandboxes first",
            )

    async def _end(self, kept: _Warm) -> None:
        self._ending += 1
        try:
            with anyio.CancelScope(shield=True):
                await kept.sandbox.close()
        except Exception as error:  # noqa: BLE001 - the provider's own close, or the guard, removes what is left
            log.warning("a warm sandbox could not be closed", sandbox=kept.sandbox.id, error=str(error))
        finally:
            self._ending -= 1
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _keep(self, tasks: TaskGroup) -> None:
        while True:
            moved = self._changed
            for kept in self._find_unwanted():
                self._warm.remove(kept)
                tasks.start_soon(self._end, kept, name=f"end {kept.sandbox.id}")
            while (kind := self._next_refill()) is not None:
                self._refills[kind] += 1
                self._starting += 1  # from now on, so the next check counts it
                tasks.start_soon(self._refill, kind, self._demands[kind].spec, name="start ahead")
            with anyio.move_on_after(LOOK_SECONDS if self._demands or self._warm else None):
                await moved.wait()

    def _find_unwanted(self) -> list[_Warm]:
        oldest = self._clock() - self._config.idle_seconds
        self._demands = {kind: it for kind, it in self._demands.items() if it.wanted_at >= oldest}
        found = [kept for kept in self._warm if kept.kind not in self._demands or not kept.sandbox.healthy]
        surplus = -self._headroom(self._count_alive()) - len(found)
        if surplus > 0:
            found += [kept for kept in self._warm if kept not in found][:surplus]
        return found

    def _next_refill(self) -> Kind | None:
        """Prefer the most recently requested kind; return None if none may start."""
        alive = self._count_alive()
        if self._cold or alive >= self._ceiling or self._refills.total() >= self._config.starts:
            return None
        if self._headroom(alive) <= 0:
            return None
        there = Counter(kept.kind for kept in self._warm) + self._refills
        now = self._clock()
        for kind, demand in reversed(self._demands.items()):
            if there[kind] < self._config.size and demand.retry_at <= now:
                return kind
        return None

    async def _refill(self, kind: Kind, spec: SandboxSpec) -> None:
        """`_starting` already counts it."""
        try:
            sandbox = await self._start_ready(spec)
        except Exception as error:  # noqa: BLE001 - counted and logged; a cold start reports it to the caller
            self._record_failure(kind, error)
        else:
            if demand := self._demands.get(kind):
                demand.delay = 0.0
            self._warm.append(_Warm(kind, sandbox))
        finally:
            self._refills[kind] -= 1
            self._refills += Counter()  # drops the kinds whose count is zero
            self._notify()

    async def _start_ready(self, spec: SandboxSpec) -> Sandbox:
        try:
            sandbox = await self._provider.start(spec)
        finally:
            self._starting -= 1
        try:
            await open_sessions(sandbox, spec.sessions)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await sandbox.close()
            raise
        return sandbox

    def _record_failure(self, kind: Kind, error: Exception) -> None:
        self._observer.refill_failed()
        if demand := self._demands.get(kind):
            delay = demand.delay = min(RETRY_LIMIT, 2 * demand.delay or RETRY_SECONDS)
            demand.retry_at = self._clock() + delay
            defect = None if isinstance(error, SandboxError) else error
            log.warning("no sandbox could be started ahead", error=str(error), retry_seconds=delay, exc_info=defect)


def _make_kind(spec: SandboxSpec, identity: str) -> Kind:
    """Make equal kinds of equivalent specifications, whatever the types of their collections."""
    return identity, *(_freeze(getattr(spec, entry.name)) for entry in fields(spec))


def _freeze(value: object) -> Hashable:
    if isinstance(value, Mapping):
        return frozenset(value.items())
    if isinstance(value, Set):
        return frozenset(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    return value
