"""The check of finished trajectories finds every kind of damage, and says where."""

import pytest

from api_schemas.trajectories import FinishReason, ForkReason, Segment, Trajectory
from rollout_service.tokens import check_invariants
from rollout_service.tokens.errors import InvariantError


def segment(**changes):
    fields = {
        "token_ids": [5, 6, 7, 8, 9],
        "loss_mask": [0, 1, 1, 0, 1],
        "logprobs": [0.0, -1.0, -2.0, 0.0, -3.0],
        "versions": [-1, 4, 4, -1, 5],
        "turn_ids": [-1, 0, 0, -1, 1],
        "fork_reason": ForkReason.FIRST,
    }
    return Segment.model_construct(**{**fields, **changes})


def trajectory(*segments, **changes):
    counts = {}
    for part in segments:
        counts[part.fork_reason] = counts.get(part.fork_reason, 0) + 1
    fields = {
        "segments": list(segments),
        "messages": [],
        "finish_reasons": [FinishReason.STOP] * 9,
        "fork_counts": counts,
    }
    return Trajectory.model_construct(**{**fields, **changes})


def test_a_whole_trajectory_passes():
    second = segment(turn_ids=[-1, 2, 2, -1, 3], fork_reason=ForkReason.COMPACTION)
    check_invariants(trajectory(segment(), second))
    check_invariants(trajectory())


@pytest.mark.parametrize(
    ("changes", "index"),
    [
        ({"loss_mask": [0, 1, 1, 0]}, 4),
        ({"logprobs": [0.0, -1.0, -2.0, 0.0, -3.0, 0.0]}, 5),
        ({"token_ids": [5, 6, -7, 8, 9]}, 2),
        ({"loss_mask": [0, 1, 0, 0, 1]}, 2),
        ({"loss_mask": [0, 1, 1, 1, 1]}, 3),
        ({"loss_mask": [0, 1, 2, 0, 1]}, 2),
        ({"logprobs": [-0.5, -1.0, -2.0, 0.0, -3.0]}, 0),
        ({"logprobs": [0.0, -1.0, float("nan"), 0.0, -3.0]}, 2),
        ({"versions": [-1, 4, -1, -1, 5]}, 2),
        ({"versions": [-1, 4, 4, 4, 5]}, 3),
        ({"turn_ids": [-1, 0, 0, -1, 0]}, 4),
        ({"turn_ids": [-1, 1, 1, -1, 0]}, 4),
    ],
)
def test_a_damaged_token_is_found_where_it_is(changes, index):
    with pytest.raises(InvariantError) as caught:
        check_invariants(trajectory(segment(**changes)))
    assert (caught.value.segment, caught.value.index) == (0, index)
    assert caught.value.context == {"segment": 0, "index": index}


def test_a_token_is_trainable_once():
    again = segment(fork_reason=ForkReason.BRIDGE_REFUSED)
    with pytest.raises(InvariantError, match="segment 1, token 1: turn 0 appears a second time"):
        check_invariants(trajectory(segment(), again))


@pytest.mark.parametrize(
    "damaged",
    [
        trajectory(segment(fork_reason=ForkReason.COMPACTION)),
        trajectory(segment(), segment()),
        trajectory(segment(), fork_counts={}),
        trajectory(segment(), finish_reasons=[FinishReason.STOP]),
    ],
)
def test_reasons_and_turns_must_add_up(damaged):
    with pytest.raises(InvariantError):
        check_invariants(damaged)


@pytest.mark.parametrize(
    "lineage",
    [
        {"parent": 1, "shared_prefix": 0},
        {"parent": 0, "shared_prefix": 2},
        {"parent": None, "shared_prefix": 1},
        {"parent": 0, "shared_prefix": -1},
    ],
)
def test_a_segment_begins_as_its_parent_for_as_long_as_it_says(lineage):
    child = {
        "token_ids": [5, 9, 7, 8, 9],
        "turn_ids": [-1, 2, 2, -1, 3],
        "fork_reason": ForkReason.COMPACTION,
    }
    check_invariants(trajectory(segment(), segment(**child, parent=0, shared_prefix=1)))
    with pytest.raises(InvariantError, match="parent"):
        check_invariants(trajectory(segment(), segment(**child, **lineage)))


def test_tokens_shared_with_the_parent_segment_are_not_sampled_again():
    child = segment(turn_ids=[-1, 2, 2, -1, 3], fork_reason=ForkReason.COMPACTION, parent=0, shared_prefix=3)
    with pytest.raises(InvariantError, match="sampled in both"):
        check_invariants(trajectory(segment(), child))
