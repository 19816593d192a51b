"""Waits for the same thing are one finding, with one beginning, one end, and the worst of them in front."""

import time
from contextlib import ExitStack
from datetime import UTC, datetime

import pytest

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.events import EventKind
from api_schemas.rollouts import Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.runs import InlineTasks, RunRequest, RunState
from api_schemas.tasks import Task
from api_schemas.views.hangs import HangVerdict
from rollout_service.activity import Activity, ActivityBoard, OpenStep, waits_for
from rollout_service.server.hangs.findings import MAX_ROLLOUTS, FindingLog, Judged
from rollout_service.server.hangs.reporter import problem_of_run
from rollout_service.server.hangs.rules import UNSEEN, StepWait, oldest_of_stages, waits_of
from rollout_service.server.hangs.watch import hang_metrics, oldest_in_stages
from rollout_service.store.runs_contract import RunRecord


def waits(stack: ExitStack, board: ActivityBoard, count: int, name: str = "engine") -> list[StepWait]:
    """Let rollouts wait for an engine, the first for longest."""
    found = []
    for number in range(count):
        activity = stack.enter_context(board.working(f"{name}-{number}", attempt=1, environment="calc"))
        step = stack.enter_context(waits_for(StepKind.ENGINE, name))
        step.started -= 100 - number
        found.append(StepWait(activity, step, time.perf_counter()))
    return found


def judged(waiting: list[StepWait], verdict: HangVerdict = HangVerdict.STUCK) -> list[Judged]:
    return [Judged(one, verdict, UNSEEN) for one in waiting]


async def test_many_waits_for_one_engine_are_one_finding():
    with ExitStack() as stack:
        log, waiting = FindingLog(), waits(stack, ActivityBoard(), 500)
        [(kind, began)] = log.update(judged(waiting))
        [finding] = log.list()
        assert (kind, began) == (EventKind.HANG_BEGAN, finding)
        assert (finding.subject, finding.count) == ("engine", 500)
        assert finding.rollouts == [f"engine-{number}" for number in range(MAX_ROLLOUTS)]
        assert finding.seconds == pytest.approx(100, abs=5)
        assert log.update(judged(waiting[1:])) == []
        assert [one.finding_id for one in log.list()] == [finding.finding_id]
        [(kind, ended)] = log.update([])
        assert (kind, ended.finding_id) == (EventKind.HANG_ENDED, finding.finding_id)
        assert log.list() == []
        [(_, other)] = log.update(judged(waiting))
        assert other.finding_id != finding.finding_id


async def test_the_worst_come_first_and_getting_stuck_is_told_once():
    with ExitStack() as stack:
        log, board = FindingLog(), ActivityBoard()
        first, second = waits(stack, board, 3, "first"), waits(stack, board, 1, "second")
        log.update([*judged(first, HangVerdict.SLOW), *judged(second, HangVerdict.HELD)])
        assert [one.verdict for one in log.list()] == ["slow", "held"]
        [(kind, worse)] = log.update([*judged(first, HangVerdict.SLOW), *judged(second)])
        assert (kind, worse.subject) == (EventKind.HANG_WORSENED, "second")
        assert [one.subject for one in log.list()] == ["second", "first"]
        stuck = [*judged(first[1:]), *judged(second)]
        [(kind, worse)] = log.update([*judged(first[:1], HangVerdict.SLOW), *stuck])
        assert (kind, worse.subject, worse.count) == (EventKind.HANG_WORSENED, "first", 2)


async def test_of_steps_that_contain_each_other_the_innermost_waits():
    board = ActivityBoard()
    with board.working("r", attempt=1, environment="calc") as activity:
        with waits_for(StepKind.GRADER, "calc") as outer:
            outer.started -= 60
            with waits_for(StepKind.JUDGE, "rubric") as inner:
                assert [one.step for one in waits_of(board.all(), time.perf_counter())] == [inner]
            [wait] = waits_of(board.all(), time.perf_counter())
            assert wait.step is outer
            assert wait.seconds > 59
            assert wait.quiet < 5  # something in it has ended just now
        assert list(waits_of([activity], time.perf_counter())) == []


