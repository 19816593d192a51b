"""The manager of all runs: starts groups as they are needed, retries failed samples, closes groups that have ended.

Decisions depend only on the store. A crash at any moment neither repeats nor skips a task, and an interrupted step is
simply repeated. A run that cannot continue, for example because the store lost part of it, is paused with its problem
and left alone until its state is changed. It stops no other run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import anyio
import anyio.lowlevel
import structlog

from api_schemas.rollouts import RolloutState
from api_schemas.rollouts.figures import RunParallel
from api_schemas.runs import RunRequest, RunState
from api_schemas.tasks import Task
from rollout_service.base.errors import ConflictError, NotFoundError, StoreError, describe
from rollout_service.groups.filters import FilterChain, FilterRegistry, require_outcome_filters
from rollout_service.groups.scheduler import FairScheduler
from rollout_service.groups.statistics import parallel_figures
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.runs.dataset import Reopen, RunTasks
from rollout_service.runs.open_groups import GroupsUnderWay
from rollout_service.runs.planning import (
    ActiveRun,
    RunEstimates,
    behind_warning,
    claim_groups,
    new_group,
    reason_to_pause,
    reason_to_report,
    warnings_of,
)
from rollout_service.settings import RetentionSettings
from rollout_service.store import rules
from rollout_service.store.cluster_contract import RoleLease
from rollout_service.store.contract import StoreShard
from rollout_service.store.retrying import retry_until_stored
from rollout_service.store.runs_contract import RunRecord

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
"""How often runs in which nothing changed are checked for stragglers and for new versions of a pool."""
GATHER_SECONDS = 0.01
"""Changes within this time are handled in one step."""
PRUNE_SECONDS = 60.0
TRY_AGAIN_SECONDS = 30.0
"""How often a run whose engines are too old for it starts a group, which costs one of its tasks."""

ManagerOf = Callable[[str], "RunManager"]
"""Returns the manager of a run's shard."""


