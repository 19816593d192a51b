"""Looks at everything that rollouts wait for, once a second, and reports steps that are stuck, slow or held back.

Runs that cannot go on or deliver nothing, and engines with weights that they were not given, are reported in the same
way. The watch depends on nothing that may hang: events are written in the background, and probes have time limits. It
looks in slices, so thousands of rollouts do not hold up the event loop.
"""

from __future__ import annotations

import faulthandler
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangFinding, HangReport, HangVerdict, RolloutActivity
from rollout_service.activity import ActivityBoard
from rollout_service.base.private_files import make_private
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.observability.telemetry.families import Collected, gauge
from rollout_service.pipeline.context import AttemptContext
from rollout_service.server.hangs.findings import FindingLog, stack_of_task, worst_first
from rollout_service.server.hangs.heartbeat import (
    BLOCKED_SECONDS,
    EVENT_LOOP,
    STACKS,
    LastReport,
    LoopHeartbeat,
)
from rollout_service.server.hangs.reporter import RUN, WEIGHTS, HangReporter, problem_of_engine, problem_of_run
from rollout_service.server.hangs.rules import LOOK_SECONDS, StepWait, at, oldest_of_stages, view, waits_of
from rollout_service.server.hangs.verdicts import StepDurations, Verdicts
from rollout_service.store.runs_contract import RunRecord

TICK_SECONDS = 1.0
SLICE = 200
"""How many waits are looked at between two turns of the event loop."""


class HangWatch:
    def __init__(
        self,
        node: str,
        context: AttemptContext,
        serving: PolicyServing,
        state_dir: Path,
        *,
        troubled_runs: Callable[[], Iterable[RunRecord]],
    ) -> None:
        """Learn from steps from now on; look at nothing before `running`."""
        self._node = node
        self._board = context.activities
        self._stacks = state_dir / STACKS
        self.durations = StepDurations()
        self._board.observe(self.durations)
        self._verdicts = Verdicts(context, serving, self.durations)
        self._troubled_runs = troubled_runs
        self._backends = serving.views
        self._findings = FindingLog()
        self._reporter = HangReporter(context.store)
        self._heartbeat = LoopHeartbeat(LastReport(state_dir), self._rollout_of)
        context.metrics.registry.register(
            Collected(lambda: hang_metrics(self.findings(), self._heartbeat.lag, self._board))
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._heartbeat.report = self.report()  # the loop may be blocked before the first look
        with self._heartbeat.running(), dumping_stacks(self._stacks):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, tasks, name="hang watch")
                tasks.start_soon(self._reporter.write_events, name="hang events")
                try:
                    yield
                finally:
                    tasks.cancel_scope.cancel()

    def findings(self, *, stacks: bool = False) -> list[HangFinding]:
        blocks = (block.finding() for block in self._heartbeat.recent())
        found = worst_first([*self._findings.list(), *blocks])
        return found if stacks else [one.model_copy(update={"stack": []}) for one in found]

    def report(self) -> HangReport:
        return HangReport(
            node=self._node,
            at=datetime.now(UTC),
            working=len(self._board.all()),
            loop_lag_seconds=self._heartbeat.lag,
            findings=self.findings(stacks=True),
            oldest=oldest_of_stages(waits_of(self._board.all(), time.perf_counter())),
        )

    def activity(self, rollout_id: str) -> RolloutActivity | None:
        """Return the rollout's current steps; None if it is not under way at this node."""
        activity = self._board.find(rollout_id)
        if activity is None:
            return None
        now = time.perf_counter()
        task = next((step.task for step in reversed(activity.open) if step.task is not None), activity.task)
        return RolloutActivity(
            rollout_id=rollout_id,
            node=self._node,
            environment=activity.environment,
            attempt=activity.attempt,
            stage=activity.stage,
            since=at(activity.started),
            waits=[view(step, now) for step in activity.open],
            stack=[] if task is None or task.done() else stack_of_task(task),
        )

    def _rollout_of(self, task: object) -> str | None:
        """Find the rollout of a task; the heartbeat's thread asks while the loop is blocked."""
        for activity in self._board.all():
            if activity.task is task or any(step.task is task for step in tuple(activity.open)):
                return activity.rollout_id
        return None

    async def _watch(self, tasks: TaskGroup) -> None:
        while True:
            began = time.perf_counter()
            await anyio.sleep(TICK_SECONDS)
            # After a blocked loop everything looks late, because nothing has had a turn yet.
            if time.perf_counter() - began < TICK_SECONDS + BLOCKED_SECONDS:
                await self._look(tasks)
            self._reporter.tell_of_blocks(self._heartbeat.recent())
            self._heartbeat.report = self.report()

    async def _look(self, tasks: TaskGroup) -> None:
        suspects = [wait async for wait in self._in_slices() if wait.quiet >= LOOK_SECONDS]
        await self._verdicts.probe(suspects, tasks.start_soon)
        judged = self._verdicts.of([one for one in suspects if one.step.ended is None])
        for kind, finding in self._findings.update(judged, self._problems()):
            self._reporter.tell(kind, finding)

    def _problems(self) -> Iterator[HangFinding]:
        for run in self._troubled_runs():
            if run.problem is not None:
                yield problem_of_run(run, run.problem)
        for backend in self._backends():
            if backend.sampled_version is not None:
                yield problem_of_engine(backend)

    async def _in_slices(self) -> AsyncIterator[StepWait]:
        for count, wait in enumerate(waits_of(self._board.all(), time.perf_counter())):
            if count % SLICE == SLICE - 1:
                await anyio.lowlevel.checkpoint()
            yield wait


@contextmanager
def dumping_stacks(path: Path) -> Iterator[None]:
    """Have Python write all stacks to a file at SIGUSR1, in the main thread, unless there is a handler."""
    is_free = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    if not is_free or threading.current_thread() is not threading.main_thread():
        yield
        return
    make_private(path)
    with path.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def hang_metrics(findings: Iterable[HangFinding], lag: float, board: ActivityBoard) -> Iterator[Metric]:
    """Give every kind, verdict and stage a value, so that an alert never meets an absent series."""
    kinds = (*StepKind, EVENT_LOOP, RUN, WEIGHTS)
    counts = Counter({(kind, verdict): 0 for kind in kinds for verdict in HangVerdict})
    for finding in findings:
        counts[finding.kind, finding.verdict] += max(1, finding.count)
    text = "Rollouts that wait longer than usual by what they wait for, and runs and engines with a problem"
    yield gauge("rollout_stuck", text, ["kind", "verdict"], counts)
    text = "The greatest delay of the event loop within the last ten seconds"
    yield GaugeMetricFamily("rollout_loop_lag_seconds", text, lag)
    text = "How long the oldest rollout in a stage has been worked on"
    oldest = oldest_in_stages(board, time.perf_counter())
    yield gauge("rollout_stage_oldest_seconds", text, ["stage"], oldest)


def oldest_in_stages(board: ActivityBoard, now: float) -> dict[Stage, float]:
    oldest = dict.fromkeys(Stage, 0.0)
    for activity in board.all():
        if activity.stage is not None and activity.working_since is not None:
            oldest[activity.stage] = max(oldest[activity.stage], now - activity.working_since)
    return oldest
