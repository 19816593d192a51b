"""The manager of all runs: begins groups as they are needed, repeats what failed, closes groups that have ended.

Guarantees: what it decides by is in the store, so that a crash at any moment neither repeats nor skips a task, and a
step that was cut short is simply made again. A run that cannot go on, also since the store lost a part of it, is paused
with its problem and let be until its state is changed; it stops no other.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress

import anyio
import anyio.lowlevel
import structlog

from api_schemas.errors import Boundary
from api_schemas.rollouts import Rollout, RolloutState
from api_schemas.runs import RunRequest, RunState
from api_schemas.tasks import Task
from rollout_service.errors import RecordLostError, StoreError, describe
from rollout_service.groups import (
    CANCELLED,
    SURPLUS,
    FairScheduler,
    FilterChain,
    FilterRegistry,
    StragglerRule,
)
from rollout_service.ids import SampleId
from rollout_service.pipeline.pipeline import retry_until_stored
from rollout_service.runs.closing import close_group
from rollout_service.runs.estimates import RunEstimates
from rollout_service.runs.planning import (
    ActiveRun,
    claim_groups,
    has_surplus,
    new_group,
    rollout_request,
)
from rollout_service.runs.task_source import Reopen, RunTasks
from rollout_service.store.codec.rollouts import RESTORE
from rollout_service.store.contract import Store
from rollout_service.store.rules import oldest_allowed
from rollout_service.store.runs_contract import GroupMember, OpenGroup, RetentionPolicy, RunRecord
from rollout_service.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
"""How often runs are looked at without news: for stragglers, and for versions that a pool has reached."""
GATHER_SECONDS = 0.01
"""News that comes within this is taken together."""
PRUNE_SECONDS = 60.0
_HOPELESS = frozenset({Boundary.ENVIRONMENT, Boundary.REQUEST})
"""Failures beyond these boundaries come again whenever the rollout is repeated."""


class RunManager:
    """Works on all runs of a store."""

    def __init__(
        self,
        store: Store,
        filters: FilterRegistry,
        *,
        places: int,
        reopen: Reopen,
        pool_version: Callable[[str], int],
        metrics: Metrics,
        retention: RetentionPolicy | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`places` is how many rollouts of all runs are under way at once; more would only wait in the store."""
        self._store = store
        self._runs = store.runs
        self._filters = filters
        self._places = places
        self._reopen = reopen
        self._pool_version = pool_version
        self._metrics = metrics
        self._retention = retention or RetentionPolicy()
        self._clock = clock
        self._scheduler = FairScheduler()
        self._estimates: dict[str, RunEstimates] = {}
        self._tasks: dict[str, tuple[int, RunTasks]] = {}
        self._stuck: dict[str, RunState] = {}
        """The state in which a run could not be settled; tried again only in another one."""
        self._strict: set[str] = set()
        """Runs whose last lease was not to have stale tokens; what nobody leased yet may be wanted as it is."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work until the block is left."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._work)
            tasks.start_soon(self._prune)
            yield
            tasks.cancel_scope.cancel()

    def acceptance_rate(self, run: RunRecord) -> float:
        """The share of a run's groups that are expected to pass its filters."""
        return (self._estimates.get(run.run_id) or RunEstimates.from_record(run)).acceptance.rate

    def chain(self, request: RunRequest) -> FilterChain:
        """The filters of a run. Raises InvalidFieldError, ConfigurationError."""
        made = [
            self._filters.make(spec.name, spec.options, field=f"body.filters.{index}")
            for index, spec in enumerate(request.filters)
        ]
        return FilterChain(made, request.min_usable)

    def resize(self, places: int) -> None:
        """Change how many rollouts of all runs are under way at once."""
        self._places = places

    async def sync_version(self, run: RunRecord) -> RunRecord:
        """The run with the version that its pool has reached, if that is newer."""
        reached = self._pool_version(run.request.pool)
        return await self._runs.update(run.run_id, version=reached) if reached > run.version else run

    async def mask_stale(self, run_id: str, *, strict: bool = True) -> None:
        """Mask what has grown too old for a run's trainer, now and whenever its version moves.

        Without `strict` leave it from now on, as for a trainer that takes what is stale. Raises StoreError.
        """
        if not strict:
            self._strict.discard(run_id)
            return
        self._strict.add(run_id)
        run = await self._runs.get(run_id)
        await self._mask_stale(run, self.chain(run.request))

    async def _mask_stale(self, run: RunRecord, chain: FilterChain) -> None:
        bound = self._bound(run)
        if bound is None:
            return
        for group in await self._runs.stale_groups(run.run_id, bound):
            samples = await self._samples(group)
            revised = close_group(run.request, chain, group.number, samples, bound=bound)
            await self._runs.reclose_group(run.run_id, revised)

    def _bound(self, run: RunRecord) -> int | None:
        """The oldest version that a sample may have; None while nothing is masked for its age."""
        return oldest_allowed(run) if run.run_id in self._strict else None

    async def _work(self) -> None:
        seen, active = 0, True
        while True:
            with anyio.move_on_after(LOOK_SECONDS if active else None):
                seen = await self._runs.wait_for_change(seen)
                await anyio.sleep(GATHER_SECONDS)
            active = await retry_until_stored("work on runs", self.step)

    async def step(self) -> bool:
        """Do for every run what there is to do; return whether any run is active.

        Raises StoreError, where the store failed for one run alone after the others have had their turn.
        """
        active: list[ActiveRun] = []
        failure: StoreError | None = None
        runs = await self._runs.active()
        for gone in self._stuck.keys() - {run.run_id for run in runs}:
            del self._stuck[gone]
        for run in runs:
            try:
                found = await self._guarded(run)
            except StoreError as error:
                failure = failure or error
                continue
            if found is not None:
                active.append(found)
                rate = found.estimates.acceptance.rate
                self._metrics.set_run(run.run_id, found.run.counters, rate)
        await self._begin(active)
        if failure is not None:
            raise failure
        self._forget_all_but({one.run.run_id for one in active} | self._stuck.keys())
        return bool(active)

    def _forget_all_but(self, kept: set[str]) -> None:
        for gone in self._estimates.keys() - kept:
            del self._estimates[gone]
            self._tasks.pop(gone, None)
            self._strict.discard(gone)
            self._scheduler.forget(gone)
            self._metrics.clear_run(gone)
            log.info("run has no more to do", run=gone)

    async def _guarded(self, run: RunRecord) -> ActiveRun | None:
        """Settle one run; whatever is wrong with it pauses it. Raises StoreError."""
        if self._stuck.get(run.run_id) is run.state:
            return None
        try:
            settled = await self._settle(run)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - it is shown in the run, and must not stop the others
            self._stuck[run.run_id] = (await self._pause(run, error)).state
            return None
        self._stuck.pop(run.run_id, None)
        return settled

    async def _pause(self, run: RunRecord, error: Exception) -> RunRecord:
        """Stop a run, and show its problem."""
        info = describe(error)
        state = RunState.PAUSED if run.state is RunState.RUNNING else None
        stopped = await self._runs.update(run.run_id, state=state, problem=info)
        self._tasks.pop(run.run_id, None)
        self._metrics.count_stopped_run(info)
        log.error(
            "a run cannot go on",
            run=run.run_id,
            code=info.code,
            error=info.message,
            hint=info.hint,
            exc_info=error if info.code == "internal_error" else None,
        )
        return stopped

    # -- groups under way ------------------------------------------------------

    async def _settle(self, run: RunRecord) -> ActiveRun:
        run = await self.sync_version(run)
        estimates = self._estimates.setdefault(run.run_id, RunEstimates.from_record(run))
        active = ActiveRun(run, self.chain(run.request), estimates, await self._runs.open_groups(run.run_id))
        for group in active.groups:
            cancel_reason = CANCELLED if run.state is RunState.ENDED else group.cancel_reason
            if cancel_reason is not None:
                await self._cancel(group.members)
            await self._settle_group(active, group, cancel_reason)
        await self._mask_stale(run, active.chain)
        active.run = await self._runs.get(run.run_id)
        if has_surplus(active.run):
            await self._runs.cancel_groups(run.run_id, SURPLUS)
        active.groups = await self._runs.open_groups(run.run_id)
        await self._cut_stragglers(active)
        return active

    async def _settle_group(self, active: ActiveRun, group: OpenGroup, cancel_reason: str | None) -> None:
        """Repeat what failed, and close the group if all has ended."""
        repeated = False
        if cancel_reason is None:
            _refuse_lost(group)
            for member in group.members:
                if member.state is RolloutState.FAILED:
                    repeated |= await self._repeat(active.run, group.number, member)
        if repeated or not all(member.state.terminal for member in group.members):
            return
        samples = await self._samples(group, whole=cancel_reason is None)
        whole = len(samples) == active.run.request.group_size
        cancelled = any(member.state is RolloutState.CANCELLED for member in group.members)
        closure = close_group(
            active.run.request,
            active.chain,
            group.number,
            samples,
            cancel_reason=cancel_reason if cancelled or not whole else None,
            bound=self._bound(active.run),
        )
        await self._runs.close_group(active.run.run_id, closure)
        active.estimates.record_closure(
            closure, [rollout for _, rollout in samples], [member.is_straggler for member, _ in samples]
        )

    async def _samples(self, group: OpenGroup, *, whole: bool = True) -> list[tuple[GroupMember, Rollout]]:
        """Return the rollouts of a group that has ended.

        Raises RecordLostError if one is gone or damaged; it is left out unless the group is wanted whole.
        """
        if whole:
            _refuse_lost(group)
        samples: list[tuple[GroupMember, Rollout]] = []
        for member in group.members:
            with nullcontext() if whole else suppress(RecordLostError):
                samples.append((member, await self._rollout(member)))
        return samples

    async def _rollout(self, member: GroupMember) -> Rollout:
        rollout = await self._store.get(member.rollout_id)
        if rollout is None:
            raise RecordLostError(f"the rollout {member.rollout_id} of a group is gone", hint=RESTORE)
        return rollout

    async def _repeat(self, run: RunRecord, number: int, member: GroupMember) -> bool:
        """Roll a failed sample out again, if that may help and the budget allows."""
        retry = SampleId.parse(member.rollout_id).retry + 1
        rollout = await self._rollout(member)
        hopeless = rollout.error is not None and rollout.error.boundary in _HOPELESS
        if hopeless or retry > run.request.infrastructure_retries:
            return False
        request = rollout_request(run, number, member.sample, rollout.task, retry)
        await self._runs.retry_sample(run.run_id, number, member.sample, request)
        return True

    async def _cancel(self, members: Sequence[GroupMember]) -> None:
        for member in members:
            if not member.state.terminal:
                await self._store.cancel(member.rollout_id)

    async def _cut_stragglers(self, active: ActiveRun) -> None:
        asked = active.run.request.stragglers
        if asked is None:
            return
        rule = StragglerRule(asked.quantile, asked.factor, asked.min_samples)
        limit = rule.limit(active.estimates.times)
        for group in active.groups:
            usable = sum(member.reward is not None for member in group.members)
            if limit is not None and usable >= rule.min_samples:
                slow = [member for member in group.members if self._rolling(member) > limit]
                cut = {member.sample for member in group.members if member.is_straggler}
                if not {member.sample for member in slow} <= cut:
                    cut |= {member.sample for member in slow}
                    await self._runs.mark_stragglers(active.run.run_id, group.number, sorted(cut))
                await self._cancel(slow)
            await self._cancel([member for member in group.members if member.is_straggler])

    def _rolling(self, member: GroupMember) -> float:
        """How long a rollout's agent has been at work; 0 when it is not."""
        return 0.0 if member.rolling_since is None else self._clock() - member.rolling_since

    # -- new groups ------------------------------------------------------------

    async def _begin(self, active: Sequence[ActiveRun]) -> None:
        """Share the free places among the runs that want to begin groups."""
        under_way = sum(
            not member.state.terminal for one in active for group in one.groups for member in group.members
        )
        claims = {one.run.run_id: claim_groups(one) for one in active}
        wanting = [one for one in active if claims[one.run.run_id].groups > 0]
        if not wanting:
            return
        size = max(one.run.request.group_size for one in wanting)
        places = (self._places - under_way) // size
        granted = self._scheduler.grant(claims, max(places, 0 if under_way else 1))
        for one in wanting:
            if count := granted.get(one.run.run_id, 0):
                await self._begin_groups(one.run, count)

    async def _begin_groups(self, run: RunRecord, count: int) -> None:
        try:
            taken = await (await self._tasks_of(run)).take(run.cursor, count)
            if taken:
                self._estimates[run.run_id].start_epoch(taken[-1][0].epoch)
            await self._runs.start_groups(
                run.run_id, [new_group(run, position, task) for position, task in taken]
            )
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - it is shown in the run, and must not stop the others
            await self._pause(run, error)

    async def _tasks_of(self, run: RunRecord) -> RunTasks:
        size, tasks = self._tasks.get(run.run_id, (0, None))
        if tasks is None or size != run.tasks:

            async def inline(first: int, limit: int) -> Sequence[Task]:
                return await self._runs.inline_tasks(run.run_id, first=first, limit=limit)

            tasks = await RunTasks.open(run, inline, self._reopen)
            self._tasks[run.run_id] = (run.tasks, tasks)
        return tasks

    async def _prune(self) -> None:
        async def prune() -> None:
            for run in await self._runs.list():
                keep = run.request.retention
                await self._runs.prune(run.run_id, seconds=keep.seconds, max_bytes=keep.max_bytes)
            while await self._runs.delete_expired(self._retention):
                await anyio.lowlevel.checkpoint()  # others get their turn at the database

        while True:
            await retry_until_stored("prune what was acknowledged", prune)
            await anyio.sleep(PRUNE_SECONDS)


def _refuse_lost(group: OpenGroup) -> None:
    if group.lost:
        gone = ", ".join(group.lost)
        raise RecordLostError(f"rollouts of group {group.number} are gone: {gone}", hint=RESTORE)
