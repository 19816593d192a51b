"""The groups of a run with branches: roots first, then the samples that begin at their turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import BranchPoint
from api_schemas.runs import Advantages, BranchAt, Branching, RunRequest
from api_schemas.trajectories import Trajectory
from rollout_service.groups.branching import branch_points
from rollout_service.store import Lease
from tests.support import samples
from tests.support.run_bench import BROKEN, GONE, bench, place
from tests.support.runs import run_request


def of_turns(*logprobs: float) -> Trajectory:
    """Return a trajectory with a turn of one token for each log-probability."""
    count = len(logprobs)
    made = samples.segment(
        [1] * (count + 1),
        [0] + [1] * count,
        logprobs=[0.0, *logprobs],
        turn_ids=[-1, *range(count)],
    )
    return samples.trajectory(made, turns=count)


def turns_of(points: list[BranchPoint | None]) -> list[tuple[str, int] | None]:
    return [point and (point.rollout_id, point.turn) for point in points]


def test_the_least_likely_turns_are_chosen_root_by_root() -> None:
    roots = [("a", of_turns(-9.0, -0.1, -3.0, -2.0)), ("b", of_turns(-1.0, -1.0))]
    points = branch_points(roots, 5, BranchAt.UNCERTAIN)
    assert turns_of(points) == [("a", 2), ("b", 1), ("a", 3), ("b", 1), ("a", 1)]


def test_spread_branches_have_equal_distances() -> None:
    points = branch_points([("a", of_turns(*[-1.0] * 9))], 4, BranchAt.SPREAD)
    assert turns_of(points) == [("a", 2), ("a", 4), ("a", 6), ("a", 8)]


def test_turns_whose_calls_failed_are_chosen_and_roots_without_any_branch_where_uncertain() -> None:
    failed = of_turns(*[-1.0] * 5).model_copy(update={"tool_error_turns": [0, 2, 3]})
    early = of_turns(-1.0, -1.0, -2.0).model_copy(update={"tool_error_turns": [0]})
    points = branch_points([("a", failed), ("b", early)], 5, BranchAt.TOOL_ERROR)
    assert turns_of(points) == [("a", 2), ("b", 2), ("a", 3), ("b", 1), ("a", 2)]


def test_turns_that_the_environment_proposed_are_chosen() -> None:
    proposing = of_turns(*[-1.0] * 5).model_copy(update={"proposed_turns": [0, 3]})
    points = branch_points([("a", proposing), ("b", of_turns(-1.0, -1.0))], 3, BranchAt.PROPOSED)
    assert turns_of(points) == [("a", 3), ("b", 1), ("a", 3)]


def test_turns_are_chosen_by_their_numbers() -> None:
    points = branch_points([("a", of_turns(*[-1.0] * 5)), ("b", of_turns(-1.0, -1.0))], 5, [4, 2, 7])
    assert turns_of(points) == [("a", 4), ("b", 1), ("a", 2), ("b", 1), ("a", 4)]


@given(
    st.lists(
        st.tuples(st.lists(st.floats(-9, 0), max_size=5), st.lists(st.integers(0, 9), unique=True)),
        max_size=4,
    ),
    st.integers(1, 20),
    st.sampled_from(BranchAt) | st.lists(st.integers(1, 9), min_size=1),
)
def test_every_branch_begins_at_a_later_turn_of_a_root(roots, count, at) -> None:
    given = [
        (
            f"r{number}",
            of_turns(*logprobs).model_copy(update={"tool_error_turns": noted, "proposed_turns": noted}),
        )
        for number, (logprobs, noted) in enumerate(roots)
    ]
    points = branch_points([*given, ("lost", None)], count, at)
    assert len(points) == count
    able = {name: len(made.finish_reasons) for name, made in given if len(made.finish_reasons) > 1}
    if not able:
        assert points == [None] * count
    else:
        assert all(1 <= point.turn < able[point.rollout_id] for point in points)
        shares = [sum(point.rollout_id == name for point in points) for name in able]
        assert max(shares) - min(shares) <= 1


async def test_a_group_branches_once_its_roots_have_ended() -> None:
    seen: dict[str, BranchPoint | None] = {}

    def play(lease: Lease) -> float | ErrorInfo:
        seen[lease.rollout_id] = lease.request.branch_of
        _, sample, retry = place(lease)
        if sample == 1 or (sample == 3 and retry == 0):
            return BROKEN if sample == 1 else GONE
        return float(sample % 2)

    async with bench(play) as it:
        it.turns = 3
        branching = Branching(roots=2)
        await it.create(tasks=1, batch_size=1, group_size=5, branching=branching, advantages=Advantages.LEAVE_ONE_OUT)
        (batch,) = await it.all()
    (group,) = batch.groups
    at = [BranchPoint(rollout_id="a.0.0", turn=turn) for turn in (2, 1, 2)]  # of the root that has a reward
    assert seen == {
        "a.0.0": None,
        "a.0.1": None,
        "a.0.2": at[0],
        "a.0.3": at[1],
        "a.0.3.1": at[1],
        "a.0.4": at[2],
    }
    assert [sample.rollout.branch_of for sample in group.samples] == [None, None, *at]
    assert [sample.masked_because for sample in group.samples] == [
        None,
        "environment_failed",
        None,
        None,
        None,
    ]
    assert [sample.reward for sample in group.samples] == [0.0, None, 0.0, 1.0, 0.0]


async def test_no_results_are_reused_of_a_root_whose_history_was_shortened() -> None:
    async with bench(lambda lease: float(place(lease)[1] % 2)) as it:
        it.turns, it.shortened = 3, ["a.0.0"]
        branching = Branching(roots=2, reuse_results=True)
        await it.create(tasks=1, batch_size=1, group_size=4, branching=branching)
        (batch,) = await it.all()
    found = [sample.rollout.branch_of for sample in batch.groups[0].samples]
    assert [point and point.rollout_id for point in found] == [None, None, "a.0.1", "a.0.1"]


async def test_samples_run_from_the_task_where_no_root_has_a_turn_to_branch_at() -> None:
    async with bench(lambda lease: float(place(lease)[1] % 2)) as it:
        await it.create(tasks=1, batch_size=1, group_size=3, branching=Branching(roots=1))
        (batch,) = await it.all()
    assert [sample.rollout.branch_of for sample in batch.groups[0].samples] == [None] * 3


@pytest.mark.parametrize("at", ["tool_error", "spread", [2, 4]])
def test_a_run_says_where_its_groups_branch(at) -> None:
    request = run_request(group_size=4).model_dump() | {"branching": {"roots": 2, "at": at}}
    assert RunRequest.model_validate(request).model_dump(mode="json")["branching"]["at"] == at


@pytest.mark.parametrize("at", ["elsewhere", [], [0], [-1], list(range(1, 66)), [1.5]])
def test_turns_that_cannot_be_branched_at_are_refused(at) -> None:
    with pytest.raises(ValueError, match="branching"):
        RunRequest.model_validate(run_request().model_dump() | {"branching": {"roots": 1, "at": at}})


@pytest.mark.parametrize("roots", [2, 3])
def test_a_group_has_a_sample_that_is_no_root(roots: int) -> None:
    with pytest.raises(ValueError, match="roots must be less than group_size"):
        RunRequest.model_validate(run_request(group_size=2).model_dump() | {"branching": {"roots": roots}})