async def test_metrics_have_a_value_for_everything_at_all_times():
    board, log = ActivityBoard(), FindingLog()
    stuck, lag, oldest = hang_metrics(log.list(), 0.25, board)
    assert {sample.value for sample in stuck.samples} == {0}
    assert len(stuck.samples) == len(HangVerdict) * (len(StepKind) + 3)
    assert [sample.value for sample in lag.samples] == [0.25]
    assert {sample.labels["stage"]: sample.value for sample in oldest.samples} == dict.fromkeys(Stage, 0.0)
    with ExitStack() as stack:
        log.update(judged(waits(stack, board, 7)))
        activity = board.all()[0]
        activity.stage, activity.working_since = Stage.ROLLOUT, time.perf_counter() - 5
        stuck, _, _ = hang_metrics(log.list(), 0.25, board)
        assert [sample.labels for sample in stuck.samples if sample.value == 7] == [
            {"kind": "engine", "verdict": "stuck"}
        ]
        assert oldest_in_stages(board, time.perf_counter())[Stage.ROLLOUT] == pytest.approx(5, abs=1)


PROBLEM = ErrorInfo(code="groups_dropped", boundary=Boundary.REQUEST, message="none is kept", hint="Look.")


def run_record(state: RunState) -> RunRecord:
    source = InlineTasks(tasks=[Task(environment="calc", instance={})])
    now = datetime.now(UTC)
    return RunRecord(
        run_id="a",
        request=RunRequest(source=source, batch_size=1),
        state=state,
        version=0,
        first_version=0,
        tasks=1,
        total=1,
        digest=None,
        cursor=0,
        counters={},
        problem=PROBLEM,
        created_at=now,
        changed_at=now,
    )


async def test_a_run_with_a_problem_is_a_finding_that_gets_worse_when_it_is_paused():
    log = FindingLog()
    [(_, began)] = log.update([], [problem_of_run(run_record(RunState.RUNNING), PROBLEM)])
    assert (began.kind, began.subject, began.verdict) == ("run", "a", HangVerdict.SLOW)
    assert (began.message, began.hint) == ("the run a delivers nothing, but goes on: none is kept", "Look.")
    assert began.finding_id
    [(kind, worse)] = log.update([], [problem_of_run(run_record(RunState.PAUSED), PROBLEM)])
    assert (kind, worse.finding_id, worse.verdict) == (
        EventKind.HANG_WORSENED,
        began.finding_id,
        HangVerdict.STUCK,
    )
    assert worse.since == began.since
    assert worse.seconds > 0
    [(_, ended)] = log.update([])
    assert ended.finding_id == began.finding_id


def waiting(rollout_id: str, stage: Stage | None, started: float, moved: float | None = None) -> StepWait:
    step = OpenStep(StepKind.ENGINE, "e", "", stage, {})
    step.started, step.moved = started, moved
    activity = Activity(rollout_id, environment="code", attempt=1)
    return StepWait(activity, step, 100.0)


async def test_the_one_without_progress_for_longest():
    waits = [
        waiting("moves", Stage.ROLLOUT, 0.0, moved=99.0),
        waiting("old", Stage.ROLLOUT, 40.0),
        waiting("young", Stage.ROLLOUT, 90.0),
        waiting("starts", Stage.INIT, 95.0),
        waiting("between", None, 1.0),
    ]
    found = oldest_of_stages(waits)
    assert [(one.stage, one.rollout_id, one.seconds) for one in found] == [
        (Stage.INIT, "starts", 5.0),
        (Stage.ROLLOUT, "old", 60.0),
    ]
    assert found[1].quiet_seconds == 60.0
