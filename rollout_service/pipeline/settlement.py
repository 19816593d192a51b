"""Settles how attempts end: completed, failed, or queued again for another attempt; and what this node claims next.

Every attempt that still holds its lease is settled exactly once, and has freed its resources before its result is
written. Only failures that may pass are retried, within a budget. A defect in one result takes no other rollout with
it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial

import anyio
import structlog

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import Rollout, RolloutState, Stage
from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import note_outcome, waits_for
from rollout_service.base.errors import AttemptsExhaustedError, describe
from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.serving.turn_log import CannotResumeError
from rollout_service.pipeline.attempt import (
    BEGUN_ANEW,
    SHORTENED,
    Attempt,
    LeaseLostError,
    NotServedError,
    StoreAwayError,
    report,
)
from rollout_service.pipeline.context import AttemptContext
from rollout_service.settings import PipelineSettings
from rollout_service.store.contract import Lease
from rollout_service.store.retrying import retry_until_stored

log = structlog.get_logger(__name__)

FLUSH_SECONDS = 1.0
SIGNAL_SECONDS = 0.1
"""A signal reaches the service and its sandboxes within this time."""
_RUNS_IN_SANDBOXES = frozenset({Boundary.SANDBOX, Boundary.ENVIRONMENT})


class Settlement:
    def __init__(
        self,
        context: AttemptContext,
        settings: PipelineSettings,
        claims: ClaimRules,
        on_finished: Callable[[Rollout], None],
    ) -> None:
        """`on_finished` is called with each written result."""
        self._context = context
        self._settings = settings
        self._claims = claims
        self._on_finished = on_finished

    async def run(self, attempt: Attempt) -> None:
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
        except StoreAwayError:
            await self._hand_back(attempt)
        except CannotResumeError as error:
            await self._begin_anew(attempt, error)
        except Exception as error:  # noqa: BLE001 - whatever an environment raises is settled, not hidden
            await self._settle_failure(attempt, error)
        else:
            await self.finish(attempt, result)

    def _check_attempts(self, lease: Lease) -> None:
        if lease.attempt > self._settings.max_attempts:
            raise AttemptsExhaustedError(
                f"{lease.attempt - 1} attempts began, and the service died during each",
                hint="Look at the service's log and at the host's memory, then submit the rollout under another id.",
            )

    async def _settle_failure(self, attempt: Attempt, error: Exception) -> None:
        info = attempt.describe(error)
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
            await self.flush_turns()
            await self._hand_back(attempt)
        elif info.retryable and attempt.lease.attempt < self._settings.max_attempts:
            await self._retry(attempt, info)
        else:
            await self.finish(attempt, attempt.result(RolloutState.FAILED, error=info))

    async def _may_have_been_ended_with_the_service(self, info: ErrorInfo) -> bool:
        """Return whether the attempt may have failed only because the service is about to end.

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
            await self.flush_turns()
        else:
            await self.forget_sandbox(attempt.lease)
        retry = partial(
            self._context.store.retry,
            attempt.lease,
            self._context.owner,
            info,
            spans=attempt.spans,
            delay_seconds=delay,
            keep_turns=keep_turns,
        )
        note_outcome(state=RolloutState.QUEUED.value, code=info.code)
        await self._settle("queue a rollout again", attempt, retry)

    async def flush_turns(self) -> None:
        """Save turns while their leases are held; give up after a moment if the store fails."""
        if self._context.turn_writer is not None:
            with anyio.move_on_after(FLUSH_SECONDS):
                await self._context.turn_writer.flush()

    async def _begin_anew(self, attempt: Attempt, error: CannotResumeError) -> None:
        """Queue an interrupted rollout again without using an attempt, since nothing has failed.

        It keeps the turns that its saved sandbox has, if only what came after them was different.
        """
        context, lease, turns = self._context, attempt.lease, attempt.turns
        kept = turns.restored if turns is not None and turns.played > turns.restored else 0
        if not kept:
            await self.forget_sandbox(lease)
        await attempt.release()
        restart = partial(context.store.restart, lease, context.owner, spans=attempt.spans, kept_turns=kept)
        note_outcome(state=RolloutState.QUEUED.value)
        await self._settle("queue an interrupted rollout anew", attempt, restart)
        outcome = SHORTENED if kept else BEGUN_ANEW
        await report(context, lease, turns, outcome=outcome, reason=error.reason)

    async def _hand_back(self, attempt: Attempt) -> None:
        """Return an attempt that does not count to the store, where it holds no place."""
        context, rollout_id = self._context, attempt.lease.rollout_id
        await attempt.release()
        note_outcome(state=RolloutState.QUEUED.value)
        with anyio.CancelScope(shield=True):
            await retry_until_stored("hand a rollout back", partial(context.store.release, context.owner, [rollout_id]))

    async def finish(self, attempt: Attempt, result: Rollout) -> None:
        """Free the resources before the result is written."""
        finish = partial(self._context.store.finish, attempt.lease, self._context.owner, result)
        await self.forget_sandbox(attempt.lease)
        await attempt.release()
        note_outcome(
            state=result.state.value,
            reward=result.reward,
            stop_reason=result.stop_reason,
            code=result.error.code if result.error is not None else None,
        )
        await self._settle("write a result", attempt, finish)
        if self._context.turn_writer is not None:
            self._context.turn_writer.discard(attempt.lease.rollout_id)
        self._context.metrics.count_finished(result)
        self._on_finished(result)

    async def forget_sandbox(self, lease: Lease, *, is_elsewhere: bool = False) -> None:
        """Remove the saved sandbox of a rollout that does not go on in it here."""
        if self._context.saved_sandboxes is not None:
            await self._context.saved_sandboxes.forget(lease.rollout_id, is_elsewhere=is_elsewhere)

    async def _settle(self, what: str, attempt: Attempt, write: Callable[[], Awaitable[bool]]) -> None:
        """Write how an attempt ended; keep trying until the store accepts it."""
        with anyio.CancelScope(shield=True), waits_for(StepKind.STORE, what):
            held = await retry_until_stored(what, write)
        if not held:
            raise LeaseLostError(attempt.lease.rollout_id)

    async def give_up(self, lease: Lease, error: Exception) -> None:
        """Record the defect alone, since the result may be the cause of failed writes."""
        result = Rollout(
            rollout_id=lease.rollout_id,
            state=RolloutState.FAILED,
            task=lease.request.task,
            pool=lease.request.pool,
            error=describe(error),
            created_at=lease.created_at,
        )
        finish = partial(self._context.store.finish, lease, self._context.owner, result)
        try:
            await retry_until_stored("write a result", finish)
        except Exception:
            log.exception("a rollout stays unsettled until the next start")


