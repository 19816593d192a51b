"""Decide who may start a sandbox, and when: never more than the ceiling, and no more than the host can bear.

Guarantees:
- The sandboxes in use never exceed the ceiling. After it is lowered, nobody is admitted until they fit below it.
- The last place is reserved for graders, so finished work can always be scored. This rules out deadlock: a rollout that
  holds a sandbox may wait for a grader, and the grader never waits for such a rollout.
- Graders come before agents; within each, first come, first served.
- Guests, which belong to no rollout, never wait, and get a place only if nobody else wants one.
- The first agent and the first grader are admitted under any pressure, so work always goes on.
- Leaving the queue, by admission or cancellation, never takes a place from anyone else.
- The reason for waiting is available in words (`hold_reasons`), counted, and logged when it changes.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

import anyio
import anyio.to_thread
import structlog

from sandboxes.scheduling.pressure import HoldReason, HostMetrics, PressureController, Resource

log = structlog.get_logger(__name__)

PERIOD_SECONDS = 1.0
GRADER_PLACES = 1


class Purpose(StrEnum):
    """By descending priority."""

    GRADER = "grader"
    AGENT = "agent"
    GUEST = "guest"
    """Only `admit_guest` admits these."""


class Ticket:
    """The right to have one sandbox alive. Release it when the sandbox has ended."""

    def __init__(self, controller: "AdmissionController", purpose: Purpose) -> None:
        self.purpose = purpose
        self._controller: AdmissionController | None = controller

    def release(self) -> None:
        """Let the next one in. Idempotent."""
        controller, self._controller = self._controller, None
        if controller is not None:
            controller.release(self.purpose)


@dataclass(slots=True, eq=False)
class _QueuedStart:
    admitted: anyio.Event = field(default_factory=anyio.Event)


class AdmissionController:
    """Follows the host's pressure within `running`; outside, the first target stays."""

    def __init__(
        self,
        controller: PressureController,
        read: Callable[[], HostMetrics],
        *,
        ceiling: int,
        on_held_back: Callable[[str], None] | None = None,
        period: float = PERIOD_SECONDS,
    ) -> None:
        """
        Args:
            controller: sets the target; it has the same ceiling.
            read: reads the host's metrics; called in a thread.
            ceiling: the most sandboxes that may be alive; at least two.
            on_held_back: called with each resource for which a start has to wait.
            period: seconds between two readings.
        """
        if ceiling <= GRADER_PLACES:
            raise ValueError("the ceiling leaves no place for an agent's sandbox")
        self._controller = controller
        self._read = read
        self.ceiling = ceiling
        self._on_held_back = on_held_back
        self._period = period
        self._used = dict.fromkeys(Purpose, 0)
        self._queues: dict[Purpose, deque[_QueuedStart]] = {purpose: deque() for purpose in Purpose}
        self._changed = anyio.Event()
        self.host_metrics: HostMetrics | None = None

    @property
    def target(self) -> int:
        return self._controller.decision.target

    @property
    def used(self) -> int:
        return sum(self._used.values())

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @property
    def pressure_reasons(self) -> tuple[HoldReason, ...]:
        return self._controller.decision.hold_reasons

    async def wait_until_short(self, resource: Resource) -> None:
        while not any(hold.resource == resource for hold in self.pressure_reasons):
            await self._changed.wait()

    @property
    def hold_reasons(self) -> tuple[HoldReason, ...]:
        """Why the next agent would wait; empty if it would not."""
        return () if self._may_admit(Purpose.AGENT) else self._reasons()

    def resize(self, ceiling: int) -> None:
        """Change the ceiling. Sandboxes in use stay."""
        if ceiling <= GRADER_PLACES:
            raise ValueError("the ceiling leaves no place for an agent's sandbox")
        self.ceiling = ceiling
        self._controller.resize(ceiling)
        self._admit_waiting()

    def headroom(self, alive: int) -> int:
        """Return how many more may be started ahead; negative if warm ones should give way.

        `alive` is the number of sandboxes alive, including warm ones.
        """
        headroom = self.target - alive
        return min(headroom, 0) if self.pressure_reasons or self.waiting else headroom

    async def admit(self, purpose: Purpose) -> Ticket:
        """Wait until a sandbox may start."""
        if not self.waiting and self._may_admit(purpose):
            self._used[purpose] += 1
            return Ticket(self, purpose)
        waiter = _QueuedStart()
        self._queues[purpose].append(waiter)
        self._admit_waiting()
        if not waiter.admitted.is_set():
            self._count_wait()
        try:
            await waiter.admitted.wait()
        except BaseException:
            if waiter.admitted.is_set():
                self.release(purpose)
            else:
                self._queues[purpose].remove(waiter)
            raise
        return Ticket(self, purpose)

    def admit_guest(self, most: int) -> Ticket | None:
        """Return None if rollouts or the host need the place.

        At most `most` guests are admitted, and always one place fewer than agents could have.
        """
        guests, places = self._used[Purpose.GUEST], self.ceiling - GRADER_PLACES
        fits = self.used < self.target and guests + self._used[Purpose.AGENT] < places
        if not fits or guests >= min(most, places - 1) or self.waiting or self.pressure_reasons:
            return None
        self._used[Purpose.GUEST] += 1
        return Ticket(self, Purpose.GUEST)

    def release(self, purpose: Purpose) -> None:
        """Only `Ticket.release` calls it."""
        self._used[purpose] -= 1
        self._admit_waiting()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow, name="admission")
            try:
                yield self
            finally:
                tasks.cancel_scope.cancel()

    async def _follow(self) -> None:
        failing = False
        while True:
            try:
                self.observe(await anyio.to_thread.run_sync(self._read))
                failing = False
            except (OSError, RuntimeError) as error:  # no descriptor or thread is left for the reading
                if not failing:
                    log.warning("the host's pressure cannot be read; keeping the last reading", error=str(error))
                failing = True
            await anyio.sleep(self._period)

    def observe(self, host_metrics: HostMetrics) -> None:
        before = {hold.resource for hold in self.pressure_reasons}
        self.host_metrics = host_metrics
        decision = self._controller.update(host_metrics, used=self.used, waiting=self.waiting)
        after = {hold.resource for hold in decision.hold_reasons}
        if after - before:
            texts = [hold.text for hold in decision.hold_reasons]
            log.warning("sandbox starts throttled", why=texts, target=decision.target, in_use=self.used)
        elif before and not after:
            log.info("sandbox starts no longer throttled", target=decision.target, in_use=self.used)
        if after != before:
            self._changed.set()
            self._changed = anyio.Event()
        self._admit_waiting()

    def _may_admit(self, purpose: Purpose) -> bool:
        if purpose is Purpose.GRADER:
            return self.used < self.target or self._used[Purpose.GRADER] < GRADER_PLACES
        fits = self.used < self.target or self._used[Purpose.AGENT] == 0
        others = self.used - self._used[Purpose.GRADER]
        return fits and others < self.ceiling - GRADER_PLACES and self.used < self.ceiling

    def _admit_waiting(self) -> None:
        for purpose, queue in self._queues.items():
            while queue and self._may_admit(purpose):
                self._used[purpose] += 1
                queue.popleft().admitted.set()

    def _reasons(self) -> tuple[HoldReason, ...]:
        if self.pressure_reasons:
            return self.pressure_reasons
        if self.target >= self.ceiling - GRADER_PLACES:
            return (HoldReason("ceiling", f"ceiling: {self.used} of {self.ceiling} sandboxes are in use"),)
        return (HoldReason("growth", f"growth: {self.used} in use; the limit is {self.target} and rising"),)

    def _count_wait(self) -> None:
        if self._on_held_back is not None:
            for hold in self._reasons():
                self._on_held_back(hold.resource)
