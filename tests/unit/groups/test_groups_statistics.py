"""Statistics of groups, shares of a batch, and whose turn it is are right for any input."""

import statistics
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api_schemas.runs.live import LiveDelivery
from rollout_service.groups import SampleOutcome
from rollout_service.groups.scheduler import STARVATION_TURNS, Claim, FairScheduler
from rollout_service.groups.shares import Owner, left_over, next_batch, next_window
from rollout_service.groups.statistics import group_normalized, leave_one_out, parts_normalized, soft_overlong_penalty

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
    assert [value is None for value in advantages] == [value is None or len(present) < 2 for value in given_rewards]
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
    assert SampleOutcome(0, 1e39).masked == "reward_not_finite"
    with pytest.raises(ValueError, match="needs a reason"):
        SampleOutcome(0, None)


ENDLESS = 10**9
claims = st.dictionaries(
    st.sampled_from("abcde"), st.builds(Claim, st.integers(0, 9), st.integers(-2, 2), st.floats(0.1, 10.0))
)


@given(st.lists(st.tuples(claims, st.integers(0, 20)), max_size=20))
def test_shares_never_exceed_claims_and_use_all_there_is(rounds):
    scheduler = FairScheduler()
    for asked, places in rounds:
        granted = scheduler.grant(asked, places)
        assert all(0 <= granted[run] <= asked[run].groups for run in granted)
        assert sum(granted.values()) == min(places, sum(claim.groups for claim in asked.values()))


@given(
    st.lists(st.floats(0.2, 5.0), min_size=1, max_size=5),
    st.lists(st.integers(1, 7), min_size=60, max_size=60),
)
def test_shares_follow_the_weights(weights, places):
    scheduler, had = FairScheduler(), Counter()
    for free in places:
        had.update(scheduler.grant({str(i): Claim(ENDLESS, 0, w) for i, w in enumerate(weights)}, free))
    total = sum(places)
    for number, weight in enumerate(weights):
        due = total * weight / sum(weights)
        # Only the turns that guard against starvation ignore the weights.
        assert abs(had[str(number)] - due) <= total / STARVATION_TURNS + len(weights) + 1


@given(st.integers(1, 400))
def test_a_higher_priority_goes_first_and_a_lower_one_continues(turns):
    scheduler, had = FairScheduler(), Counter()
    for _ in range(turns):
        had.update(scheduler.grant({"high": Claim(1, 5), "low": Claim(1, 0)}, 1))
    assert turns // (2 * STARVATION_TURNS) <= had["low"] <= turns // STARVATION_TURNS
    assert had["high"] + had["low"] == turns


@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(0.01, 100.0)), min_size=2, max_size=6))
@settings(max_examples=30)
def test_no_run_starves(runs):
    scheduler, had = FairScheduler(), Counter()
    asked = {str(i): Claim(ENDLESS, priority, weight) for i, (priority, weight) in enumerate(runs)}
    for _ in range(STARVATION_TURNS * len(runs)):
        had.update(scheduler.grant(asked, 1))
    assert set(had) == set(asked)
    assert min(had.values()) >= 1


def test_time_that_was_not_used_gives_no_claim():
    scheduler = FairScheduler()
    scheduler.grant({"a": Claim(ENDLESS)}, 1_000)
    both = scheduler.grant({"a": Claim(ENDLESS), "late": Claim(ENDLESS)}, 100)
    assert abs(both["a"] - both["late"]) <= 100 / STARVATION_TURNS + 1


def test_a_returning_run_does_not_wait_for_the_others_to_catch_up():
    scheduler = FairScheduler()
    scheduler.grant({"a": Claim(ENDLESS), "b": Claim(ENDLESS)}, 1_000)
    scheduler.grant({"b": Claim(ENDLESS)}, 1_000)
    scheduler.forget("a")
    both = scheduler.grant({"a": Claim(ENDLESS), "b": Claim(ENDLESS)}, 100)
    assert abs(both["a"] - both["b"]) <= 100 / STARVATION_TURNS + 1


def test_wanting_little_and_often_gives_no_more_than_the_share():
    scheduler, had = FairScheduler(), Counter()
    for turn in range(1_600):
        asked = {"always": Claim(ENDLESS, 0, 9.0), "often": Claim(turn % 2, 0, 1.0)}
        had.update(scheduler.grant(asked, 1))
    assert had["often"] <= 1_600 / 10 + 1_600 / STARVATION_TURNS + 2


