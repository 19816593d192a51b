"""Nodes are added when a need lasts and given back when they are idle, at times that the tests script."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.nodes import NodeState
from api_schemas.views.overview import NextNode
from rollout_service.cluster.slurm.commands import QueuedJob
from rollout_service.cluster.slurm.scaling import (
    ActionKind,
    AddedNode,
    NodesDoNotStartError,
    ScaleAction,
    ScaleInput,
    ScaleOptions,
    Scaling,
)

OPTIONS = ScaleOptions(most=3, grow_after=60, shrink_after=300, start_seconds=900, ahead_seconds=600, end_seconds=100)


@dataclass
class Simulated:
    """A Slurm and its nodes, with the decisions on them; each look is ten seconds after the last."""

    options: ScaleOptions = OPTIONS
    now: float = 1_000.0
    need: int = 0
    added: dict[int, AddedNode] = field(default_factory=dict)
    scaling: Scaling = field(init=False)
    submitted: int = 0

    def __post_init__(self) -> None:
        self.scaling = Scaling(self.options)

    def look(self) -> list[ScaleAction]:
        """Look once, and let Slurm and the nodes follow the actions."""
        self.now += 10
        answer = NextNode(rollouts=8 * min(1, self.need), nodes=self.need, message="12 rollouts wait.")
        actions = self.scaling.decide(ScaleInput(self.now, answer, list(self.added.values())))
        for action in actions:
            self.follow(action)
        return actions

    def follow(self, action: ScaleAction) -> None:
        if action.kind is ActionKind.SUBMIT:
            assert action.slot not in self.added
            self.submitted += 1
            job = QueuedJob(f"{self.submitted}_{action.slot}", action.slot, "PENDING")
            self.added[action.slot] = AddedNode(job)
            self.scaling.submitted({job.job: action.slot})
        elif action.kind is ActionKind.DRAIN:
            self.added[action.slot] = replace(self.added[action.slot], state=NodeState.DRAINING)
        else:
            assert self.added[action.slot].job.job == action.job
            del self.added[action.slot]

    def looks(self, seconds: float) -> list[str]:
        """Look for some time; return what was done, with the slots."""
        actions = [action for _ in range(int(seconds / 10)) for action in self.look()]
        return [f"{action.kind} {action.slot}" for action in actions]

    def go_on(self, after_each: Callable[[], None]) -> None:
        """Look until no more is tried; something happens after each look."""
        for _ in range(1_000):
            self.look()
            after_each()

    def run(self, slot: int, holds: int = 0, **job: object) -> None:
        """Let a slot's node work."""
        known = self.added[slot]
        running = replace(known.job, **{"state": "RUNNING"} | job)
        self.added[slot] = AddedNode(running, f"n{slot}-x", NodeState.READY, holds)

    def start(self, slot: int) -> None:
        """Let a slot's job run, without its node."""
        self.added[slot] = AddedNode(replace(self.added[slot].job, state="RUNNING"))


def grown(slots: int, **options: object) -> Simulated:
    """Return a cluster with so many working nodes of more."""
    cluster = Simulated(replace(OPTIONS, **options), need=slots)
    cluster.looks(80)
    assert sorted(cluster.added) == list(range(1, slots + 1))
    for slot in cluster.added:
        cluster.run(slot, holds=1)
    cluster.need = 0
    return cluster


def test_a_need_counts_once_it_has_lasted_and_what_is_on_its_way_helps():
    cluster = Simulated(need=1)
    assert cluster.looks(60) == []
    assert cluster.looks(10) == ["submit 1"]
    assert cluster.looks(600) == [], "the one that waits in Slurm's queue counts"
    cluster.start(1)
    assert cluster.looks(600) == [], "and so does one that starts"
    cluster.run(1, holds=8)
    assert cluster.looks(60) == []
    assert cluster.looks(10) == ["submit 2"]


def test_as_many_are_added_as_were_needed_all_the_time_and_never_more_than_the_most():
    cluster = Simulated(need=9)
    cluster.looks(40)
    cluster.need = 2
    cluster.looks(10)
    cluster.need = 9
    assert cluster.looks(20) == ["submit 1", "submit 2"]
    assert cluster.looks(300) == ["submit 3"]


def test_a_need_that_comes_and_goes_adds_nothing():
    cluster = Simulated()
    for _ in range(20):
        cluster.need = 3
        assert cluster.looks(50) == []
        cluster.need = 0
        assert cluster.looks(10) == []


def test_the_least_number_is_added_at_once_and_kept():
    cluster = Simulated(replace(OPTIONS, least=2))
    assert cluster.looks(10) == ["submit 1", "submit 2"]
    for slot in (1, 2):
        cluster.run(slot)
    assert cluster.looks(2_000) == []


def test_an_idle_node_is_drained_and_then_its_job_ends():
    cluster = grown(2)
    cluster.run(2, holds=0)
    assert cluster.looks(300) == []
    assert cluster.looks(20) == ["drain 2", "end 2"]
    assert cluster.looks(2_000) == [], "the other one works"


def test_a_node_that_claimed_something_before_its_drain_is_left_until_it_holds_nothing():
    cluster = grown(1)
    cluster.run(1, holds=0)
    assert cluster.looks(310) == ["drain 1"]
    cluster.added[1] = replace(cluster.added[1], holds=2)
    assert cluster.looks(2_000) == []
    cluster.added[1] = replace(cluster.added[1], holds=0)
    assert cluster.looks(10) == ["end 1"]


