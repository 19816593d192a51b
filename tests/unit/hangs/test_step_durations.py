"""The usual times are those of good steps of the same kind, and memory for them is bounded."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import ActivityBoard, waits_for
from rollout_service.server.hangs.durations import ENOUGH, KEPT, MAX_KEYS, StepDurations, class_of


def fail(fails: bool) -> None:
    if fails:
        raise RuntimeError


def note(board: ActivityBoard, kind: StepKind, name: str, seconds: list[float], **options: Any) -> Any:
    """Let steps take these times; return their class."""
    with board.working("r", attempt=1, environment=options.get("environment", "calc")) as activity:
        for each in seconds:
            with suppress(RuntimeError), waits_for(kind, name) as step:
                step.started -= each
                fail(options.get("fails", False))
        return class_of(activity, step)


@given(st.lists(st.floats(0, 1e4), min_size=ENOUGH, max_size=2 * KEPT))
async def test_percentiles_are_those_of_the_last_ones(seconds):
    board, durations = ActivityBoard(), StepDurations()
    board.observe(durations)
    usual = durations.usual(note(board, StepKind.TOOL, "bash", seconds))
    assert usual is not None
    last = sorted(seconds[-KEPT:])
    assert usual.count == len(last)
    for share, found in ((0.5, usual.p50), (0.95, usual.p95), (0.99, usual.p99)):
        assert found == pytest.approx(last[int(share * (len(last) - 1))], abs=0.5)


async def test_too_few_other_and_failed_ones_say_nothing():
    board, durations = ActivityBoard(), StepDurations()
    board.observe(durations)
    few = note(board, StepKind.TOOL, "bash", [1.0] * (ENOUGH - 1))
    assert durations.usual(few) is None
    failed = note(board, StepKind.TOOL, "bash", [1.0] * ENOUGH, fails=True)
    assert durations.usual(failed) is None
    other = note(board, StepKind.TOOL, "python", [1.0] * ENOUGH)
    assert durations.usual(few) is None
    assert durations.usual(other) is not None
    elsewhere = note(board, StepKind.TOOL, "python", [1.0], environment="math")
    assert durations.usual(elsewhere) is None


async def test_engines_of_a_pool_share_their_history():
    board, durations = ActivityBoard(), StepDurations()
    board.observe(durations)
    note(board, StepKind.ENGINE, "one", [1.0] * ENOUGH)
    assert durations.usual(note(board, StepKind.ENGINE, "other", [1.0])) is not None


async def test_memory_is_bounded():
    board, durations = ActivityBoard(), StepDurations()
    board.observe(durations)
    first = note(board, StepKind.TOOL, "first", [1.0] * ENOUGH)
    for number in range(MAX_KEYS):
        note(board, StepKind.TOOL, f"tool {number}", [1.0])
    assert durations.usual(first) is None
    assert len(durations._recent) == MAX_KEYS
