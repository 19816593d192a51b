"""Hands the parts of sessions to their runs, as tasks of the environment `session`.

A part is in exactly one task of its run, though the service be killed at any moment: its offset is stored before the
task is appended there, and after a start it is looked up whether that happened. A window of parts is appended only when
it fills a batch, with groups that wait for one if there are any, and once the groups of the last have closed. A group
has as many parts as the run wants, of sessions of one tenant. Parts that a run did not get before it ended go back, for
another run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import structlog
from pydantic import JsonValue

from api_schemas.runs import RunState
from api_schemas.runs.live import LiveDelivery
from api_schemas.tasks import Task
from rollout_service.base.errors import ConflictError, NotFoundError, StoreError
from rollout_service.groups.shares import Owner, next_window
from rollout_service.live.contract import PartRecord, SessionRecord
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.store.runs_contract import RunRecord, RunStore

log = structlog.get_logger(__name__)

ENVIRONMENT = "session"
"""The environment whose tasks are parts of sessions."""
RUNS_SECONDS = 10.0
"""Between two looks for runs while there are neither runs nor parts: nodes share the store of runs."""
WARN_SECONDS = 60.0
"""How long parts may wait for others to fill a batch before the service warns."""


@dataclass(frozen=True, slots=True)
class PartGroup:
    """One group of a run: a part, or parts of sessions that worked on the same task."""

    parts: Sequence[PartRecord]
    sessions: Sequence[SessionRecord]
    """In the order of the parts."""

    @property
    def owners(self) -> list[Owner]:
        return [Owner(one.session_id, one.user, one.tenant) for one in self.sessions]


@dataclass(eq=False)
class PartDelivery:
    store: SqliteLiveStore
    runs: RunStore
    _: KW_ONLY
    node: str | None = None
    """This node, if others share the store of runs."""
    handed_over: Callable[[float], None] = lambda _: None
    """Called for each part with the seconds that it has waited for its run."""
    clock: Callable[[], float] = time.time
    is_idle: bool = False
    """The last look found neither a run nor a part."""

    def __post_init__(self) -> None:
        self._is_protected = False
        """The store of runs overwrites deleted data."""
        self._is_new = True
        """No step has looked for runs that ended before this start."""
        self._look_at = 0.0
        """When to look for runs again though there is no part."""
        self._reconciled: set[str] = set()
        """Runs whose stored offsets are known to be those of tasks."""
        self._warned: dict[str, str] = {}
        self._short: dict[str, object] = {}
        """Each run's state when its parts did not suffice: nothing is read again until it changes."""
        self._sessions: dict[str, dict[PartRecord, SessionRecord | None]] = {}
        """Those of each run's waiting parts, of which there may be many for long. Whose they are never changes."""

    def warnings(self) -> list[str]:
        """Return a sentence for each run whose parts wait long."""
        return list(self._warned.values())

    async def step(self) -> int:
        """Append parts; return the number of tasks.

        Raises:
            StoreError: A store failed; the next step goes on from there.
        """
        parts = await self.store.parts(unclaimed=True)
        if self.is_idle and not parts and self.clock() < self._look_at:
            return 0
        self._look_at = self.clock() + RUNS_SECONDS
        runs = {run.run_id: run for run in await live_runs(self.runs)}
        await self._protect(bool(runs))
        waiting: dict[str, list[PartRecord]] = {run_id: [] for run_id in runs}
        for part in parts:
            if part.run_id in runs and part.offset is None:
                waiting[part.run_id].append(part)
            elif part.run_id not in runs and (part.offset is None or await self._is_past(part.run_id)):
                await self.store.give_back_part(part.session_id, part.part)
        self.is_idle = not waiting and not parts
        appended = 0
        for run_id, unsubmitted in waiting.items():
            appended += await self._deliver(runs[run_id], unsubmitted)
        for kept in (self._warned, self._short, self._sessions):
            for run_id in kept.keys() - runs.keys():
                del kept[run_id]
        return appended

    async def _is_past(self, run_id: str) -> bool:
        """Return whether a run has ended, with no group that may still claim its part."""
        try:
            run = await self.runs.get(run_id)
        except NotFoundError:
            return True
        except StoreError:  # its shard is away
            return False
        return not _takes_parts(run) and not run.count("open")

    async def _protect(self, has_runs: bool) -> None:
        """From the first run of sessions on, let nothing deleted stay in the files of runs."""
        if self._is_protected:
            return
        if has_runs or (self._is_new and any(run.request.live for run in await self.runs.list())):
            await self.runs.overwrite_deleted()
            self._is_protected = True
        self._is_new = False

    async def _deliver(self, run: RunRecord, parts: Sequence[PartRecord]) -> int:
        if run.run_id not in self._reconciled:
            parts = [*await self._reconcile(run), *parts]
            self._reconciled.add(run.run_id)
        if not parts or run.state is not RunState.RUNNING or run.count("open") or run.cursor < run.tasks:
            return 0
        seen = (len(parts), max(part.closed_at for part in parts), run.count("ready"))
        if self._short.get(run.run_id) == seen:
            self._warn(run, parts, is_stuck=True)
            return 0
        groups = await self._groups(run, parts)
        ready = await self.runs.ready_groups(run.run_id)
        window = next_window(groups, ready, run.request.batch_size, order_of(run))
        self._short.pop(run.run_id, None)
        if window is None and run.request.group_size == 1:
            self._short[run.run_id] = seen
        self._warn(run, parts, is_stuck=window is None)
        return 0 if window is None else await self._append(run, window)

    async def _reconcile(self, run: RunRecord) -> list[PartRecord]:
        """Drop the offsets of parts that were not appended, and return these."""
        lost = []
        for part in await self.store.parts(run.run_id):
            if part.offset is None or part.rollout_id is not None:
                continue
            tasks = await self.runs.inline_tasks(run.run_id, first=part.offset, limit=1)
            if not any((part.session_id, part.part) in parts_named(task.instance) for task in tasks):
                await self.store.set_offset(part.session_id, part.part, None)
                lost.append(part)
        return lost

    async def _groups(self, run: RunRecord, parts: Sequence[PartRecord]) -> list[PartGroup]:
        """Return whole groups that may be delivered, the oldest first."""
        before = self._sessions.get(run.run_id, {})
        found = {part: before.get(part) or await self.store.session(part.session_id) for part in parts}
        self._sessions[run.run_id] = found
        known = [(part, session) for part, session in found.items() if session is not None]
        size = run.request.group_size
        if size == 1:
            return [PartGroup([part], [session]) for part, session in known]
        by_task: dict[tuple[str, str], list[tuple[PartRecord, SessionRecord]]] = {}
        for part, session in known:
            if session.group is not None:
                by_task.setdefault((session.tenant, session.group), []).append((part, session))
        groups: list[PartGroup] = []
        for task, members in by_task.items():
            if len(members) >= size and await self._is_over(*task):
                groups += _whole_groups(members, size)
        return groups

    async def _is_over(self, tenant: str, name: str) -> bool:
        """Return whether all sessions of a task have ended, with all turns decided."""
        sessions = await self.store.group(tenant, name)
        if any(session.closed_at is None for session in sessions):
            return False
        return not await self.store.fates([session.session_id for session in sessions])

    async def _append(self, run: RunRecord, window: Sequence[PartGroup]) -> int:
        self._reconciled.discard(run.run_id)  # until all of this is done
        for number, group in enumerate(window):
            for part in group.parts:
                await self.store.set_offset(part.session_id, part.part, run.tasks + number)
        tasks = [_task(group, self.node) for group in window]
        try:
            await self.runs.append(run.run_id, tasks, offset=run.tasks, close=False)
        except ConflictError:  # another service appended first, or the run ended: the next step sees it
            log.info("a run changed while parts were appended", run=run.run_id)
            return 0
        self._reconciled.add(run.run_id)
        for part in (part for group in window for part in group.parts):
            self.handed_over(self.clock() - part.closed_at)
        log.info("parts of sessions appended", run=run.run_id, tasks=len(tasks), offset=run.tasks)
        return len(tasks)

    def _warn(self, run: RunRecord, parts: Sequence[PartRecord], *, is_stuck: bool) -> None:
        oldest = min(part.closed_at for part in parts)
        if not is_stuck or self.clock() - oldest < WARN_SECONDS:
            self._warned.pop(run.run_id, None)
            return
        text = (
            f"run {run.run_id}: {len(parts)} parts of sessions wait, since no {run.request.batch_size} groups of "
            f"{run.request.group_size} fill a batch within max_user_share and max_session_share, without mixing "
            "tenants; more users will fill it, or a run with a larger share"
        )
        if run.run_id not in self._warned:
            log.warning("parts of sessions wait for others to fill a batch", run=run.run_id, parts=len(parts))
        self._warned[run.run_id] = text


