"""The choice of a backend is sticky, fair, and gentle with newcomers."""

import random
import statistics
from collections import Counter

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from rollout_service.engines.contract import GenerateRequest, new_request_id
from rollout_service.engines.routing.contract import Candidate, Cost, Decision, LeastLoaded, Reason
from rollout_service.engines.routing.engine_model import Rates
from rollout_service.observability.telemetry.engines import RoutingTrace

REQUEST = GenerateRequest(new_request_id(), [1])


def candidates(*in_flight, shares=None):
    shares = shares or [1.0] * len(in_flight)
    return [Candidate(f"b{i}", load, share) for i, (load, share) in enumerate(zip(in_flight, shares, strict=True))]


def test_the_least_loaded_is_chosen():
    assert LeastLoaded().choose(candidates(3, 1, 2), REQUEST, None).backend_id == "b1"


def test_equals_take_turns():
    router = LeastLoaded()
    chosen = [router.choose(candidates(0, 0, 0), REQUEST, None).backend_id for _ in range(6)]
    assert Counter(chosen) == {"b0": 2, "b1": 2, "b2": 2}


def test_a_rollout_stays_where_its_kv_is():
    router = LeastLoaded()
    home = router.choose(candidates(0, 5), REQUEST, "r").backend_id
    assert router.choose(candidates(50, 0), REQUEST, "r").backend_id == home


def test_a_rollout_moves_when_its_backend_has_left_and_stays_there():
    router = LeastLoaded()
    assert router.choose(candidates(0, 5), REQUEST, "r").backend_id == "b0"
    assert router.choose(candidates(0, 5)[1:], REQUEST, "r").backend_id == "b1"
    assert router.choose(candidates(0, 5), REQUEST, "r").backend_id == "b1"


def test_rollouts_that_wait_for_a_tool_count_as_load():
    router = LeastLoaded()
    chosen = [router.choose(candidates(0, 0), REQUEST, f"r{i}").backend_id for i in range(10)]
    assert Counter(chosen) == {"b0": 5, "b1": 5}


@pytest.mark.parametrize("forgets", [False, True])
def test_rollouts_count_until_they_are_released_or_their_backend_is_forgotten(forgets):
    router = LeastLoaded()
    for i in range(10):
        router.choose(candidates(0), REQUEST, f"r{i}")
        if not forgets:
            router.release(f"r{i}")
    if forgets:
        router.forget("b0")
    assert router.choose(candidates(0, 1), REQUEST, "r3").backend_id == "b0"


def test_a_newcomer_is_not_flooded():
    router = LeastLoaded()
    loads = [32, 0]
    for _ in range(20):
        chosen = router.choose(candidates(*loads, shares=[1.0, 0.1]), REQUEST, None)
        loads[int(chosen.backend_id[1])] += 1
    assert loads[1] <= 5


def test_releasing_twice_or_the_unknown_changes_nothing():
    router = LeastLoaded()
    router.release("never seen")
    router.choose(candidates(0), REQUEST, "r")
    router.release("r")
    router.release("r")
    assert router.choose(candidates(0, 0), REQUEST, "s").backend_id in {"b0", "b1"}


@given(
    rollouts=st.lists(st.integers(0, 15), max_size=60),
    backends=st.integers(1, 4),
)
def test_loads_never_differ_by_more_than_one_rollout(rollouts, backends):
    router = LeastLoaded()
    homes = {}
    for rollout in rollouts:
        chosen = router.choose(candidates(*[0] * backends), REQUEST, f"r{rollout}").backend_id
        assert homes.setdefault(rollout, chosen) == chosen
    residents = Counter(homes.values())
    counts = [residents[f"b{i}"] for i in range(backends)]
    assert max(counts) - min(counts) <= 1


COST = Cost(backend_id="b0", held_tokens=64, wait=0.1, prefill=0.2, move=0.0, contention=0.3)
DECISION = Decision(backend_id="b0", reason=Reason.HOME, affinity="r", prompt_tokens=100, held_tokens=64, costs=(COST,))


def test_decisions_and_tokens_are_counted():
    registry = CollectorRegistry()
    trace = RoutingTrace(registry)
    trace.decided("policy", DECISION)
    trace.served("policy", DECISION, 80)
    text = generate_latest(registry).decode()
    assert 'rollout_routing_decisions_total{pool="policy",reason="home"} 1.0' in text
    for kind, count in {"sent": 100, "expected": 64, "cached": 80}.items():
        assert f'rollout_routing_prompt_tokens_total{{kind="{kind}",pool="policy"}} {count}.0' in text
    assert 'rollout_routing_prediction_error_bucket{le="0.2",pool="policy"} 1.0' in text


def test_at_debug_level_a_decision_is_explained_and_otherwise_nothing_is_written(caplog):
    trace = RoutingTrace(CollectorRegistry())
    with structlog.testing.capture_logs() as events:
        caplog.set_level("INFO", logger="rollout_service.observability.telemetry.engines")
        trace.decided("policy", DECISION)
        assert events == []
        caplog.set_level("DEBUG", logger="rollout_service.observability.telemetry.engines")
        trace.decided("policy", DECISION)
    (event,) = events
    assert (event["event"], event["rollout_id"], event["reason"]) == ("routed", "r", "home")
    (candidate,) = event["candidates"]
    assert candidate["backend_id"] == "b0"
    assert candidate["total"] == COST.total


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
