"""Work is judged stuck by its kind, its signs and the usual length of such steps."""

import time
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangVerdict, UsualTimes
from rollout_service.activity import ActivityBoard, waits_for
from rollout_service.cli.console import HANG_STYLES
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.server.hangs.probes import FAILURES, EngineProbes, SandboxProbes
from rollout_service.server.hangs.rules import (
    FACTOR,
    FLOORS,
    GONE_SECONDS,
    HELD_KINDS,
    OVERRUN_SECONDS,
    UNSEEN,
    Signs,
    judge,
    patience,
    waits_of,
)
from rollout_service.server.hangs.verdicts import ENOUGH, KEPT, MAX_KEYS, StepDurations, Verdicts, class_of
from rollout_service.server.lifecycle.startup import make_stages
from rollout_service.settings import PipelineSettings

KINDS = st.sampled_from(list(StepKind))
WORK = st.sampled_from([kind for kind in StepKind if kind not in HELD_KINDS])
SECONDS = st.floats(0, 1e5, allow_nan=False)
USUAL = st.none() | st.builds(
    lambda p50, more: UsualTimes(count=20, p50=p50, p95=p50 + more, p99=p50 + 2 * more),
    st.floats(0, 1e3),
    st.floats(0, 1e3),
)
SIGNS = st.builds(Signs, st.sampled_from([None, True, False]), st.none() | st.floats(0, 1e5), st.booleans())
LIMITS = st.none() | st.floats(0.1, 1e4)


@given(KINDS, SECONDS, USUAL, LIMITS, LIMITS, SIGNS)
def test_nothing_is_remarkable_before_its_floor_unless_it_is_proven(kind, seconds, usual, limit, own, signs):
    earliest = min(FLOORS[kind], GONE_SECONDS, *([own + OVERRUN_SECONDS] if own else []))
    if seconds < earliest:
        verdict = judge(kind, seconds=seconds, quiet=seconds, usual=usual, limit=limit, own_limit=own, signs=signs)
        assert verdict is None


@given(KINDS, SECONDS, USUAL, LIMITS, LIMITS, SIGNS)
def test_a_wait_that_grows_older_never_becomes_less_remarkable(kind, seconds, usual, limit, own, signs):
    worse = [None, HangVerdict.HELD, HangVerdict.SLOW, HangVerdict.IDLE, HangVerdict.STUCK]
    found = [
        judge(kind, seconds=each, quiet=each, usual=usual, limit=limit, own_limit=own, signs=signs)
        for each in (seconds, seconds * 2)
    ]
    assert worse.index(found[0]) <= worse.index(found[1])


@given(WORK, SECONDS, USUAL, LIMITS, st.sampled_from([None, True]))
def test_what_moves_is_never_stuck(kind, seconds, usual, limit, responds):
    for quiet, signs in ((0.0, Signs(responds)), (seconds, Signs(responds, still_seconds=0.0))):
        verdict = judge(kind, seconds=seconds, quiet=quiet, usual=usual, limit=limit, signs=signs)
        assert verdict in (None, HangVerdict.SLOW)


@given(st.sampled_from(sorted(HELD_KINDS)), SECONDS, USUAL, LIMITS, SIGNS)
def test_what_is_meant_to_wait_is_held_at_most(kind, seconds, usual, limit, signs):
    verdict = judge(kind, seconds=seconds, quiet=seconds, usual=usual, limit=limit, signs=signs)
    assert verdict in (None, HangVerdict.HELD)


@given(KINDS, USUAL, LIMITS)
def test_patience_follows_the_history_and_never_falls_below_the_floor(kind, usual, limit):
    seconds = patience(kind, usual, limit)
    assert seconds >= FLOORS[kind]
    if usual is not None:
        assert seconds == max(FLOORS[kind], FACTOR * usual.p99)
    elif limit is not None and kind not in HELD_KINDS:
        assert seconds == max(FLOORS[kind], limit / 2)


QUICK = UsualTimes(count=100, p50=0.1, p95=0.5, p99=1.0)
LONG = UsualTimes(count=100, p50=20.0, p95=30.0, p99=40.0)


