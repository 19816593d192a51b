"""A trace is a JSON document whose slices nest, whose arrows have two ends, and which tells what was done where."""

import json
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from api_schemas.events import Event, EventKind
from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import AttemptSteps, RolloutAttempts, StepKind
from rollout_service.observability.tracing.perfetto import Lanes, Nesting, RolloutTrace

BEGAN = 1_700_000_000.0
K = StepKind
Step = tuple[StepKind, str, str, int, int, dict[str, JsonValue]]
"""Kind, name, lane, start, length, detail."""


def attempt_of(*steps: Step, at: float = 0.0, us: int = 0, **fields: Any) -> AttemptSteps:
    ordered = sorted(steps, key=lambda step: step[3])
    kinds, names, lanes, starts, lengths, details = map(list, zip(*ordered, strict=True)) if steps else ([],) * 6
    return AttemptSteps(
        attempt=fields.pop("attempt", 1),
        environment="calc",
        started_at=BEGAN + at,
        us=us or max((start + length for _, _, _, start, length, _ in steps), default=0),
        kinds=kinds,
        names=names,
        lanes=lanes if any(lanes) else [],
        starts=starts,
        lengths=lengths,
        details=details,
        **fields,
    )


def trace_of(*rollouts: tuple[str, list[AttemptSteps]], updates: Sequence[Event] = ()) -> list[dict[str, Any]]:
    pieces: list[bytes] = []
    trace = RolloutTrace(pieces.append, began=BEGAN)
    for name, attempts in rollouts:
        trace.add(RolloutAttempts(rollout_id=name, attempts=attempts))
    trace.end(updates)
    document = json.loads(b"".join(pieces))
    events: list[dict[str, Any]] = document["traceEvents"]
    assert trace.events == len(events)
    check(events)
    return events


def check(events: list[dict[str, Any]]) -> None:
    """Check that slices nest in each thread, that arrows have two ends in slices, and that threads have names."""
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    by_thread: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in "MXiC"
        if event["ph"] in "Xi":
            assert (event["pid"], event["tid"]) in threads
            assert event["tid"] >= 1_000
        if event["ph"] == "X":
            assert event["dur"] >= 0
            by_thread[event["pid"], event["tid"]].append(event)
    for slices in by_thread.values():
        open_ends: list[int] = []
        for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
            while open_ends and open_ends[-1] <= one["ts"]:
                open_ends.pop()
            assert not open_ends or one["ts"] + one["dur"] <= open_ends[-1], one
            open_ends.append(one["ts"] + one["dur"])
    tids = [tid for _, tid in threads]
    assert len(set(tids)) == len(tids)
    ends: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for event in events:
        if "bind_id" in event:
            ends[event["bind_id"]].append(("out" if event.get("flow_out") else "in", event["ts"]))
    assert all([end for end, _ in both] == ["out", "in"] for both in ends.values())
    assert all(both[0][1] == both[1][1] for both in ends.values()), "the call begins when the turn does"


