"""Only as many groups start as are needed, the acceptance rate is learned, and only stragglers are cut off."""

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from api_schemas.runs import Stragglers
from rollout_service.groups.acceptance import CONFIDENCE, AcceptanceRate, GroupProgress, groups_needed
from rollout_service.groups.scheduler import CompletionTimes

NEW = GroupProgress()


def learned(share, groups=400):
    acceptance = AcceptanceRate()
    draw = random.Random(1)
    for _ in range(groups):
        acceptance.learn(kept=draw.random() < share)
    return acceptance


def expected(under_way, acceptance):
    chances = [(acceptance.given(progress), count) for progress, count in under_way.items()]
    mean = sum(chance * count for chance, count in chances)
    return mean, sum(chance * (1 - chance) * count for chance, count in chances)


progresses = st.builds(GroupProgress, st.integers(0, 7), st.booleans())
confidences = st.floats(0.05, 0.99)


@given(
    st.integers(-20, 200),
    st.dictionaries(progresses, st.integers(1, 50), max_size=6),
    st.floats(0.05, 0.95),
    confidences,
)
def test_begins_as_many_as_are_needed_with_this_confidence_and_no_more(need, under_way, share, confidence):
    from statistics import NormalDist

    acceptance = AcceptanceRate(prior=share)
    z = NormalDist().inv_cdf(confidence)

    def suffices(more):
        mean, variance = expected(under_way, acceptance)
        rate = acceptance.rate
        return mean + more * rate - need >= z * math.sqrt(variance + more * rate * (1 - rate)) - 1e-6 or need <= 0

    more = groups_needed(need=need, under_way=under_way, acceptance=acceptance, confidence=confidence)
    assert suffices(more)
    assume(z >= 0)
    assert more == 0 or not suffices(more - 1) or more == 1


@given(st.integers(1, 100), st.integers(0, 100))
def test_needs_are_met_before_more_is_started(need, running):
    acceptance = learned(0.5)
    first = groups_needed(need=need, under_way={}, acceptance=acceptance, confidence=CONFIDENCE)
    under_way = {NEW: min(running, first)} if running else {}
    rest = groups_needed(need=need, under_way=under_way, acceptance=acceptance, confidence=CONFIDENCE)
    assert abs(sum(under_way.values()) + rest - first) <= 1


def test_the_confidence_is_kept():
    acceptance, draw = learned(0.4, 4_000), random.Random(2)
    begun = groups_needed(need=32, under_way={}, acceptance=acceptance, confidence=0.9)
    enough = sum(sum(draw.random() < acceptance.rate for _ in range(begun)) >= 32 for _ in range(4_000))
    assert 0.86 < enough / 4_000 < 0.95
    assert begun < 1.4 * 32 / 0.4


@given(st.floats(0.1, 0.9))
def test_the_rate_is_learned(share):
    assert learned(share, 2_000).rate == pytest.approx(share, abs=0.12)


def test_the_rate_follows_a_drift_and_a_new_epoch_makes_it_follow_faster():
    slow, fast = learned(0.9), learned(0.9)
    fast.new_epoch()
    for _ in range(40):
        slow.learn(kept=False)
        fast.learn(kept=False)
    assert fast.rate < slow.rate < 0.85
    for _ in range(2_000):
        slow.learn(kept=False)
    assert slow.rate == pytest.approx(0.02)


@pytest.mark.parametrize(("kept", "dropped"), [(0, 0), (3, 0), (40, 120), (4_000, 1_000)])
def test_counts_are_worth_the_groups_that_were_counted(kept, dropped):
    mixed = AcceptanceRate()
    for group in range(kept + dropped):
        mixed.learn(kept=group % (kept + dropped) * kept % (kept + dropped) < kept)
    assert AcceptanceRate.from_counts(kept, dropped).rate == pytest.approx(mixed.rate, abs=0.003)


def test_without_evidence_the_prior_decides():
    assert AcceptanceRate(prior=0.3).rate == pytest.approx(0.3)
    assert AcceptanceRate(prior=0.3).given(GroupProgress(3, varied=True)) == pytest.approx(0.3)


def test_a_groups_progress_changes_its_probability_of_being_kept():
    acceptance = AcceptanceRate()
    mixed, alike = GroupProgress(5, varied=True), GroupProgress(5, varied=False)
    for turn in range(200):
        acceptance.learn(kept=bool(turn % 2), path=[mixed if turn % 2 else alike])
    assert acceptance.given(mixed) > 0.95
    assert acceptance.given(alike) < 0.05
    few = groups_needed(need=10, under_way={mixed: 10}, acceptance=acceptance, confidence=0.5)
    many = groups_needed(need=10, under_way={alike: 10}, acceptance=acceptance, confidence=0.5)
    assert few <= 1 < 15 < many


# ---- stragglers


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.integers(1, 50), st.floats(0.01, 0.99))
def test_quantiles_are_of_the_latest_times(times, window, share):
    completions = CompletionTimes(window=window, fewest=1)
    for seconds in times:
        completions.add(seconds)
    latest = sorted(times[-window:])
    assert completions.quantile(share) == latest[math.ceil(share * len(latest)) - 1]
    assert len(completions) == len(latest)


def test_nothing_is_cut_off_before_enough_was_seen():
    times, rule = CompletionTimes(fewest=32), Stragglers(quantile=0.9, factor=2.0)
    for _ in range(31):
        times.add(1.0)
        assert times.straggler_limit(rule) is None
    times.add(1.0)
    assert times.straggler_limit(rule) == 2.0


def test_cutting_off_does_not_lower_the_limit():
    """It would if rollouts that were cut off were forgotten or counted at the limit: the times lose their tail."""
    draw, rule, times = random.Random(3), Stragglers(quantile=0.9, factor=1.0), CompletionTimes()
    first = None
    for _ in range(20_000):
        seconds, limit = draw.lognormvariate(0, 1), times.straggler_limit(rule)
        if limit is not None and seconds > limit:
            times.add_cut_off()
        else:
            times.add(seconds)
        if first is None and len(times) == 1_024:
            first = times.straggler_limit(rule)
    last = times.straggler_limit(rule)
    assert first is not None
    assert last is not None
    assert last == pytest.approx(math.exp(1.2816), rel=0.3)


def test_no_more_are_cut_off_after_too_many():
    times = CompletionTimes(fewest=4)
    for _ in range(4):
        times.add(1.0)
    for _ in range(10):
        times.add_cut_off()
    assert times.straggler_limit(Stragglers(quantile=0.5)) is None
