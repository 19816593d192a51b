"""A trajectory that is trained on some turns alone."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.trajectories import Trajectory
from rollout_service.tokens import check_invariants
from rollout_service.tokens.errors import InvariantError
from rollout_service.tokens.selection import train_on
from tests.unit.live.test_replay import Stored


def sampled(trajectory: Trajectory) -> dict[int, list[tuple[int, float, int]]]:
    """Return the tokens of each turn that is trained on, with their numbers."""
    found: dict[int, list[tuple[int, float, int]]] = {}
    for segment in (*trajectory.segments, *trajectory.untrained):
        columns = (segment.turn_ids, segment.loss_mask, segment.token_ids, segment.logprobs, segment.versions)
        for turn, mask, *values in zip(*columns, strict=True):
            if mask:
                found.setdefault(turn, []).append(tuple(values))
    return found


def contexts(trajectory: Trajectory) -> dict[int, list[int]]:
    """Return what each turn was sampled on."""
    return {
        turn: segment.token_ids[: segment.turn_ids.index(turn)]
        for segment in (*trajectory.segments, *trajectory.untrained)
        for turn in set(segment.turn_ids) - {-1}
    }


@given(st.integers(0, 2**32), st.integers(1, 12), st.data())
def test_mask_1_stays_on_the_chosen_turns_alone(seed, steps, data):
    session = Stored(Random(seed))
    for _ in range(steps):
        session.step()
    whole = session.capture.trajectory()
    all_sampled = sampled(whole)
    chosen = data.draw(st.sets(st.sampled_from(sorted(all_sampled)), min_size=1)) if all_sampled else set()
    if not chosen:
        return
    selected = train_on(whole, chosen)
    check_invariants(selected)
    assert sampled(selected) == {turn: all_sampled[turn] for turn in chosen}
    assert contexts(selected) == {turn: contexts(whole)[turn] for turn in chosen}
    assert all(any(segment.loss_mask) and segment.loss_mask[-1] for segment in selected.segments)
    assert (selected.messages, selected.finish_reasons) == (whole.messages, whole.finish_reasons)


def test_a_turn_that_is_not_there_is_an_error():
    session = Stored(Random(1), is_plain=True)
    session.step()
    with pytest.raises(InvariantError, match="turn 7 is in no segment"):
        train_on(session.capture.trajectory(), {0, 7})
