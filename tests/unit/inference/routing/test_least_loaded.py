"""The choice of a backend is sticky, fair, and gentle with newcomers."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollout_service.engines.contract import GenerateRequest, new_request_id
from rollout_service.engines.routing import Candidate, LeastLoaded

REQUEST = GenerateRequest(new_request_id(), [1])


def candidates(*in_flight, shares=None):
    shares = shares or [1.0] * len(in_flight)
    return [
        Candidate(f"b{i}", load, share) for i, (load, share) in enumerate(zip(in_flight, shares, strict=True))
    ]


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


def test_released_rollouts_no_longer_count():
    router = LeastLoaded()
    for i in range(10):
        router.choose(candidates(0), REQUEST, f"r{i}")
        router.release(f"r{i}")
    assert router.choose(candidates(0, 1), REQUEST, "new").backend_id == "b0"


def test_a_forgotten_backend_has_no_rollouts():
    router = LeastLoaded()
    for i in range(10):
        router.choose(candidates(0), REQUEST, f"r{i}")
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