def keeps_turns(error: ErrorInfo) -> bool:
    """Return whether the next attempt continues from the turns of a failed one.

    It does if the failure says nothing about the agent's work: engines that were gone, or an attempt or its sandbox
    that did not start. A sandbox that failed later may have failed because of the agent's actions, which a replay would
    repeat.
    """
    return error.boundary is Boundary.INFERENCE or error.stage in (None, Stage.INIT)


class ClaimRules:
    """The environments that this node claims rollouts of, and whether it claims any.

    A change wakes the pipeline, so that nothing polls.
    """

    def __init__(self, environments: Iterable[str] = ()) -> None:
        """`environments` are the names of this node's environments."""
        self._environments = list(environments)
        self._left: dict[str, str] = {}
        """By environment, the sub-agents' pool for which rollouts stay in the store."""
        self._waits: Mapping[str, float] | None = None
        self._open = True
        self.changed = ChangeSignal()

    def waits(self, pools: Collection[str]) -> Mapping[str, float] | None:
        """Return the seconds that a rollout of each environment is left to other nodes; None if all are claimed now.

        `pools` are those in service. What was left in the store is left out, unless its pool is one of them.
        """
        self._left = {name: pool for name, pool in self._left.items() if pool not in pools}
        if not self._left:
            return self._waits
        waits = dict.fromkeys(self._environments, 0.0) if self._waits is None else self._waits
        return {name: seconds for name, seconds in waits.items() if name not in self._left}

    def leave(self, environment: str, pool: str) -> None:
        """Leave rollouts in the store until this pool, of their sub-agents, is in service."""
        self._left[environment] = pool

    @property
    def is_open(self) -> bool:
        return self._open

    def suit(self, waits: Mapping[str, float] | None) -> None:
        if waits != self._waits:
            self._waits = waits
            self.changed.notify()

    def open(self, is_open: bool) -> None:
        if is_open is not self._open:
            self._open = is_open
            self.changed.notify()

    async def until_open(self) -> None:
        while not self._open:
            await self.changed.wait()