class RunManager:
    """Works on all runs of a shard."""

    def __init__(
        self,
        store: StoreShard,
        filters: FilterRegistry,
        *,
        places: int,
        reopen: Reopen,
        pool_version: Callable[[str], int],
        metrics: Metrics,
        retention: RetentionSettings | None = None,
    ) -> None:
        """`places` is the most rollouts of all runs under way at once; more would only wait in the store."""
        self._store = store
        self._runs = store.runs
        self._filters = filters
        self._places = places
        self._reopen = reopen
        self._pool_version = pool_version
        self._metrics = metrics
        self._retention = retention or RetentionSettings()
        self._scheduler = FairScheduler()
        self._groups = GroupsUnderWay(store, metrics)
        self._estimates: dict[str, RunEstimates] = {}
        self._tasks: dict[str, tuple[int, RunTasks]] = {}
        self.troubled: Sequence[RunRecord] = ()
        """Runs with a problem, as of the last work on all runs."""
        self._stuck: dict[str, RunState] = {}
        """The state in which a run could not be settled; it is tried again only in another state."""

    async def manage(self, lease: RoleLease) -> None:
        """Work on all runs; the store refuses the changes once `lease` is another service's."""
        self._runs = self._store.runs.fenced(lease)
        try:
            await self._work()
        finally:
            self._runs = self._store.runs
            self._stuck.clear()
            self._forget_all_but(set())  # the next leader changes what this one remembers

    def acceptance_rate(self, run: RunRecord) -> float:
        return (self._estimates.get(run.run_id) or RunEstimates.from_record(run)).acceptance.rate

    def staleness(self, run: RunRecord) -> float | None:
        """Return how many versions the oldest token of the group that closed last is behind; None if unknown here."""
        estimates = self._estimates.get(run.run_id)
        if estimates is None or estimates.oldest_version is None:
            return None
        return float(max(0, run.version - estimates.oldest_version))

    def is_behind(self, run: RunRecord) -> bool:
        """Return whether a run's engines sample tokens that it refuses as too old, as far as is known here.

        Engines may have newer weights than they were given here, so the tokens of the group that closed last count too.
        """
        bound, estimates = self._groups.bound(run), self._estimates.get(run.run_id)
        if bound is None or estimates is None or run.state is not RunState.RUNNING:
            return False
        return max(self._pool_version(run.request.pool), estimates.newest_version or 0) < bound

    def _most_to_start(self, active: ActiveRun) -> float:
        """Return how many groups a run may start; a single one shows when the engines have newer weights."""
        if not self.is_behind(active.run):
            return math.inf
        is_due = anyio.current_time() >= active.estimates.tried_at + TRY_AGAIN_SECONDS
        return int(is_due and not active.groups)

    def warnings(self, run: RunRecord) -> list[str]:
        """Return the conditions that keep a run from delivering although nothing is wrong with it."""
        if not self.is_behind(run):
            return warnings_of(run)
        return [behind_warning(run, self._pool_version(run.request.pool))]

    def parallel(self, run: RunRecord) -> RunParallel | None:
        """Return how a run's rollouts use sub-agents; None if none may have any."""
        total = parallel_figures(rules.work_counts(run.counters))
        if total is None:
            return None
        estimates = self._estimates.get(run.run_id)
        return RunParallel(total=total, recent=estimates.recent_figures if estimates else None)

    def chain(self, request: RunRequest) -> FilterChain:
        """
        Raises:
            InvalidFieldError: There is no such filter, an option is wrong, or a filter looks at a part of the reward
                that the run does not have.
            ConfigurationError: The plug-in of a filter could not be loaded.
        """
        made = [
            self._filters.make(spec.name, spec.options, field=f"body.filters.{index}")
            for index, spec in enumerate(request.filters)
        ]
        if request.auxiliary is None:
            require_outcome_filters(made)
        return FilterChain(made, request.min_usable)

    def resize(self, places: int) -> None:
        self._places = places

    async def sync_version(self, run: RunRecord) -> RunRecord:
        """Return the run, after updating its version if its pool has reached a newer one."""
        reached = self._pool_version(run.request.pool)
        return await self._store.runs.update(run.run_id, version=reached) if reached > run.version else run

    async def mask_stale(self, run_id: str, *, strict: bool = True) -> None:
        """Mask samples that have become too old for a run's trainer, now and whenever its version changes.

        Without `strict`, mask none from now on, as for a trainer that accepts stale samples.
        """
        self._groups.refuse_stale(run_id, strict)
        if not strict:
            return
        runs = self._store.runs  # unlike the work on runs, this is done by whichever node is asked
        run = await runs.get(run_id)
        await self._groups.mask_stale(runs, run, self.chain(run.request))

    async def _work(self) -> None:
        seen, active = 0, True
        while True:
            with anyio.move_on_after(LOOK_SECONDS if active else None):
                seen = await self._runs.wait_for_change(seen)
                await anyio.sleep(GATHER_SECONDS)
            active = await retry_until_stored("work on runs", self.step)

    async def step(self) -> bool:
        """Advance every run as far as possible; return whether any run is active."""
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
                backlog = sum(member.state is RolloutState.QUEUED for group in found.groups for member in group.members)
                counters = found.run.counters
                self._metrics.set_run(
                    run.run_id,
                    rules.group_counts(counters),
                    rate,
                    backlog=backlog,
                    dropped_in_a_row=sum(rules.dropped_in_a_row(counters).values()),
                )
        latest = {one.run.run_id: one.run for one in active}
        self.troubled = [run for one in runs if (run := latest.get(one.run_id, one)).problem is not None]
        failure = await self._share_places(active) or failure
        if failure is not None:
            raise failure
        kept = {one.run.run_id for one in active} | self._stuck.keys()
        for gone in self._estimates.keys() - kept:
            log.info("run has no more to do", run=gone)
        self._forget_all_but(kept)
        return bool(active)

    def _forget_all_but(self, kept: set[str]) -> None:
        for gone in self._estimates.keys() - kept:
            del self._estimates[gone]
            self._tasks.pop(gone, None)
            self._groups.refuse_stale(gone, False)
            self._scheduler.forget(gone)
            self._metrics.clear_run(gone)

    async def _guarded(self, run: RunRecord) -> ActiveRun | None:
        """Settle a run, and pause it if that fails."""
        if self._stuck.get(run.run_id) is run.state:
            return None
        try:
            settled = await self._settle(run)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - the run shows it; it must not stop other runs
            self._stuck[run.run_id] = (await self._pause(run, error)).state
            return None
        self._stuck.pop(run.run_id, None)
        return settled

    async def _pause(self, run: RunRecord, error: Exception) -> RunRecord:
        info = describe(error)
        state = RunState.PAUSED if run.state is RunState.RUNNING else None
        try:
            stopped = await self._runs.update(run.run_id, state=state, problem=info)
        except (ConflictError, NotFoundError):  # it has ended meanwhile, and may be deleted: the next step sees it
            return run
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

    async def _settle(self, run: RunRecord) -> ActiveRun:
        run = await self.sync_version(run)
        estimates = self._estimates.setdefault(run.run_id, RunEstimates.from_record(run))
        active = ActiveRun(run, self.chain(run.request), estimates, await self._runs.open_groups(run.run_id))
        await self._groups.settle(self._runs, active)
        active.most = self._most_to_start(active)
        await self._check_yield(active)
        return active

    async def _check_yield(self, active: ActiveRun) -> None:
        """Pause a run that reached a limit of groups dropped in a row, and say of any other that it keeps none."""
        run, newest = active.run, active.estimates.newest_error
        if run.state is not RunState.RUNNING:
            return
        if (error := reason_to_pause(run, newest)) is not None:
            active.run = await self._pause(run, error)
        elif run.problem is None and (reported := reason_to_report(run, newest)) is not None:
            active.run = await self._runs.update(run.run_id, problem=describe(reported))
            log.warning("a run keeps no group", run=run.run_id, why=str(reported), hint=reported.hint)

    async def _share_places(self, active: Sequence[ActiveRun]) -> StoreError | None:
        """Start groups of the runs that claim them; return the store's failure for single runs."""
        under_way = sum(not member.state.terminal for one in active for group in one.groups for member in group.members)
        claims = {one.run.run_id: claim_groups(one) for one in active}
        wanting = [one for one in active if claims[one.run.run_id].groups > 0]
        if not wanting:
            return None
        failure: StoreError | None = None
        size = max(one.run.request.group_size for one in wanting)
        places = (self._places - under_way) // size
        granted = self._scheduler.grant(claims, max(places, 0 if under_way else 1))
        for one in wanting:
            if count := granted.get(one.run.run_id, 0):
                try:
                    await self._start_groups(one.run, count)
                    if one.most == 1:
                        one.estimates.tried_at = anyio.current_time()
                except StoreError as error:
                    failure = failure or error
        return failure

    async def _start_groups(self, run: RunRecord, count: int) -> None:
        try:
            taken = await (await self._tasks_of(run)).take(run.cursor, count)
            if taken:
                self._estimates[run.run_id].start_epoch(taken[-1][0].epoch)
            await self._runs.start_groups(run.run_id, [new_group(run, position, task) for position, task in taken])
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - the run shows it; it must not stop other runs
            await self._pause(run, error)

    async def _tasks_of(self, run: RunRecord) -> RunTasks:
        size, tasks = self._tasks.get(run.run_id, (0, None))
        if tasks is None or size != run.tasks:

            async def inline(first: int, limit: int) -> Sequence[Task]:
                return await self._runs.inline_tasks(run.run_id, first=first, limit=limit)

            tasks = await RunTasks.open(run, inline, self._reopen)
            self._tasks[run.run_id] = (run.tasks, tasks)
        return tasks

    async def prune(self, lease: RoleLease) -> None:
        """Delete expired records; the store refuses it once `lease` is another service's."""
        runs = self._store.runs.fenced(lease)

        async def prune() -> None:
            for run in await runs.list():
                keep = run.request.retention
                await runs.prune(run.run_id, seconds=keep.seconds, max_bytes=keep.max_bytes)
            while await runs.delete_expired(self._retention):
                await anyio.lowlevel.checkpoint()  # so that other jobs get their turn

        while True:
            await retry_until_stored("prune what was acknowledged", prune)
            await anyio.sleep(PRUNE_SECONDS)
