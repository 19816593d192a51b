"""The pipeline: leases rollouts from the store, sends them through the stages, and settles how each ended.

Guarantees:
- Every lease is settled exactly once, as completed, failed, cancelled, or queued again for another attempt.
- A rollout is never worked on twice at a time, even if the store cannot be written for longer than a lease.
- If the store has lost its last writes, as in a failover, what it gave away is dropped, and what it says is held and is
  not worked on is queued again.
- A rollout begins only while its pool has a backend in service, and that of its sub-agents too. Waiting for one uses no
  attempt and counts against no deadline.
- Only failures that may pass are retried, within a budget.
- A rollout that was interrupted continues from its last saved turn, or begins anew without using an attempt.
- A cancellation takes effect at any moment, and frees everything the rollout held.
- At a shutdown, unfinished rollouts go back to the store with their attempt refunded.
- All tasks live in the task group of `running`; none outlives it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import anyio
import structlog
from anyio.abc import TaskGroup

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import Rollout, RolloutState, Stage
from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import Activity, note_outcome, waits_for
from rollout_service.errors import AttemptsExhaustedError, StoreError, describe
from rollout_service.pipeline.attempt import Attempt, LeaseLostError, NotServedError
from rollout_service.pipeline.claims import ClaimRules
from rollout_service.pipeline.context import AttemptContext
from rollout_service.pipeline.resumption import BEGUN_ANEW, report
from rollout_service.pipeline.semaphore import SemaphoreLike
from rollout_service.policies.turn_log import CannotResumeError
from rollout_service.settings import PipelineSettings
from rollout_service.signals import ChangeSignal, ResettableEvent
from rollout_service.store.contract import Lease

log = structlog.get_logger(__name__)

T = TypeVar("T")

STORE_RETRY_SECONDS = 1.0
CLOSE_SECONDS = 1.0
"""The time that a shutdown gives sandboxes to close before it hands their rollouts back."""

SIGNAL_SECONDS = 0.1
"""Within what time a signal reaches the service and its sandboxes alike."""
_RUNS_IN_SANDBOXES = frozenset({Boundary.SANDBOX, Boundary.ENVIRONMENT})


@dataclass(slots=True)
class ActiveRollout:
    """A leased rollout in the pipeline, and the scope that cancels it."""

    lease: Lease
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    is_lost: bool = False
    """Whether the lease was lost, so that the attempt ends without a result."""


class Pipeline:
    """Works on rollouts, as many at a time as the stages allow."""

    def __init__(
        self, context: AttemptContext, settings: PipelineSettings, claims: ClaimRules | None = None
    ) -> None:
        """Take `claims`, what may be claimed; without them, everything whose pool is in service."""
        self._context = context
        self._claims = claims or ClaimRules()
        self._rules_changed = self._claims.changed.next
        self._settings = settings
        self._active: dict[str, ActiveRollout] = {}
        self._rewinds = context.store.rewinds
        self._pools_changed = anyio.Event()
        self._rollout_ended = ChangeSignal()
        self._started = ResettableEvent(is_set=True)
        self._admission = anyio.CancelScope()
        self._finished_in_drain = 0
        self.finished = 0
        """The rollouts that this pipeline has ended."""
        self._on_finished: tuple[Callable[[Rollout], None], ...] = ()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work until the block is left; then drain, cancel the rest, and hand it back to the store."""
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
        """Whether queued rollouts are being started."""
        return self._started.is_set

    def start(self) -> None:
        """Start queued rollouts (again)."""
        self._started.set()

    def stop(self) -> None:
        """Start no more rollouts; those in progress continue."""
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
        """Have a function told of each rollout that this pipeline ends; it must be quick and must not raise."""
        self._on_finished += (tell,)

    def live(self) -> int:
        """Return how many rollouts are in the pipeline, working or waiting."""
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
        """Drain, unless that is done; then cancel the rest, and hand it back even if it has not ended yet."""
        with anyio.move_on_after(0.0 if self._draining else self._settings.drain_seconds):
            await self.drain()
        work.cancel_scope.cancel()
        with anyio.move_on_after(CLOSE_SECONDS):
            await self.drain()
        if self._active:
            log.warning("sandboxes take long to close", rollouts=sorted(self._active))
            await self._hand_all_back()

    async def _hand_all_back(self) -> None:
        await self._flush_turns()
        try:
            handed_back = await self._context.store.release(self._context.owner)
        except StoreError as error:
            log.error("what is unfinished waits for the next start", error=str(error), hint=error.hint)
        else:
            log.info("pipeline stopped", handed_back=handed_back, finished_meanwhile=self._finished_in_drain)

    async def _admit(self, work: TaskGroup) -> None:
        with self._admission:
            await self._admit_until_drained(work)

    async def _admit_until_drained(self, work: TaskGroup) -> None:
        """Lease rollouts for all free places before the init stage, as soon as there are a place and a rollout."""
        places = self._context.stages.init.places
        while True:
            taken = await acquire_available(places)
            leases: list[Lease] = []
            try:
                leases = await self._claim(taken)
            finally:
                for _ in range(taken - len(leases)):
                    places.release()
            for lease in leases:
                active = self._active[lease.rollout_id] = ActiveRollout(lease)
                work.start_soon(self._work, active, name=f"rollout {lease.rollout_id}")
            await self._apply_cancels()  # a cancellation may have come in between

    async def _claim(self, limit: int) -> list[Lease]:
        """Wait for work in the store and lease it; the result is empty if another service takes it first."""
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
        """If the store may have lost writes, make what it holds in this service's name what is worked on here.

        No claim may be under way, since its leases are not yet worked on.
        """
        store, owner, rewinds = self._context.store, self._context.owner, self._context.store.rewinds
        if rewinds == self._rewinds:
            return
        held = await store.held(owner)
        active = {name: one.lease.token for name, one in self._active.items()}
        if idle := [name for name, token in held.items() if active.get(name) != token]:
            log.warning(
                "the store holds in this service's name what it does not work on", queued_again=sorted(idle)
            )
            await store.release(owner, idle)
        self._drop(one for name, one in self._active.items() if held.get(name) != one.lease.token)
        while any(one.is_lost for one in self._active.values()):
            await self._rollout_ended.wait()
        self._rewinds = rewinds

    async def _renew_leases(self) -> None:
        context = self._context

        async def renew() -> None:
            held = dict(self._active)
            lost = await context.store.renew(
                context.owner, list(held), lease_seconds=self._settings.lease_seconds
            )
            # Some have ended meanwhile; and one that was retried at once may be back under a new lease.
            self._drop(held[one] for one in lost if self._active.get(one) is held[one])

        while True:
            await anyio.sleep(self._settings.lease_seconds / 3)
            await retry_until_stored("renew leases", renew)

    async def _watch_cancels(self) -> None:
        """Cancel rollouts on request, whichever service received it."""
        while True:
            await retry_until_stored("wait for cancellations", self._context.store.wait_for_cancels)
            await self._apply_cancels()

    async def _apply_cancels(self) -> None:
        async def requested() -> list[str]:
            return await self._context.store.cancel_requested(self._context.owner)

        for rollout_id in await retry_until_stored("look for cancellations", requested):
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
                self._context.metrics.count_lost_lease()
                log.warning("the lease was lost; the attempt is dropped")
            except Exception as error:
                log.exception("an attempt could not be settled")
                await self._give_up(active.lease, error)
            finally:
                if (
                    self._active.get(rollout_id) is active
                ):  # a rollout that is retried at once may be back already
                    del self._active[rollout_id]
                self._rollout_ended.notify()

    async def _attempt(self, active: ActiveRollout) -> None:
        attempt = Attempt(self._context, active.lease)
        try:
            with active.scope:
                await self._run(attempt)
            if active.scope.cancelled_caught and active.is_lost:
                raise LeaseLostError(active.lease.rollout_id)
            if active.scope.cancelled_caught:
                await self._finish(attempt, attempt.result(RolloutState.CANCELLED))
        finally:
            await attempt.release()

    async def _give_up(self, lease: Lease, error: Exception) -> None:
        """Fail a rollout whose result may be what cannot be written: record the defect alone.

        A defect must not take other rollouts with it.
        """
        result = Rollout(
            rollout_id=lease.rollout_id,
            state=RolloutState.FAILED,
            task=lease.request.task,
            pool=lease.request.pool,
            error=describe(error),
            created_at=lease.created_at,
        )

        async def finish() -> bool:
            return await self._context.store.finish(lease, self._context.owner, result)

        try:
            await retry_until_stored("write a result", finish)
        except Exception:
            log.exception("a rollout stays unsettled until the next start")

    async def _run(self, attempt: Attempt) -> None:
        """Run an attempt and settle how it ended; a cancellation passes through."""
        try:
            self._check_attempts(attempt.lease)
            result = attempt.result(RolloutState.COMPLETED, score=await attempt.run())
        except LeaseLostError:
            raise
        except NotServedError as error:
            request = attempt.lease.request
            if error.pool != request.pool:  # whose pool is out of service is not claimed anyway
                self._claims.leave(request.task.environment, error.pool)
            await self._hand_back(attempt)
        except CannotResumeError as error:
            await self._begin_anew(attempt, error)
        except Exception as error:  # noqa: BLE001 - whatever an environment raises is settled, not hidden
            await self._settle_failure(attempt, error)
        else:
            await self._finish(attempt, result)

    def _check_attempts(self, lease: Lease) -> None:
        if lease.attempt > self._settings.max_attempts:
            raise AttemptsExhaustedError(
                f"{lease.attempt - 1} attempts began, and the service died during each",
                hint="Look at the service's log and at the host's memory, "
                "then submit the rollout under another id.",
            )

    async def _settle_failure(self, attempt: Attempt, error: Exception) -> None:
        number = (
            attempt.lease.attempt if attempt.stage is not None else None
        )  # no attempt has begun before the first stage
        info = describe(error, stage=attempt.stage, attempt=number)
        self._context.metrics.count_failure(info)
        log.warning(
            "attempt failed",
            code=info.code,
            stage=info.stage,
            error=info.message,
            hint=info.hint,
            exc_info=error if info.code == "internal_error" else None,
        )
        await attempt.release()
        if await self._may_have_been_ended_with_the_service(info):
            log.info("the service ends, and may have taken the attempt with it; another one begins later")
            await self._flush_turns()
            await self._hand_back(attempt)
        elif info.retryable and attempt.lease.attempt < self._settings.max_attempts:
            await self._retry(attempt, info)
        else:
            await self._finish(attempt, attempt.result(RolloutState.FAILED, error=info))

    async def _may_have_been_ended_with_the_service(self, info: ErrorInfo) -> bool:
        """Return whether an attempt may have failed only because the service is about to end.

        Whoever ends it may signal its sandboxes too, as Slurm does, and they may die before the service knows.
        """
        if info.boundary not in _RUNS_IN_SANDBOXES:
            return False
        await anyio.sleep(SIGNAL_SECONDS)
        return self._context.is_stopping()

    async def _retry(self, attempt: Attempt, info: ErrorInfo) -> None:
        delay = self._settings.retry_seconds * 2 ** (attempt.lease.attempt - 1)
        self._context.metrics.count_retry(info)
        keep_turns = self._context.turn_writer is not None and keeps_turns(info)
        if keep_turns:
            await self._flush_turns()

        async def retry() -> bool:
            return await self._context.store.retry(
                attempt.lease,
                self._context.owner,
                info,
                spans=attempt.spans,
                delay_seconds=delay,
                keep_turns=keep_turns,
            )

        note_outcome(state=RolloutState.QUEUED.value, code=info.code)
        await self._settle("queue a rollout again", attempt, retry)

    async def _flush_turns(self) -> None:
        """Save the turns that were made, while their leases are held; give up after a moment if the store fails."""
        if self._context.turn_writer is not None:
            with anyio.move_on_after(CLOSE_SECONDS):
                await self._context.turn_writer.flush()

    async def _begin_anew(self, attempt: Attempt, error: CannotResumeError) -> None:
        """Queue an interrupted rollout again without its saved turns; nothing has failed, so no attempt is used."""
        context, lease = self._context, attempt.lease
        await attempt.release()

        async def restart() -> bool:
            return await context.store.restart(lease, context.owner, spans=attempt.spans)

        note_outcome(state=RolloutState.QUEUED.value)
        await self._settle("queue an interrupted rollout anew", attempt, restart)
        await report(context, lease, attempt.turns, outcome=BEGUN_ANEW, reason=error.reason)

    async def _hand_back(self, attempt: Attempt) -> None:
        """Return an attempt that counts for nothing to the store, where it holds no place."""
        context, rollout_id = self._context, attempt.lease.rollout_id
        await attempt.release()
        note_outcome(state=RolloutState.QUEUED.value)
        with anyio.CancelScope(shield=True):
            await retry_until_stored(
                "hand a rollout back", partial(context.store.release, context.owner, [rollout_id])
            )

    async def _finish(self, attempt: Attempt, result: Rollout) -> None:
        async def finish() -> bool:
            return await self._context.store.finish(attempt.lease, self._context.owner, result)

        await attempt.release()
        note_outcome(
            state=result.state.value,
            reward=result.reward,
            stop_reason=result.stop_reason,
            code=result.error.code if result.error is not None else None,
        )
        await self._settle("write a result", attempt, finish)
        self._context.metrics.count_finished(result)
        self._finished_in_drain += self._draining
        self.finished += 1
        for tell in self._on_finished:
            tell(result)

    async def _settle(self, what: str, attempt: Attempt, write: Callable[[], Awaitable[bool]]) -> None:
        """Write how an attempt ended; keep trying until the store accepts it."""
        with anyio.CancelScope(shield=True), waits_for(StepKind.STORE, what):
            held = await retry_until_stored(what, write)
        if not held:
            raise LeaseLostError(attempt.lease.rollout_id)


