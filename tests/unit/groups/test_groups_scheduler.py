"""Runs share places by weight and priority, and none starves."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.groups import Claim, FairScheduler
from rollout_service.groups.scheduler import STARVATION_TURNS

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