def slices(events: list[dict[str, Any]], pid: int) -> list[tuple[str, int, int]]:
    return [
        (event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X" and event["pid"] == pid
    ]


STAGES = [(Stage.INIT, 5), (Stage.ROLLOUT, 2_000), (Stage.EVALUATE, 9_000)]
AGENT: list[Step] = [
    (K.STORE, "take", "", 0, 3, {}),
    (K.WORKER, "init", "", 6, 400, {}),
    (K.SANDBOX_START, "base", "", 500, 1_000, {"sandbox": "s1"}),
    (
        K.ENGINE,
        "e1",
        "",
        2_100,
        900,
        {"turn": 0, "segment": 0, "tokens": 30, "version": 1, "request": "q-0000"},
    ),
    (K.TOOL, "bash", "", 3_100, 2_000, {"command": "ls", "sandbox": "s1"}),
    (K.ENGINE, "e1", "", 5_200, 800, {"turn": 1, "tokens": 20, "version": 2}),
    (K.SANDBOX_END, "", "", 8_000, 700, {"sandbox": "s1"}),
    (K.GRADER, "calc", "", 9_100, 100, {"reward": 1.0}),
]


def test_a_rollout_contains_its_stages_which_contain_its_steps():
    outcome: dict[str, JsonValue] = {"state": "completed", "reward": 1.0}
    steps = attempt_of(*AGENT, stages=STAGES, us=9_500, run_id="run", group=3, outcome=outcome)
    events = trace_of(("r1", [steps]))
    assert slices(events, 1) == [
        ("r1", 0, 9_500),
        ("init", 5, 1_995),
        ("wait: worker", 6, 400),
        ("start sandbox", 500, 1_000),
        ("rollout", 2_000, 7_000),
        ("turn 0", 2_100, 900),
        ("bash", 3_100, 2_000),
        ("turn 1", 5_200, 800),
        ("end sandbox", 8_000, 700),
        ("evaluate", 9_000, 500),
        ("grader: calc", 9_100, 100),
    ]
    assert slices(events, 2) == [("r1 #0", 2_100, 900), ("r1 #1", 5_200, 800)]
    assert slices(events, 3) == [("s1", 500, 8_200), ("start", 500, 1_000), ("end", 8_000, 700)]
    args = {event["name"]: event.get("args") for event in events if event["ph"] == "X" and event["pid"] == 1}
    assert args["r1"] == {"environment": "calc", "run": "run", "group": 3} | outcome
    assert args["turn 0"] == {"tokens": 30, "version": 1, "request": "q-0000"}
    assert args["bash"] == {"command": "ls"}


def updated(version: int, at: float, *, pool: str = "e1", seconds: float = 0.0) -> Event:
    data: dict[str, JsonValue] = {"version": version, "seconds": seconds, "backends": 1}
    return Event(
        event_id=version,
        time=datetime.fromtimestamp(BEGAN + at, UTC),
        kind=EventKind.WEIGHTS_UPDATED,
        subject=pool,
        data=data,
    )


def weights(events: list[dict[str, Any]]) -> list[tuple[str, str, int, int | None]]:
    """Return the thread, name, time and length of each update of weights."""
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [
        (threads[event["tid"]], event["name"], event["ts"], event.get("dur"))
        for event in events
        if event["name"].startswith("weights")
    ]


MARKED = ("e1 weights", "weights 2", 5_200, None)


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ([], [MARKED]),  # where its tokens begin, as the event is gone
        ([updated(1, -5, seconds=1), updated(2, 0.001, pool="judge"), updated(3, 60, seconds=1)], [MARKED]),
        (  # no update begins before the last one ends
            [updated(2, 0.004, seconds=0.001), updated(3, 0.0045, seconds=0.001), updated(4, 0.009)],
            [
                ("e1 weights", "weights 2", 3_000, 1_000),
                ("e1 weights", "weights 3", 4_000, 500),
                ("e1 weights", "weights 4", 9_000, 0),
            ],
        ),
    ],
)
def test_updates_of_weights_are_shown_if_they_are_of_the_pools_and_times_of_the_trace(told, shown):
    assert weights(trace_of(("r1", [attempt_of(*AGENT, us=9_500)]), updates=told)) == shown
    assert weights(trace_of(updates=told)) == []


def test_each_pool_has_the_updates_of_all_its_engines():
    calls: list[Step] = [
        (K.ENGINE, f"{pool}@10.0.0.{host}:30000", "", at, 10, {"version": version})
        for pool, host, at, version in [
            ("policy", 1, 10, 1),
            ("judge", 1, 30, 0),
            ("policy", 1, 50, 2),
            ("policy", 2, 70, 2),
            ("policy", 1, 90, 3),
        ]
    ]
    told = [updated(3, 80e-6, pool="policy")]
    assert weights(trace_of(("r1", [attempt_of(*calls)]), updates=told)) == [
        ("policy weights", "weights 3", 80, 0),
        ("policy weights", "weights 2", 50, None),
    ]


