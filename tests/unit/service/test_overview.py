"""Figures of the last minutes are right and bounded; an overview is made once a second, whoever reads it."""

from datetime import UTC, datetime, timedelta

import anyio
import pytest

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import Rollout, RolloutState
from api_schemas.rollouts.steps import StepKind
from api_schemas.tasks import Task
from api_schemas.views.overview import Overview
from rollout_service.activity import Activity, ActivityBoard, OpenStep, waits_for
from rollout_service.base.errors import ServiceError
from rollout_service.server.overview import BackendFigures, Outcomes, OverviewFeed
from rollout_service.server.overview.outcomes import MAX_FAILURES, MAX_GROUPS, TIMES_PER_SECOND, success_share
from tests.support import samples
from tests.support.clocks import ManualClock

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def overview() -> Overview:
    return Overview(
        at=NOW,
        version="1",
        node="here",
        uptime_seconds=1.0,
        last_event=0,
        ready=True,
        counts={},
        finished_per_second=0.0,
        stages=[],
    )


def rollout(rollout_id: str, state: RolloutState, code: str | None = None, environment: str = "calc") -> Rollout:
    error = None
    if code is not None:
        error = ErrorInfo(code=code, boundary=Boundary.SANDBOX, message=f"{rollout_id} broke", stage="rollout")
    task = Task(environment=environment, instance={})
    return samples.rollout(rollout_id, state, task=task, error=error, created_at=NOW)


async def test_the_figures_of_an_engine_are_those_of_its_requests():
    board, figures = ActivityBoard(), BackendFigures()
    board.observe(figures)
    with board.working("one", attempt=1, environment="calc"):
        for number in range(4):
            with waits_for(StepKind.ENGINE, "policy@a", prompt_tokens=100) as step:
                step.note(tokens=10, cached_tokens=50 if number % 2 else None)
        with waits_for(StepKind.TOOL, "policy@a", prompt_tokens=1_000):
            pass
        with pytest.raises(ServiceError), waits_for(StepKind.ENGINE, "policy@a", prompt_tokens=1_000):
            raise ServiceError("lost")
    found = figures.of(samples.backend_view("policy@a"))
    assert found.requests_per_second == 4.0
    assert found.tokens_per_second == 40.0
    assert found.cached_share == 0.25
    assert found.p50_seconds is not None
    assert 0 <= found.p50_seconds < 1
    assert figures.of(samples.backend_view("policy@b")).p50_seconds is None


async def test_figures_of_engines_are_forgotten_after_a_minute_and_bounded_before():
    clock = ManualClock(1_000.0)
    board, figures = ActivityBoard(), BackendFigures(clock)
    board.observe(figures)
    with board.working("one", attempt=1, environment="calc"):
        for _ in range(TIMES_PER_SECOND * 3):
            with waits_for(StepKind.ENGINE, "a", prompt_tokens=1) as step:
                step.note(tokens=1)
    ended = step.ended
    assert ended is not None
    clock.now = ended + 30
    assert figures.of(samples.backend_view("a")).tokens_per_second > 0
    assert all(len(second.times) <= TIMES_PER_SECOND for second in figures._seconds["a"])
    clock.now = ended + 70
    assert figures.of(samples.backend_view("a")).tokens_per_second == 0


async def test_an_engine_that_has_left_is_forgotten_although_nobody_looks():
    activity, figures = Activity("one", attempt=1, environment="calc"), BackendFigures()
    for number in range(3):
        step = OpenStep(StepKind.ENGINE, f"engine-{number}", "", None, {})
        step.ended = step.started + 100 * number
        figures.closed(activity, step)
    assert list(figures._seconds) == ["engine-2"]


def test_outcomes_are_counted_for_five_minutes():
    outcomes = Outcomes()
    outcomes.note(NOW - timedelta(seconds=301), "completed")
    for second in range(299, -1, -1):
        outcomes.note(NOW - timedelta(seconds=second), "completed" if second % 3 else "sandbox_gone")
    counts = outcomes.counts(NOW)
    assert counts == {"completed": 200, "sandbox_gone": 100}
    assert success_share(counts) == pytest.approx(2 / 3, abs=1e-4)
    assert success_share({}) is None


