"""The pipeline: leases rollouts, sends them through the stages, and hands back those that have not ended.

- Every lease is settled exactly once, as completed, failed, cancelled, or queued again for another attempt.
- A rollout is never worked on twice at a time, even if the store cannot be written for longer than a lease.
- If the store has lost its last writes, as in a failover, rollouts that it no longer knows as leased are dropped, and
  those that it believes to be at work here but are not are queued again.
- A rollout begins only while its pool and that of its sub-agents have a backend in service. Waiting for one uses no
  attempt and counts against no deadline.
- Only failures that may pass are retried, within a budget.
- A rollout that was interrupted continues from its last saved turn, or begins anew without using an attempt.
- A cancellation takes effect at any moment, and frees everything the rollout held.
- At a shutdown, unfinished rollouts go back to the store with their attempt refunded.
- All tasks live in the task group of `running`; none outlives it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio
import structlog
from anyio.abc import TaskGroup

from api_schemas.rollouts import Rollout, RolloutState
from rollout_service.activity import Activity
from rollout_service.base.errors import StoreError
from rollout_service.base.signals import ChangeSignal, ResettableEvent, first_of
from rollout_service.pipeline.attempt import Attempt, LeaseLostError
from rollout_service.pipeline.context import AttemptContext
from rollout_service.pipeline.settlement import ClaimRules, Settlement
from rollout_service.settings import PipelineSettings
from rollout_service.store.contract import Lease
from rollout_service.store.retrying import retry_until_stored

log = structlog.get_logger(__name__)

CLOSE_SECONDS = 1.0
"""For sandboxes to close at a shutdown, before their rollouts are handed back."""


@dataclass(slots=True)
class ActiveRollout:
    lease: Lease
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    is_lost: bool = False
    """The lease was lost, so the attempt ends without a result."""


class Pipeline:
    def __init__(self, context: AttemptContext, settings: PipelineSettings, claims: ClaimRules | None = None) -> None:
        """Without `claims`, everything whose pool is in service is claimed."""
        self._context = context
        self._claims = claims or ClaimRules()
        self._rules_changed = self._claims.changed.next
        self._settings = settings
        self._active: dict[str, ActiveRollout] = {}
        self._cancelled: frozenset[str] = frozenset()
        """Cancellations requested of this service, as of the last look."""
        self._rewinds = context.store.rewinds
        self._pools_changed = anyio.Event()
        self._rollout_ended = ChangeSignal()
        self._started = ResettableEvent(is_set=True)
        self._start_called = False
        self._admission = anyio.CancelScope()
        self._finished_in_drain = 0
        self.finished = 0
        """Rollouts that this pipeline has ended."""
        self._on_finished: tuple[Callable[[Rollout], None], ...] = ()
        self._settlement = Settlement(context, settings, self._claims, self._count)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work within the block; then drain, cancel the rest, and hand it back to the store."""
        recovered = await self._context.store.recover(self._context.owner)
        if recovered:
            log.info("queued again what a crash left", rollouts=recovered)
        async with anyio.create_task_group() as work:
            work.start_soon(self._admit, work)
            work.start_soon(self._renew_leases)
            work.start_soon(self._watch_cancels)
            try:
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    await self._wind_down(work)
        with anyio.CancelScope(shield=True):
            await self._hand_all_back()

    @property
    def started(self) -> bool:
        return self._started.is_set

    def start(self) -> bool:
        """Start queued rollouts (again); return False if this was called before, and not `stop` since."""
        is_first, self._start_called = not self._start_called, True
        self._started.set()
        return is_first

    def stop(self) -> None:
        self._start_called = False
        self._started.clear()

    async def drop_all(self) -> None:
        """Drop all rollouts in progress, whose leases are lost, and wait until they have ended."""
        self._drop(list(self._active.values()))
        while any(active.is_lost for active in self._active.values()):
            await self._rollout_ended.wait()

    def _drop(self, lost: Iterable[ActiveRollout]) -> None:
        for active in lost:
            active.is_lost = True
            active.scope.cancel()

    def on_finished(self, tell: Callable[[Rollout], None]) -> None:
        """Call a function with each ended rollout; it must be quick and must not raise."""
        self._on_finished += (tell,)

    def _count(self, result: Rollout) -> None:
        self._finished_in_drain += self._draining
        self.finished += 1
        for tell in self._on_finished:
            tell(result)

    def live(self) -> int:
        """Count rollouts, working or waiting."""
        return len(self._active)

    @property
    def _draining(self) -> bool:
        return self._admission.cancel_called

    async def drain(self) -> None:
        """Start nothing more, and wait until the rollouts in progress have ended."""
        self._admission.cancel()
        while self._active:
            await self._rollout_ended.wait()

    async def _wind_down(self, work: TaskGroup) -> None:
        """Drain, unless that is done; then cancel the rest, and hand it back even if it has not ended."""
        with anyio.move_on_after(0.0 if self._draining else self._settings.drain_seconds):
            await self.drain()
        work.cancel_scope.cancel()
        with anyio.move_on_after(CLOSE_SECONDS):
            await self.drain()
        if self._active:
            log.warning("sandboxes take long to close", rollouts=sorted(self._active))
            await self._hand_all_back()

    async def _hand_all_back(self) -> None:
        await self._settlement.flush_turns()
        try:
            handed_back = await self._context.store.release(self._context.owner)
        except StoreError as error:
            log.error("what is unfinished waits for the next start", error=str(error), hint=error.hint)
        else:
            log.info("pipeline stopped", handed_back=handed_back, finished_meanwhile=self._finished_in_drain)

    async def _admit(self, work: TaskGroup) -> None:
        """Until drained, lease rollouts for all free places before the init stage."""
        places = self._context.stages.init.places
        with self._admission:
            while True:
                taken = await places.acquire_all()
                leases: list[Lease] = []
                try:
                    leases = await self._claim(taken)
                finally:
                    for _ in range(taken - len(leases)):
                        places.release()
                for lease in leases:
                    active = self._active[lease.rollout_id] = ActiveRollout(lease)
                    if lease.rollout_id in self._cancelled:
                        active.scope.cancel()
                    work.start_soon(self._work, active, name=f"rollout {lease.rollout_id}")

    async def _claim(self, limit: int) -> list[Lease]:
        """Wait for work; return nothing if another service takes it first."""
        context = self._context

        async def claim() -> list[Lease]:
            await first_of(context.store.wait_for_work, self._pools_changed.wait, self._rules_changed.wait)
            await self._reconcile()
            await self._started.wait()
            await self._claims.until_open()
            # Taken before the rules are read: one that changes during the claim must lead to another claim.
            self._rules_changed = self._claims.changed.next
            pools, self._pools_changed = context.policies.in_service()
            if not pools:
                await self._pools_changed.wait()
                return []
            take = partial(
                context.store.claim,
                context.owner,
                limit=limit,
                lease_seconds=self._settings.lease_seconds,
                pools=pools,
                waits=self._claims.waits(pools),
            )
            leases = await take()
            while context.store.rewinds != self._rewinds:  # it may have leased what is still worked on
                await self._reconcile()
                leases = await take()
            return leases

        return await retry_until_stored("lease work", claim)

    async def _reconcile(self) -> None:
        """If the store may have lost writes, make its leases of this service equal to the rollouts at work here.

        No claim may be under way, since its leases are not yet worked on.
        """
        store, owner, rewinds = self._context.store, self._context.owner, self._context.store.rewinds
        if rewinds == self._rewinds:
            return
        active = {name: one.lease.token for name, one in self._active.items()}
        held = await store.held(owner, believed=active)
        if idle := [name for name, token in held.items() if active.get(name) != token]:
            log.warning("the store holds in this service's name what it does not work on", queued_again=sorted(idle))
            await store.release(owner, idle)
        self._drop(one for name, one in self._active.items() if held.get(name) != one.lease.token)
        while any(one.is_lost for one in self._active.values()):
            await self._rollout_ended.wait()
        self._rewinds = rewinds

    async def _renew_leases(self) -> None:
        context = self._context

        async def renew() -> None:
            held = dict(self._active)
            lost = await context.store.renew(context.owner, list(held), lease_seconds=self._settings.lease_seconds)
            # Some have ended meanwhile; and one that was retried at once may be back under a new lease.
            self._drop(held[one] for one in lost if self._active.get(one) is held[one])

        while True:
            await anyio.sleep(self._settings.lease_seconds / 3)
            await retry_until_stored("renew leases", renew)

    async def _watch_cancels(self) -> None:
        """Cancel rollouts on request, whichever service received it."""
        store, owner = self._context.store, self._context.owner
        while True:
            await retry_until_stored("wait for cancellations", store.wait_for_cancels)
            requested = await retry_until_stored("look for cancellations", partial(store.cancel_requested, owner))
            self._cancelled = frozenset(requested)  # also what is leased, and not yet worked on
            for rollout_id in requested:
                if active := self._active.get(rollout_id):
                    active.scope.cancel()

    async def _work(self, active: ActiveRollout) -> None:
        rollout_id, attempt, request = active.lease.rollout_id, active.lease.attempt, active.lease.request
        working = self._context.activities.working(
            rollout_id,
            attempt=attempt,
            environment=request.task.environment,
            run_id=active.lease.run_id,
            group=active.lease.group,
            trace=request.trace,
        )
        ids = {"rollout_id": rollout_id, "attempt": attempt}
        with working as activity, structlog.contextvars.bound_contextvars(**ids, **_trace_id(activity)):
            try:
                await self._attempt(active)
            except LeaseLostError:
                await self._settlement.forget_sandbox(active.lease, is_elsewhere=True)
                self._context.metrics.count_lost_lease()
                log.warning("the lease was lost; the attempt is dropped")
            except Exception as error:
                log.exception("an attempt could not be settled")
                await self._settlement.give_up(active.lease, error)
            finally:
                if self._active.get(rollout_id) is active:  # a rollout that is retried at once may be back already
                    del self._active[rollout_id]
                self._rollout_ended.notify()

    async def _attempt(self, active: ActiveRollout) -> None:
        attempt = Attempt(self._context, active.lease)
        try:
            with active.scope:
                await self._settlement.run(attempt)
            if active.scope.cancelled_caught and active.is_lost:
                raise LeaseLostError(active.lease.rollout_id)
            if active.scope.cancelled_caught:
                await self._settlement.finish(attempt, attempt.result(RolloutState.CANCELLED))
        finally:
            await attempt.release()


def _trace_id(activity: Activity) -> dict[str, str]:
    return {} if activity.trace_id is None else {"trace_id": activity.trace_id}