@dataclass(frozen=True)
class OneGroup:
    owners: list[Owner]


def group(session: str, user: str = "u", tenant: str = "default") -> OneGroup:
    return OneGroup([Owner(session, f"{user} of {tenant}", tenant)])


def ids(groups: list[OneGroup] | None) -> list[str] | None:
    return None if groups is None else [owner.session for one in groups for owner in one.owners]


def test_a_batch_waits_until_other_users_fill_it():
    groups = [group(f"a{number}", "a") for number in range(9)]
    assert next_window(groups, [], 4, LiveDelivery()) is None
    groups += [group("b", "b"), group("c", "c"), group("d", "d"), group("e", "e")]
    assert ids(next_window(groups, [], 4, LiveDelivery())) == ["a0", "b", "c", "d"]


def test_one_user_may_fill_a_batch_if_the_run_says_so():
    groups = [group("s") for _ in range(5)]
    order = LiveDelivery(max_user_share=1.0, max_session_share=0.5)
    assert next_window(groups, [], 4, order) is None
    whole = LiveDelivery(max_user_share=1.0, max_session_share=1.0)
    assert ids(next_window(groups, [], 4, whole)) == ["s"] * 4
    assert ids(next_window(groups, [], 1, LiveDelivery())) == ["s"]  # one at least


def test_tenants_are_not_mixed_unless_the_run_says_so():
    groups = [group("a", "a", "x"), group("b", "b", "y"), group("c", "c", "y")]
    assert ids(next_window(groups, [], 2, LiveDelivery())) == ["b", "c"]
    assert ids(next_window(groups, [], 2, LiveDelivery(mix_tenants=True))) == ["a", "b"]


def test_a_batch_that_has_begun_is_filled_within_its_limits():
    waiting = [group("old", "a", "x")]
    groups = [group("a", "a", "x"), group("b", "b", "y"), group("c", "c", "x")]
    assert ids(next_window(groups, waiting, 2, LiveDelivery())) == ["c"]


def test_a_group_that_waits_holds_up_no_other_tenant():
    waiting = [group("old", "a", "x")]
    groups = [group("b", "b", "y"), group("c", "c", "y")]
    assert ids(next_window(groups, waiting, 2, LiveDelivery())) == ["b", "c"]


def test_a_group_whose_neighbor_is_gone_goes_with_others_of_its_tenant():
    ready = [group("a", "a", "x"), group("c", "c", "y"), group("d", "d", "y")]
    assert ids(next_batch(ready, 2, LiveDelivery())) == ["c", "d"]
    assert ids(left_over(ready, 2, LiveDelivery())) == ["a"]
    assert ids(next_batch(ready[:2], 2, LiveDelivery(), is_last=True)) == ["a"]
    assert next_batch(ready[:2], 2, LiveDelivery()) == []


GROUPS = st.lists(
    st.builds(group, st.sampled_from("stuv"), st.sampled_from("abcd"), st.sampled_from("xy")), max_size=14
)


@given(GROUPS, GROUPS, st.integers(1, 5), st.booleans(), st.floats(0.05, 1.0))
def test_the_limits_hold_for_any_batch(groups, waiting, size, mix, share):
    order = LiveDelivery(max_user_share=share, max_session_share=share, mix_tenants=mix)
    limit = max(1, int(share * size + 1e-9))

    def check(batch: list[OneGroup]) -> None:
        owners = [owner for one in batch for owner in one.owners]
        assert 0 < len(batch) <= size
        assert max(Counter(owner.user for owner in owners).values()) <= limit
        assert max(Counter(owner.session for owner in owners).values()) <= limit
        assert mix or len({owner.tenant for owner in owners}) == 1

    def without(batch: list[OneGroup]) -> list[OneGroup]:
        return [one for one in ready if not any(one is other for other in batch)]

    window = next_window(groups, waiting, size, order)
    ready = [*waiting, *(window or [])]
    assert len(left_over(ready, size, order)) % size == len(ready) % size
    assert window is None or next_batch(ready, size, order), "a window completes a batch"
    while batch := next_batch(ready, size, order):
        check(batch)
        ready = without(batch)
    while ready:  # the last ones, once the run is over
        batch = next_batch(ready, size, order, is_last=True)
        check(batch)
        ready = without(batch)