def _trace_id(activity: Activity) -> dict[str, str]:
    return {} if activity.trace_id is None else {"trace_id": activity.trace_id}


def keeps_turns(error: ErrorInfo) -> bool:
    """Return whether the next attempt continues from the turns of one that failed.

    It does if the failure says nothing about the agent's work: engines that were gone, or an attempt or its sandbox
    that did not start. A sandbox that failed later may have failed because of what the agent did, which a replay would
    repeat.
    """
    return error.boundary is Boundary.INFERENCE or error.stage in (None, Stage.INIT)


async def retry_until_stored(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Repeat an idempotent call to the store until it succeeds, and log each failure.

    Raises:
        DefectError: The call itself is wrong.
    """
    while True:
        try:
            return await call()
        except StoreError as error:
            log.error("the store failed; trying again", doing=what, error=str(error), hint=error.hint)
        await anyio.sleep(STORE_RETRY_SECONDS)


async def first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Call these at once and wait until the first returns; cancel the others."""
    async with anyio.create_task_group() as tasks:

        async def wait(one: Callable[[], Awaitable[object]]) -> None:
            await one()
            tasks.cancel_scope.cancel()

        for one in waits:
            tasks.start_soon(wait, one)


async def acquire_available(semaphore: SemaphoreLike) -> int:
    """Acquire a semaphore as often as possible, at least once; return how often."""
    await semaphore.acquire()
    taken = 1
    with suppress(anyio.WouldBlock):
        while True:
            semaphore.acquire_nowait()
            taken += 1
    return taken