def test_the_rate_is_taken_over_the_last_half_minute():
    outcomes = Outcomes()
    for _ in range(60):
        outcomes.ended(rollout("a", RolloutState.COMPLETED))
    now = datetime.now(UTC)
    assert outcomes.per_second(now + timedelta(seconds=29)) == pytest.approx(2.0, rel=0.1)
    assert outcomes.per_second(now + timedelta(seconds=40)) == 0


def test_rollouts_that_ended_before_the_start_do_not_count_as_of_the_time_since():
    outcomes, now = Outcomes(), datetime.now(UTC)
    for second in range(20, 0, -1):
        outcomes.note(now - timedelta(seconds=second), "completed")
    assert outcomes.per_second(now + timedelta(seconds=1)) == pytest.approx(1.0, rel=0.1)


def test_failures_are_grouped_by_what_they_have_in_common():
    outcomes = Outcomes()
    for number in range(7):
        outcomes.ended(rollout(f"gone-{number}", RolloutState.FAILED, "sandbox_gone"))
    outcomes.ended(rollout("other", RolloutState.FAILED, "sandbox_gone", environment="math"))
    outcomes.ended(rollout("well", RolloutState.COMPLETED))
    outcomes.ended(rollout("away", RolloutState.CANCELLED))
    largest, second = outcomes.errors(datetime.now(UTC))
    assert (largest.code, largest.count, largest.message) == ("sandbox_gone", 7, "gone-6 broke")
    assert largest.rollouts == [f"gone-{number}" for number in (6, 5, 4, 3, 2)]
    assert (second.environment, second.count) == ("math", 1)
    assert outcomes.counts(datetime.now(UTC)) == {"sandbox_gone": 8, "completed": 1, "cancelled": 1}
    assert outcomes.errors(datetime.now(UTC) + timedelta(seconds=301)) == []


def test_many_failures_are_bounded():
    outcomes = Outcomes()
    for number in range(MAX_FAILURES * 2):
        outcomes.ended(rollout(f"r{number}", RolloutState.FAILED, f"code_{number % 50}"))
    groups = outcomes.errors(datetime.now(UTC))
    assert len(groups) == MAX_GROUPS
    assert sum(group.count for group in groups) <= MAX_FAILURES


@pytest.mark.slow
async def test_ten_readers_share_one_overview_a_second():
    made = 0

    async def build() -> Overview:
        nonlocal made
        made += 1
        await anyio.lowlevel.checkpoint()
        return overview()

    feed = OverviewFeed(build)
    seen: list[list[bytes]] = []

    async def read() -> None:
        number, events = 0, []
        for _ in range(3):
            frame = await feed.after(number)
            assert frame.number > number
            number = frame.number
            events.append(frame.event)
        seen.append(events)

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(read)
    assert made == 3
    assert all(events == seen[0] for events in seen)
    assert all(one is other for one, other in zip(seen[0], seen[9], strict=True)), "encoded once"


async def test_nothing_is_made_while_nobody_asks():
    made = 0

    async def build() -> Overview:
        nonlocal made
        made += 1
        return overview()

    clock = ManualClock(1_000.0)
    feed = OverviewFeed(build, clock)
    await feed.latest()
    clock.now += 100
    assert made == 1
    await feed.latest()
    await feed.latest()
    assert made == 2


async def test_a_reader_that_leaves_while_an_overview_is_made_takes_it_from_nobody():
    began, go = anyio.Event(), anyio.Event()

    async def build() -> Overview:
        began.set()
        await go.wait()
        return overview()

    feed = OverviewFeed(build)
    async with anyio.create_task_group() as leaving:
        leaving.start_soon(feed.latest)
        await began.wait()
        async with anyio.create_task_group() as staying:
            staying.start_soon(feed.latest)
            await anyio.lowlevel.checkpoint()
            leaving.cancel_scope.cancel()
            go.set()