@pytest.mark.parametrize(
    ("kind", "fields", "verdict"),
    [
        (StepKind.ENGINE, {"signs": Signs(responds=False)}, HangVerdict.STUCK),
        (StepKind.ENGINE, {"signs": Signs(True, 29.0)}, HangVerdict.STUCK),
        (StepKind.ENGINE, {"signs": Signs(True, 12.0), "limit": 900.0}, None),
        (StepKind.ENGINE, {"signs": Signs(True, 12.0, is_idle=True)}, HangVerdict.STUCK),
        (StepKind.ENGINE, {"signs": UNSEEN, "limit": 900.0}, None),
        (StepKind.ENGINE, {"signs": Signs(True, 29.0), "usual": LONG}, None),
        (StepKind.TOOL, {"signs": Signs(True, 29.0), "own_limit": 300.0}, HangVerdict.IDLE),
        (StepKind.TOOL, {"signs": Signs(True, 29.0), "own_limit": 50.0}, HangVerdict.STUCK),
        (StepKind.TOOL, {"signs": Signs(True, 29.0)}, HangVerdict.STUCK),
        (StepKind.TOOL, {"signs": Signs(False, 29.0), "own_limit": 300.0}, HangVerdict.STUCK),
        (StepKind.TOOL, {"signs": Signs(True, 29.0), "own_limit": 300.0, "usual": QUICK}, HangVerdict.STUCK),
        (StepKind.TOOL, {"signs": Signs(True, 0.5), "own_limit": 300.0}, None),
        (StepKind.TOOL, {"signs": Signs(True, 0.5), "own_limit": 50.0}, HangVerdict.SLOW),
        (StepKind.TOOL, {"signs": Signs(True, 0.5), "own_limit": 20.0}, HangVerdict.STUCK),
        (StepKind.GRADER, {"signs": Signs(True, 29.0), "limit": 900.0}, None),
        (StepKind.STORE, {"signs": UNSEEN}, HangVerdict.STUCK),
        (StepKind.HOST, {}, HangVerdict.HELD),
        (StepKind.PAUSED_POOL, {"usual": LONG}, None),
    ],
)
def test_the_verdict_after_half_a_minute(kind, fields, verdict):
    assert judge(kind, seconds=30.0, quiet=30.0, **fields) is verdict


def test_every_kind_of_step_has_a_floor():
    assert set(FLOORS) == set(StepKind)
    assert all(floor <= 60 for floor in FLOORS.values())


def test_every_verdict_is_printed_in_a_style():
    assert set(HANG_STYLES) == set(HangVerdict)


@pytest.mark.parametrize(
    ("still", "usual", "verdict"), [(31.0, None, HangVerdict.IDLE), (29.0, None, None), (31.0, LONG, None)]
)
def test_a_grader_at_rest_is_idle_long_before_its_stage_ends_it(still, usual, verdict):
    found = judge(StepKind.GRADER, seconds=40.0, quiet=40.0, limit=600.0, usual=usual, signs=Signs(True, still))
    assert found is verdict


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


class CountedBoard(ActivityBoard):
    looks = 0

    def all(self):
        self.looks += 1
        return super().all()


@pytest.mark.parametrize(("at_work", "verdict"), [(1, HangVerdict.STUCK), (2, HangVerdict.HELD)])
async def test_all_who_wait_for_a_stuck_worker_are_stuck_after_one_look_at_the_board(at_work, verdict):
    board, asked = CountedBoard(), []
    places = {f"{stage}_{kind}": 9 for stage in Stage for kind in ("queue", "workers")}
    stages = make_stages(PipelineSettings(**places), Metrics())
    context: Any = SimpleNamespace(
        activities=board, store=None, stages=stages, admission=None, subagent_slots=SimpleNamespace()
    )
    serving: Any = SimpleNamespace(backend=lambda _: None, pool=asked.append)
    with ExitStack() as stack:
        for number in range(100):
            activity = stack.enter_context(board.working(f"r-{number}", attempt=1, environment="calc"))
            activity.enter_stage(Stage.ROLLOUT)
            if number < at_work:
                activity.working_since = activity.started
            kind, name = (StepKind.GRADER, "g") if number == 0 else (StepKind.WORKER, Stage.ROLLOUT)
            step = stack.enter_context(
                waits_for(StepKind.POOL_QUEUE, "policy") if number > 50 else waits_for(kind, name)
            )
            step.started -= 100
        waits = list(waits_of(board.all(), time.perf_counter()))
        board.looks = 0
        found = Verdicts(context, serving, StepDurations()).of(waits)
    assert {one.verdict for one in found if one.kind is StepKind.WORKER} == {verdict}
    assert (board.looks, asked) == (1, ["policy"])


async def test_a_plugin_whose_probe_fails_is_gone_and_ends_nothing():
    class Broken:
        async def load(self):
            raise KeyError("num_running")

        async def responds(self, seconds: float):
            raise KeyError("state")

        id, pid, backend = "broken", None, property(lambda self: self)

    broken: Any = Broken()
    engines, sandboxes = EngineProbes(lambda _: broken), SandboxProbes()
    for _ in range(FAILURES):
        await engines.look(["broken"])
        await sandboxes.look({"broken": broken})
    assert (engines.signs("broken").responds, engines.note("broken")) == (False, "KeyError: 'num_running'")
    assert sandboxes.signs("broken").responds is False