def test_sub_agents_and_tools_that_run_at_once_are_in_threads_beside_the_agent():
    steps: list[Step] = [
        (K.ENGINE, "e1", "", 0, 100, {"turn": 0}),
        (K.SUBAGENT, "w", "1", 200, 300, {}),
        (K.ENGINE, "e2", "1", 600, 300, {"turn": 0}),
        (K.SUBAGENT, "w", "2", 200, 400, {}),
        (K.ENGINE, "e2", "2", 700, 200, {"turn": 0}),
        (K.TOOL, "read", "call-1", 950, 50, {}),
        (K.ENGINE, "e1", "", 2_000, 100, {"turn": 1}),
    ]
    events = trace_of(("r1", [attempt_of(*steps)]))
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    placed = {(threads[e["tid"]], e["name"]) for e in events if e["ph"] == "X" and e["pid"] == 1}
    assert ("lane 1, beside 1", "sub-agent 1") in placed or ("lane 1, beside 1", "sub-agent 2") in placed
    assert ("lane 1, beside 2", "sub-agent 2") in placed or ("lane 1, beside 2", "sub-agent 1") in placed
    assert ("lane 1, beside 1", "read") in placed, "the first thread is free again"
    assert not any(name == "lane 1, beside 3" for name, _ in placed)


def test_the_tokens_of_each_second_add_up():
    calls: list[Step] = [
        (K.ENGINE, "e1", "", 500_000, 2_000_000, {"tokens": 200}),
        (K.ENGINE, "e2", "", 3_000_000, 0, {"tokens": 50}),
    ]
    events = trace_of(("r1", [attempt_of(*calls)]))
    counted = [event["args"]["per second"] for event in events if event["name"] == "tokens"]
    assert sum(counted) == 250
    assert counted[:2] == [100, 100]


@pytest.mark.parametrize("name", ['"', "\\", "\u2028</script>", "\x00", "日本"])
def test_names_cannot_break_the_document(name):
    step: Step = (K.TOOL, name, name, 1, 5, {"command": name, name: [name]})
    events = trace_of(("r1", [attempt_of(step)]))
    assert name in {event["name"] for event in events}


def test_what_has_no_steps_is_a_slice_and_an_empty_trace_is_one():
    assert slices(trace_of(("r1", [attempt_of(us=7)])), 1) == [("r1", 0, 7)]
    assert slices(trace_of(), 1) == []
    again = trace_of(("r1", [attempt_of(us=7), attempt_of(us=5, at=3, attempt=2)]))
    assert [name for name, _, _ in slices(again, 1)] == ["r1", "r1 attempt 2"]


TIMES = st.integers(0, 50)
STEPS = st.tuples(
    st.sampled_from([K.ENGINE, K.TOOL, K.JUDGE, K.SANDBOX_START, K.SANDBOX_END, K.PLACE]),
    st.sampled_from(["a", "b"]),
    st.sampled_from(["", "", "1", "call-1"]),
    TIMES,
    TIMES,
    st.fixed_dictionaries({}, optional={"turn": TIMES, "version": TIMES, "sandbox": st.sampled_from("xy")}),
)
ATTEMPTS = st.builds(
    lambda steps, at, stages: attempt_of(
        *steps, at=at * 1e-5, stages=[(stage, at) for stage, at in zip(Stage, sorted(stages), strict=False)]
    ),
    st.lists(STEPS, max_size=8),
    TIMES,
    st.lists(TIMES, max_size=3),
)


@given(st.lists(st.lists(ATTEMPTS, min_size=1, max_size=2), max_size=4))
def test_whatever_the_steps_are_the_trace_is_sound(rollouts):
    """`trace_of` checks it."""
    trace_of(*((f"r{number}", attempts) for number, attempts in enumerate(rollouts)))


@given(st.lists(st.tuples(TIMES, TIMES), max_size=40))
def test_intervals_of_a_lane_do_not_overlap(intervals):
    lanes, taken = Lanes(), defaultdict(list)
    for start, length in intervals:
        taken[lanes.take(start, start + length)].append((start, start + length))
    for of_lane in taken.values():
        ordered = sorted(of_lane)
        assert all(one[1] <= two[0] for one, two in pairwise(ordered))


def test_intervals_that_miss_each_other_by_a_rounding_nest():
    nesting = Nesting()
    assert nesting.fit(0, 100) == (0, 100)
    assert nesting.fit(10, 51) == (10, 51)
    assert nesting.fit(50, 80) == (51, 80), "it begins when the one before has ended"
    assert nesting.fit(81, 101) == (81, 100)
    assert nesting.fit(90, 150) is None or nesting.fit(90, 150) == (100, 150)
