"""The record of what attempts do and wait for."""

import asyncio

import anyio
import pytest

from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import (
    MAX_STEPS,
    Activity,
    ActivityBoard,
    OpenStep,
    StepObserver,
    current_activity,
    current_lane,
    in_lane,
    noting,
    waits_for,
)
from rollout_service.base.errors import UnavailableError


class Seen(StepObserver):
    def __init__(self) -> None:
        self.events: list[str] = []

    def began(self, activity: Activity) -> None:
        self.events.append(f"began {activity.rollout_id}")

    def opened(self, activity: Activity, step: OpenStep) -> None:
        assert step in activity.open
        self.events.append(f"opened {step.kind}")

    def closed(self, activity: Activity, step: OpenStep) -> None:
        assert step not in activity.open
        assert step.ended is not None
        self.events.append(f"closed {step.kind} {step.error}")

    def finished(self, activity: Activity) -> None:
        assert not activity.open
        assert activity.finished is not None
        self.events.append(f"finished {activity.rollout_id}")


async def test_an_activity_is_on_the_board_as_long_as_its_block_lasts():
    board, seen = ActivityBoard(), Seen()
    board.observe(seen)
    with board.working("r1", attempt=2, environment="calc", run_id="a", group=3) as activity:
        assert board.find("r1") is activity is current_activity()
        assert board.all() == [activity]
        assert (activity.attempt, activity.run_id, activity.group) == (2, "a", 3)
        activity.enter_stage(Stage.INIT)
        with waits_for(StepKind.SETUP, "calc") as step:
            assert activity.open == [step]
            assert step.stage is Stage.INIT
            assert step.task is asyncio.current_task()
            with waits_for(StepKind.TOOL):
                pass
    assert board.find("r1") is None
    assert current_activity() is None
    assert seen.events == [
        *("began r1", "opened setup", "opened tool", "closed tool None", "closed setup None", "finished r1"),
    ]


async def test_an_error_ends_its_step_and_leaves_its_code():
    board = ActivityBoard()
    with board.working("r1", attempt=1, environment="calc") as activity:
        with pytest.raises(UnavailableError), waits_for(StepKind.STORE):
            raise UnavailableError("gone")
        with anyio.move_on_after(0), waits_for(StepKind.ENGINE):
            await anyio.sleep_forever()
        with pytest.raises(KeyError), waits_for(StepKind.TOOL):
            raise KeyError("x")
    assert [(step.kind, step.error) for step in activity.ended] == [
        (StepKind.STORE, "unavailable"),
        (StepKind.ENGINE, "cancelled"),
        (StepKind.TOOL, "internal_error"),
    ]
    assert all(step.task is None for step in activity.ended), "a task that is over is not kept"


async def test_outside_of_an_attempt_a_step_is_noted_nowhere():
    with waits_for(StepKind.ENGINE, "e1") as step:
        step.move(tokens=3)
        assert current_activity() is None
    assert step.ended is None


async def test_what_is_noted_within_a_block_is_part_of_every_step_in_it():
    board = ActivityBoard()
    with board.working("r1", attempt=1, environment="calc") as activity:
        with noting(turn=3, segment=0), waits_for(StepKind.POOL_QUEUE) as outer:
            with noting(segment=1), waits_for(StepKind.ENGINE, tokens=5) as step:
                step.move(tokens=6)
            assert step.moved is not None
            assert outer.moved is None
        with waits_for(StepKind.TOOL):
            pass
    assert [step.detail for step in activity.ended] == [
        {"turn": 3, "segment": 1, "tokens": 6},
        {"turn": 3, "segment": 0},
        {},
    ]


async def test_tasks_have_lanes_of_their_own_and_lanes_within_lanes():
    board, lanes = ActivityBoard(), []

    async def work(name: str) -> None:
        with in_lane(name), waits_for(StepKind.TOOL, name):
            await anyio.lowlevel.checkpoint()
            with in_lane("call"):
                lanes.append(current_lane())

    with board.working("r1", attempt=1, environment="calc") as activity:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work, "1")
            tasks.start_soon(work, "2")
        assert current_lane() == ""
    assert sorted(lanes) == ["1/call", "2/call"]
    assert sorted(step.lane for step in activity.ended) == ["1", "2"]


async def test_another_task_can_work_for_an_attempt():
    board = ActivityBoard()

    async def serve(activity: Activity) -> None:
        with activity.entered(), waits_for(StepKind.ENGINE):
            assert current_activity() is activity

    async with anyio.create_task_group() as tasks:
        with board.working("r1", attempt=1, environment="calc") as activity:
            pass
        assert current_activity() is None
        tasks.start_soon(serve, activity)
    assert [step.kind for step in activity.ended] == [StepKind.ENGINE]


async def test_an_attempt_keeps_a_bounded_number_of_steps_and_counts_the_others():
    board = ActivityBoard()
    with board.working("r1", attempt=1, environment="calc") as activity:
        for _ in range(MAX_STEPS + 7):
            with waits_for(StepKind.TOOL):
                pass
    assert (len(activity.ended), activity.dropped) == (MAX_STEPS, 7)


async def test_a_rollout_that_is_back_at_once_stays_on_the_board():
    board = ActivityBoard()
    first = board.working("r1", attempt=1, environment="calc")
    first.__enter__()
    with board.working("r1", attempt=2, environment="calc") as again:
        first.__exit__(None, None, None)
        assert board.find("r1") is again
