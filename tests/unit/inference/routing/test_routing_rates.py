"""Rates are learned from answers, and no single answer upsets them."""

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.engines.routing.engine_model import Rates


def draw(count):
    rng = random.Random(1)
    return [(rng.randrange(10, 3000), rng.randrange(1, 300), rng.randrange(0, 30)) for _ in range(count)]


ANSWERS = draw(200)


def teach(rates, prefill, decode, crowding=0.0, *, answers=1500, noise=0.0):
    rng = random.Random(2)
    for uncached, sampled, others in draw(answers):
        seconds = uncached * prefill + sampled * (decode + others * crowding)
        rates.learn(uncached, sampled, others, seconds * rng.lognormvariate(0.0, noise))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(prefill=st.floats(1e-6, 1e-2), decode=st.floats(1e-4, 1e-1), part=st.floats(0.005, 0.3))
def test_they_converge_to_the_engines(prefill, decode, part):
    rates = Rates()
    teach(rates, prefill, decode, decode * part)
    errors = []
    for uncached, sampled, others in ANSWERS:
        truth = uncached * prefill + sampled * (decode + others * decode * part)
        errors.append(abs(rates.expected(uncached, sampled, others) / truth - 1))
    assert statistics.mean(errors) < 0.2


def test_they_are_distinguished_despite_noise():
    rates = Rates()
    teach(rates, 3e-5, 2e-3, 2e-4, noise=0.3)
    assert rates.prefill == pytest.approx(3e-5, rel=0.4)
    assert rates.decode == pytest.approx(2e-3, rel=0.4)
    assert rates.crowding == pytest.approx(2e-4, rel=0.4)


def test_a_busy_engine_is_not_taken_for_a_slow_one():
    rates = Rates()
    teach(rates, 1e-4, 1e-2, 1e-3)
    before = rates.decode
    for _ in range(300):
        rates.learn(50, 100, 25, 50 * 1e-4 + 100 * (1e-2 + 25 * 1e-3))
    assert rates.decode == pytest.approx(before, rel=0.15)


def test_one_very_slow_answer_changes_little():
    rates = Rates()
    teach(rates, 1e-4, 1e-2, 1e-4)
    before = rates.expected(500, 50, 3)
    rates.learn(500, 50, 3, 1e6)
    assert before < rates.expected(500, 50, 3) < 1.1 * before


def test_answers_that_are_all_sampling_leave_the_rate_of_reading():
    rates = Rates()
    teach(rates, 1e-4, 1e-2)
    before = rates.prefill
    for _ in range(500):
        rates.learn(5, 500, 0, 10.0)
    assert rates.prefill == pytest.approx(before, rel=0.1)
    assert rates.decode == pytest.approx(2e-2, rel=0.1)


@given(
    answers=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 10**5), st.integers(0, 10**4), st.floats(0, 1e6)),
        min_size=1,
        max_size=50,
    )
)
def test_they_stay_positive_and_finite(answers):
    rates = Rates()
    for answer in answers:
        rates.learn(*answer)
        assert 0 < rates.prefill < float("inf")
        assert 0 < rates.decode < float("inf")
        assert 0 < rates.crowding < float("inf")
