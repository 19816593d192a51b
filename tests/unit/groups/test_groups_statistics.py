"""Group statistics, advantages and the overlong penalty match their formulas."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.groups import (
    GroupOutcome,
    SampleOutcome,
    group_normalized,
    group_statistics,
    leave_one_out,
    parts_normalized,
    soft_overlong_penalty,
)

rewards = st.floats(-100, 100).map(lambda value: round(value, 3))
entries = st.lists(st.none() | rewards, max_size=12)
ADVANTAGES = [group_normalized, leave_one_out]


def there(values):
    return [value for value in values if value is not None]


@given(entries)
def test_leave_one_out_is_the_reward_less_the_mean_of_the_others(given_rewards):
    for position, advantage in enumerate(leave_one_out(given_rewards)):
        others = there(given_rewards[:position] + given_rewards[position + 1 :])
        if given_rewards[position] is None or not others:
            assert advantage is None
        else:
            assert advantage == pytest.approx(given_rewards[position] - statistics.fmean(others), abs=1e-9)


@given(entries)
def test_group_norm_is_a_standard_score_over_the_rewards_present(given_rewards):
    present = there(given_rewards)
    advantages = group_normalized(given_rewards)
    assert [value is None for value in advantages] == [
        value is None or len(present) < 2 for value in given_rewards
    ]
    if len(present) > 1 and len(set(present)) > 1:
        mean, std = statistics.fmean(present), statistics.pstdev(present)
        expected = [(value - mean) / std for value in present]
        assert there(advantages) == pytest.approx(expected, abs=1e-6)


@given(rewards, st.integers(2, 12))
def test_equal_rewards_have_no_advantage(reward, count):
    assert group_normalized([reward] * count) == [0.0] * count
    assert leave_one_out([reward] * count) == pytest.approx([0.0] * count, abs=1e-9)


def test_rounding_is_not_blown_up_to_an_advantage():
    assert group_normalized([0.1 + 0.2, 0.3, 0.3]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("advantages", ADVANTAGES)
@given(given_rewards=entries)
def test_advantages_sum_to_zero(advantages, given_rewards):
    assert sum(there(advantages(given_rewards))) == pytest.approx(0.0, abs=1e-6)


@given(entries)
def test_one_part_alone_is_group_norm(given_rewards):
    assert parts_normalized([(1.0, given_rewards)]) == group_normalized(given_rewards)


@given(st.data(), st.floats(0.01, 2), st.floats(0.01, 2))
def test_each_part_is_normalized_before_it_is_weighted(data, first, second):
    size = data.draw(st.integers(0, 8))
    one, other = (data.draw(st.lists(rewards, min_size=size, max_size=size)) for _ in range(2))
    both = parts_normalized([(first, one), (second, other)])
    for advantage, a, b in zip(both, group_normalized(one), group_normalized(other), strict=True):
        assert advantage is None if a is None else advantage == pytest.approx(first * a + second * b)


@pytest.mark.parametrize("weight", [0.3, 0.03, 0.0003])
def test_normalizing_a_sum_undoes_the_weights_and_normalizing_parts_does_not(weight):
    outcome, parallel = [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]
    total = [a + weight * b for a, b in zip(outcome, parallel, strict=True)]
    assert group_normalized(total) == pytest.approx([-1, -1, 1, 1]), "whatever the weight"
    by_part = parts_normalized([(1.0, outcome), (weight, parallel)])
    assert by_part == pytest.approx([-weight, -weight, weight, weight])


@pytest.mark.parametrize("advantages", ADVANTAGES)
@given(given_rewards=entries, position=st.integers(0, 12))
def test_a_missing_sample_changes_nothing_for_the_others(advantages, given_rewards, position):
    with_gap = [*given_rewards[:position], None, *given_rewards[position:]]
    assert there(advantages(with_gap)) == there(advantages(given_rewards))


@given(entries)
def test_statistics_count_only_what_is_usable(given_rewards):
    samples = tuple(
        SampleOutcome(number, reward, masked="sandbox_lost" if reward is None else None)
        for number, reward in enumerate(given_rewards)
    )
    found = group_statistics(GroupOutcome(0, samples))
    present = there(given_rewards)
    assert (found.size, found.usable) == (len(given_rewards), len(present))
    assert dict(found.masked) == (
        {"sandbox_lost": len(given_rewards) - len(present)} if None in given_rewards else {}
    )
    if present:
        assert found.mean == pytest.approx(statistics.fmean(present))
        assert found.std == pytest.approx(statistics.pstdev(present), abs=1e-9)
        assert (found.lowest, found.highest) == (min(present), max(present))
    else:
        assert found.mean is found.std is found.lowest is found.highest is None


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (16_384, 0.0), (18_432, -0.5), (20_480, -1.0), (30_000, -1.0)]
)
def test_the_overlong_penalty_is_dapo_s(tokens, expected):
    assert soft_overlong_penalty(tokens, max_tokens=20_480, buffer_tokens=4_096) == expected
    assert soft_overlong_penalty(tokens, max_tokens=20_480, buffer_tokens=4_096, penalty=2.0) == 2 * expected


@given(st.integers(1, 1_000), st.data())
def test_the_overlong_penalty_never_rises(most, data):
    buffer = data.draw(st.integers(1, most))
    values = [soft_overlong_penalty(n, max_tokens=most, buffer_tokens=buffer) for n in range(most + 3)]
    assert values == sorted(values, reverse=True)
    assert values[0] == 0.0 or buffer > most
    assert values[-1] == -1.0


def test_a_failure_has_no_reward_whatever_is_said():
    assert SampleOutcome(0, 1.0, masked="engine_lost").reward is None
    assert SampleOutcome(0, float("nan")).masked == "reward_not_finite"
    assert SampleOutcome(0, float("inf")).reward is None
    with pytest.raises(ValueError, match="needs a reason"):
        SampleOutcome(0, None)
