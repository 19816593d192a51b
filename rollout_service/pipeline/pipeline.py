"""The pipeline: leases rollouts from the store, sends them through the stages, and settles how each ended.

Guarantees: every lease is settled exactly once, as completed, failed, cancelled, or queued again for another
attempt; only failures that may go away by themselves are tried again, within a budget; a cancellation takes
effect at any moment and frees what the rollout held; at a shutdown what could not end in time goes back to the
store with its attempt refunded. All tasks live in the task group of `running`; none outlives it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
import structlog
from anyio.abc import TaskGroup

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import Rollout, RolloutState
from rollout_service.errors import AttemptsExhaustedError, ServiceError, StoreError, describe
from rollout_service.pipeline.attempt import Attempt, LeaseLostError, Services
from rollout_service.pipeline.waiters import Waiters
from rollout_service.settings import PipelineSettings
from rollout_service.store.contract import Lease

log = structlog.get_logger(__name__)

STORE_RETRY_SECONDS = 1.0


@dataclass(slots=True)
class Job:
    """A lease that is being worked on."""

    lease: Lease
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    cancel_requested: bool = False

    def cancel(self) -> None:
        """End it as cancelled."""
        self.cancel_requested = True
        self.scope.cancel()


class Pipeline:
    """The three stages at work."""

    def __init__(self, services: Services, settings: PipelineSettings) -> None:
        self._services = services
        self._settings = settings
        self._jobs: dict[str, Job] = {}
        self._idle = anyio.Event()
        self._started = anyio.Event()
        self._started.set()
        self.waiters = Waiters()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work until the block is left; then drain, cancel what is left, and hand it back to the store."""
        await self._services.store.release(self._services.owner)
        async with anyio.create_task_group() as work:
            async with anyio.create_task_group() as admission:
                admission.start_soon(self._admit, work)
                work.start_soon(self._heartbeat)
                try:
                    yield
                finally:
                    admission.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await self._drain()
            work.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            handed_back = await self._services.store.release(self._services.owner, refund=True)
        log.info("pipeline stopped", handed_back=handed_back)

    @property
    def started(self) -> bool:
        """Whether queued rollouts are begun."""
        return self._started.is_set()

    def start(self) -> None:
        """Begin queued rollouts (again)."""
        self._started.set()

    def stop(self) -> None:
        """Begin no more rollouts; those that are under way go on."""
        if self._started.is_set():
            self._started = anyio.Event()

    def live(self) -> int:
        """How many rollouts are being worked on or wait inside of the pipeline."""
        return len(self._jobs)

    async def cancel(self, rollout_id: str) -> RolloutState | None:
        """Cancel a rollout wherever it is; returns the state it was in, None for an id not known so far."""
        state = await self._services.store.cancel(rollout_id)
        if job := self._jobs.get(rollout_id):
            job.cancel()
        else:
            self.waiters.finished(rollout_id)
        return state

    async def _drain(self) -> None:
        with anyio.move_on_after(self._settings.drain_seconds):
            while self._jobs:
                self._idle = anyio.Event()
                await self._idle.wait()

    async def _admit(self, work: TaskGroup) -> None:
        """Lease rollouts for all free places before the init stage, as soon as there is one of either."""
        places = self._services.stages.init.places
        while True:
            await self._started.wait()
            taken = await take_all(places)
            leases: list[Lease] = []
            try:
                leases = await self._claim(taken)
            finally:
                for _ in range(taken - len(leases)):
                    places.release()
            for lease in leases:
                job = self._jobs[lease.rollout_id] = Job(lease)
                work.start_soon(self._work, job, name=f"rollout {lease.rollout_id}")

    async def _claim(self, limit: int) -> list[Lease]:
        """Wait until the store has work; it may be that another service takes it first."""
        services = self._services
        await services.store.wait_for_work()
        try:
            return await services.store.claim(
                services.owner, limit=limit, lease_seconds=self._settings.lease_seconds
            )
        except StoreError as error:
            log.error("cannot lease work; trying again", error=str(error), hint=error.hint)
            await anyio.sleep(STORE_RETRY_SECONDS)
            return []

    async def _heartbeat(self) -> None:
        """Renew the leases, and notice cancellations that were asked for through another service."""
        services = self._services
        while True:
            await anyio.sleep(self._settings.lease_seconds / 3)
            try:
                await services.store.renew(
                    services.owner, list(self._jobs), lease_seconds=self._settings.lease_seconds
                )
                for rollout_id in await services.store.cancel_requested(services.owner):
                    if job := self._jobs.get(rollout_id):
                        job.cancel()
            except StoreError as error:
                log.error("cannot renew leases", error=str(error), hint=error.hint)

    async def _work(self, job: Job) -> None:
        rollout_id = job.lease.rollout_id
        with structlog.contextvars.bound_contextvars(rollout_id=rollout_id, attempt=job.lease.attempt):
            try:
                await self._attempt(job)
            except LeaseLostError:
                self._services.metrics.lost_lease()
                log.warning("the lease was lost; the attempt is dropped")
            except Exception:
                # A defect must not take the other rollouts with it. The lease runs out, which counts an attempt.
                log.exception("an attempt could not be settled")
            finally:
                del self._jobs[rollout_id]
                self._idle.set()
                if job.cancel_requested:
                    self.waiters.finished(rollout_id)

    async def _attempt(self, job: Job) -> None:
        attempt = Attempt(self._services, job.lease)
        try:
            with job.scope:
                await self._run(attempt)
            if job.scope.cancelled_caught:
                await self._finish(attempt, attempt.result(RolloutState.CANCELLED))
        finally:
            await attempt.release()

    async def _run(self, attempt: Attempt) -> None:
        """Run an attempt to a settled end; a cancellation passes through."""
        try:
            self._check_attempts(attempt.lease)
            result = attempt.result(RolloutState.COMPLETED, score=await attempt.run())
        except LeaseLostError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever an environment raises is settled, not hidden
            await self._settle_failure(attempt, error)
        else:
            await self._finish(attempt, result)

    def _check_attempts(self, lease: Lease) -> None:
        if lease.attempt > self._settings.max_attempts:
            raise AttemptsExhaustedError(
                f"{lease.attempt - 1} attempts began and none of them ended",
                hint="The service died under this rollout each time; look at its log and at the "
                "host's memory before submitting it under another id.",
            )

    async def _settle_failure(self, attempt: Attempt, error: Exception) -> None:
        info = describe(error, stage=attempt.stage, attempt=attempt.lease.attempt)
        self._services.metrics.failed(info)
        self._log_failure(info, error)
        await attempt.release()
        if info.retryable and attempt.lease.attempt < self._settings.max_attempts:
            await self._retry(attempt, info)
        else:
            await self._finish(attempt, attempt.result(RolloutState.FAILED, error=info))

    def _log_failure(self, info: ErrorInfo, error: Exception) -> None:
        known = info.code != "internal_error"
        log.warning(
            "attempt failed",
            code=info.code,
            stage=info.stage,
            error=info.message,
            hint=info.hint,
            exc_info=None if known and isinstance(error, ServiceError) else error,
        )

    async def _retry(self, attempt: Attempt, info: ErrorInfo) -> None:
        delay = self._settings.retry_seconds * 2 ** (attempt.lease.attempt - 1)
        self._services.metrics.retried(info)
        with anyio.CancelScope(shield=True):
            if not await self._services.store.retry(
                attempt.lease, self._services.owner, info, delay_seconds=delay
            ):
                raise LeaseLostError(attempt.lease.rollout_id)

    async def _finish(self, attempt: Attempt, result: Rollout) -> None:
        """Write the terminal state, for as long as it takes the store to accept it; give up what is held first."""
        await attempt.release()
        with anyio.CancelScope(shield=True):
            while True:
                try:
                    held = await self._services.store.finish(attempt.lease, self._services.owner, result)
                    break
                except StoreError as error:
                    log.error("cannot write a result; trying again", error=str(error), hint=error.hint)
                    await anyio.sleep(STORE_RETRY_SECONDS)
        if not held:
            raise LeaseLostError(attempt.lease.rollout_id)
        self._services.metrics.finished(result)
        self.waiters.finished(result.rollout_id)


async def take_all(semaphore: anyio.Semaphore) -> int:
    """Acquire a semaphore as often as it goes, at least once; returns how often."""
    await semaphore.acquire()
    taken = 1
    with suppress(anyio.WouldBlock):
        while True:
            semaphore.acquire_nowait()
            taken += 1
    return taken