def test_a_short_rest_or_a_need_elsewhere_ends_nothing():
    cluster = grown(1)
    for _ in range(10):
        cluster.run(1, holds=0)
        assert cluster.looks(290) == []
        cluster.run(1, holds=1)
        assert cluster.looks(10) == []
    cluster.need = 1
    cluster.run(1, holds=0)
    assert "drain 1" not in cluster.looks(600)


def test_jobs_that_still_wait_in_the_queue_are_taken_out_before_nodes_are_drained():
    cluster = Simulated(need=3, options=replace(OPTIONS, least=1))
    cluster.looks(80)
    cluster.run(2)
    cluster.need = 0
    assert cluster.looks(310) == ["cancel 3", "cancel 1"]


def test_a_job_near_its_limit_is_drained_ahead_and_replaced_if_it_is_still_needed():
    cluster = grown(1)
    cluster.run(1, holds=4, seconds_left=700.0)
    assert cluster.looks(100) == []
    cluster.run(1, holds=4, seconds_left=590.0)
    cluster.need = 1
    assert cluster.looks(80) == ["drain 1", "submit 2"]
    cluster.added[1] = replace(cluster.added[1], holds=0)
    assert cluster.looks(10) == ["end 1"]


def test_a_preempted_job_waits_in_the_queue_again_and_counts_as_on_its_way():
    cluster = grown(1)
    cluster.added[1] = AddedNode(replace(cluster.added[1].job, state="PENDING"))
    cluster.need = 1
    assert cluster.looks(600) == []
    assert cluster.scaling.failed == 0


def test_a_node_that_does_not_become_ready_is_replaced_a_bounded_number_of_times():
    cluster = Simulated(need=1)

    def start_all() -> None:
        for slot in cluster.added:
            cluster.start(slot)

    with pytest.raises(NodesDoNotStartError, match="3 starts of more nodes in a row have failed") as caught:
        cluster.go_on(start_all)
    assert cluster.submitted == 3
    assert caught.value.code == "slurm_nodes_do_not_start"
    assert "was not ready after 900 s" in str(caught.value)
    assert "slurm logs" in caught.value.hint


@pytest.mark.parametrize("least", [0, 1])
def test_jobs_that_end_before_their_nodes_are_ready_are_not_started_forever(least):
    cluster = Simulated(replace(OPTIONS, least=least), need=1)
    began = cluster.now
    with pytest.raises(NodesDoNotStartError, match="ended before its node was ready"):
        cluster.go_on(cluster.added.clear)
    assert cluster.submitted == 3
    assert cluster.now - began >= 2 * OPTIONS.grow_after, "not one right after the other"


def test_a_node_that_becomes_ready_or_a_job_that_a_person_ends_later_begins_the_count_anew():
    cluster = Simulated(need=1)
    for _ in range(5):
        cluster.looks(80)
        cluster.added.clear()
        cluster.looks(10)
        assert cluster.scaling.failed == 1
        cluster.looks(80)
        cluster.run(1, holds=3)
        cluster.looks(10)
        cluster.added.clear()
        cluster.looks(10)
        assert cluster.scaling.failed == 0


def test_a_job_that_does_not_end_in_order_is_cancelled():
    cluster = grown(1)
    cluster.added[1] = replace(cluster.added[1], holds=0, state=NodeState.DRAINING)
    stuck = cluster.added[1]
    assert cluster.looks(10) == ["end 1"]
    cluster.added[1] = stuck
    assert cluster.looks(90) == []
    assert cluster.looks(10) == ["cancel 1"]


def test_whoever_looks_anew_goes_on_with_what_is_there():
    cluster = grown(3)
    cluster.run(3, holds=0)
    cluster.looks(310)
    cluster.scaling = Scaling(cluster.options)
    cluster.need = 5
    assert cluster.added.keys() == {1, 2, 3}
    assert cluster.looks(600) == ["end 3", "submit 3"]


STEPS = st.lists(
    st.tuples(
        st.integers(0, 6),
        st.dictionaries(
            st.integers(1, 3),
            st.sampled_from(["starts", "works", "rests", "dies", "leaves", "late"]),
            max_size=3,
        ),
    ),
    max_size=80,
)


@given(STEPS, st.integers(0, 2))
def test_whatever_happens_there_are_never_too_many_and_only_what_holds_nothing_ends(steps, least):
    cluster = Simulated(replace(OPTIONS, least=least, grow_after=20, shrink_after=30, start_seconds=50))
    happened = {
        "starts": cluster.start,
        "works": lambda slot: cluster.run(slot, holds=2),
        "rests": cluster.run,
        "dies": cluster.start,
        "leaves": lambda slot: cluster.added.pop(slot),
        "late": lambda slot: cluster.run(slot, holds=1, seconds_left=5.0),
    }
    try:
        for need, events in steps:
            cluster.need = need
            for slot, event in events.items():
                if slot in cluster.added and cluster.added[slot].state is not NodeState.DRAINING:
                    happened[event](slot)
            before = dict(cluster.added)
            for action in cluster.look():
                if action.kind is ActionKind.END:
                    assert (before[action.slot].state, before[action.slot].holds) == (NodeState.DRAINING, 0)
                if action.kind is ActionKind.CANCEL:
                    assert not before[action.slot].is_alive
            assert len(cluster.added) <= cluster.options.most
    except NodesDoNotStartError:
        assert cluster.scaling.failed == OPTIONS.attempts