def _whole_groups(members: Sequence[tuple[PartRecord, SessionRecord]], size: int) -> Iterator[PartGroup]:
    """Leave the other parts waiting for sessions of the same task."""
    for first in range(0, len(members) - size + 1, size):
        parts, sessions = zip(*members[first : first + size], strict=True)
        yield PartGroup(parts, sessions)


def _task(group: PartGroup, node: str | None) -> Task:
    named: list[JsonValue] = [[part.session_id, part.part] for part in group.parts]
    instance: dict[str, JsonValue] = {"parts": named}
    return Task(environment=ENVIRONMENT, instance=instance if node is None else instance | {"node": node})


def parts_named(instance: dict[str, JsonValue]) -> list[tuple[str, int]]:
    """Leave out entries of another form."""
    named = instance.get("parts")
    found: list[tuple[str, int]] = []
    for one in named if isinstance(named, list) else []:
        match one:
            case [str(session_id), int(part)]:
                found.append((session_id, part))
    return found


TrainedPool = Callable[[str], str]
"""Returns the pool whose runs train on a pool's turns: itself, or the one that it is a candidate for."""


async def live_runs(runs: RunStore) -> list[RunRecord]:
    """Return runs that are not over, the oldest first."""
    return [run for run in await runs.active() if _takes_parts(run)]


def _takes_parts(run: RunRecord) -> bool:
    return run.request.live is not None and run.state in (RunState.RUNNING, RunState.PAUSED)


def run_of(session: SessionRecord, runs: Sequence[RunRecord], trained_pool: TrainedPool) -> RunRecord | None:
    """Return the oldest running run that trains on a session's pool and takes its tenant; None if there is none.

    A run with groups of several takes only sessions of a group.
    """
    pool = trained_pool(session.pool)
    for run in runs:
        is_apt = run.request.group_size == 1 or session.group is not None
        is_its_own = run.request.pool == pool and session.tenant in order_of(run).tenants
        if run.state is RunState.RUNNING and is_apt and is_its_own:
            return run
    return None


def order_of(run: RunRecord) -> LiveDelivery:
    """Return a run's order for live sessions; the default for a run that has none."""
    return run.request.live or LiveDelivery()
