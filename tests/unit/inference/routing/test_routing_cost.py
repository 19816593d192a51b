"""The cost router keeps prefixes together, learns from answers, explains itself, and forgets ended rollouts."""

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.engines.contract import BackendLoad, GenerateRequest, new_request_id
from rollout_service.engines.routing.contract import Candidate, Reason
from rollout_service.engines.routing.cost_router import CostRouter
from rollout_service.engines.routing.engine_model import BLOCK_TOKENS
from tests.support.samples import generation


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def tokens(count, seed=0):
    return [(seed * 7_919 + i * 31) % 50_000 for i in range(count)]


def candidates(count=2, **changes):
    return [
        Candidate(f"b{i}", 0, changes.get("shares", {}).get(i, 1.0), i in changes.get("local", ()))
        for i in range(count)
    ]


def request(ids):
    return GenerateRequest(new_request_id(), ids)


def answer(ids, sampled=(), cached=0, seconds=0.1):
    sampled = list(sampled) or [1]
    return generation(sampled, prompt_tokens=len(ids), cached_tokens=cached, engine_seconds=seconds)


def serve(router, ids, affinity=None, among=None, *, cached=None, sampled=()):
    """Serve one turn; the engine had cached what the router expected, unless `cached` says otherwise."""
    asked = request(ids)
    decision = router.choose(among or candidates(), asked, affinity)
    held = decision.held_tokens if cached is None else cached
    router.ended(decision, asked, answer(ids, sampled, held))
    return decision


def state(capacity=None, waiting=0, running=0):
    return BackendLoad(
        running=running,
        waiting=0,
        used_tokens=0,
        waiting_tokens=waiting,
        capacity_tokens=capacity,
    )


# ---- where requests go


def test_turns_of_a_rollout_stay_where_their_prefix_is():
    router, ids = CostRouter(), tokens(1000)
    home = serve(router, ids, "r").backend_id
    for turn in range(5):
        sampled = tokens(100, seed=turn + 1)
        ids += sampled
        decision = serve(router, ids, "r", sampled=sampled)
        assert (decision.backend_id, decision.reason) == (home, Reason.HOME)
        assert decision.held_tokens >= len(ids) - 200 - BLOCK_TOKENS


def test_samples_of_a_group_share_a_long_prompt():
    router, ids = CostRouter(), tokens(20_000)
    home = serve(router, ids, "s0")
    again = serve(router, ids, "s1")
    assert home.reason is Reason.LOAD
    assert (again.backend_id, again.reason) == (home.backend_id, Reason.PREFIX)


def test_a_group_stays_together_and_the_next_one_goes_elsewhere_while_most_of_the_first_is_to_come():
    router, homes = CostRouter(), [set() for _ in range(4)]
    for samples in (range(2), range(2, 8)):
        for group, of_group in enumerate(homes):
            for i in samples:
                ids = tokens(640, seed=group)
                of_group.add(serve(router, ids, f"g{group}-s{i}", candidates(4)).backend_id)
    assert [len(of_group) for of_group in homes] == [1] * 4
    assert len(set.union(*homes)) == 4


def test_a_group_that_is_too_large_for_one_engine_is_split():
    router, ids = CostRouter(), tokens(640)
    chosen = Counter(serve(router, ids, f"s{i}", candidates(4)).backend_id for i in range(96))
    assert len(chosen) == 4
    assert max(chosen.values()) <= 48


def test_a_new_prompt_weighs_the_samples_that_a_group_is_learned_to_have():
    """Without groups, rollouts spread one by one; nothing is expected after each."""
    router = CostRouter()
    for i in range(200):
        serve(router, tokens(300, seed=i), f"r{i}")
        router.release(f"r{i}")
    serve(router, tokens(300, seed=999), "alone")
    assert sum(engine.expected for engine in router._engines.values()) < 0.2 * router._workload.weight


def test_engines_that_all_joined_of_late_are_as_good_as_old_ones():
    chosen = []
    for share in (0.1, 1.0):
        router, among = CostRouter(clock=Clock()), candidates(4, shares=dict.fromkeys(range(4), share))
        chosen.append([serve(router, tokens(640, seed=i % 3), f"r{i}", among).backend_id for i in range(24)])
    assert chosen[0] == chosen[1]


def test_nodes_that_know_nothing_of_each_other_send_a_prompt_to_the_same_engine():
    first = [serve(CostRouter(), tokens(640, seed=i), "r", candidates(4)).backend_id for i in range(20)]
    again = [serve(CostRouter(), tokens(640, seed=i), "s", candidates(4)).backend_id for i in range(20)]
    assert first == again
    assert len(set(first)) == 4


def test_a_busier_engine_is_still_chosen_if_other_nodes_have_probably_sent_the_prompt_there():
    ids = tokens(20_000)
    first = serve(CostRouter(), ids, "elsewhere", candidates(2)).backend_id
    for others, expected in ((0, {"b0", "b1"} - {first}), (20, {first})):
        router = CostRouter()
        for backend_id in ("b0", "b1"):
            for _ in range(8):
                router.observe(backend_id, state(running=others))
        router.choose([Candidate(first, 0)], request(tokens(64, seed=9)), "busy")
        assert {serve(router, ids, "r", candidates(2)).backend_id} == expected


def test_rollouts_without_anything_in_common_are_spread_also_while_they_wait_for_tools():
    router = CostRouter()
    chosen = Counter(serve(router, tokens(500, seed=i), f"r{i}", candidates(4)).backend_id for i in range(40))
    assert max(chosen.values()) - min(chosen.values()) <= 2


def test_released_rollouts_weigh_nothing():
    router, one = CostRouter(), candidates(1)
    for i in range(20):
        serve(router, tokens(300, seed=i), f"r{i}", one)
        router.release(f"r{i}")
    for i in range(3):
        serve(router, tokens(300, seed=50 + i), f"t{i}", candidates()[1:])
    assert serve(router, tokens(300, seed=99), "new").backend_id == "b0"


def test_a_rollout_moves_when_its_engine_has_much_to_read_and_stays_there():
    clock = Clock()
    router = CostRouter(clock=clock)
    ids = tokens(640)
    home = serve(router, ids, "r").backend_id
    router.observe(home, state(waiting=1_000_000))
    moved = serve(router, ids, "r")
    assert moved.reason is Reason.MOVED
    assert moved.backend_id != home
    assert serve(router, ids, "r").reason is Reason.HOME
    clock.now += 1e6  # by now it has read everything


def test_a_rollout_whose_engine_is_gone_goes_elsewhere():
    router, ids = CostRouter(), tokens(640)
    serve(router, ids, "r", candidates(1))
    assert serve(router, ids, "r", [Candidate("b1", 0), Candidate("b2", 0)]).reason is Reason.HOMELESS
    assert serve(router, ids, "q", [Candidate("b1", 0)]).reason is Reason.ONLY


def test_an_engine_on_this_node_is_preferred_at_equal_cost():
    router = CostRouter()
    chosen = [serve(router, tokens(100, seed=i), None, candidates(3, local={1})).backend_id for i in range(5)]
    assert chosen == ["b1"] * 5


def test_equals_take_turns():
    router = CostRouter()
    chosen = [serve(router, tokens(30, seed=i), None, candidates(3)).backend_id for i in range(6)]
    assert Counter(chosen) == {"b0": 2, "b1": 2, "b2": 2}


def test_a_newcomer_is_filled_gently():
    router = CostRouter()
    for i in range(32):
        serve(router, tokens(300, seed=i), f"r{i}", candidates(1))
    gentle = candidates(2, shares={1: 0.1})
    chosen = Counter(serve(router, tokens(300, seed=100 + i), f"n{i}", gentle).backend_id for i in range(20))
    assert 1 <= chosen["b1"] <= 6


def test_work_that_others_sent_to_an_engine_counts():
    router = CostRouter()
    router.observe("b0", state(running=50))
    router.observe("b1", state())
    assert serve(router, tokens(100), "r").backend_id == "b1"


def test_the_decision_explains_itself():
    router, ids = CostRouter(), tokens(640)
    serve(router, ids, "r", candidates(1))
    decision = serve(router, ids, "r")
    home, other = decision.costs
    assert (home.backend_id, other.backend_id) == ("b0", "b1")
    assert (home.held_tokens, other.held_tokens) == (639, 0)
    assert home.prefill < other.prefill
    assert home.total < other.total
    assert other.total == other.wait + other.prefill + other.move + other.contention


# ---- what it learns


def test_a_burst_on_engines_quicker_than_expected_teaches_their_pace_and_moves_nobody():
    """Engines of which each is ten times as quick as the guess; twelve requests come before the first answer."""
    clock = Clock()
    router, asked = CostRouter(clock=clock), [request(tokens(1600, seed=i)) for i in range(12)]
    decisions = []
    for i, each in enumerate(asked):
        decisions.append(router.choose(candidates(), each, f"r{i}"))
        clock.now += 0.002
    clock.now += 0.3
    for decision, each in zip(decisions, asked, strict=True):
        clock.now += 1e-3
        router.ended(decision, each, answer(each.input_ids, [1] * 60, cached=0, seconds=1600e-5 + 60 * 8e-4))
    assert router._rates.prefill == pytest.approx(1e-5, rel=0.5)
    assert router._rates.decode == pytest.approx(8e-4, rel=0.5)
    again = [router.choose(candidates(), each, f"r{i}") for i, each in enumerate(asked)]
    assert {decision.reason for decision in again} == {Reason.HOME}


def test_an_answer_shows_that_earlier_prompts_were_read():
    clock = Clock()
    router, one = CostRouter(clock=clock), candidates(1)
    serve(router, tokens(64), None, one)
    asked = [request(tokens(50_000, seed=i)) for i in range(3)]
    decisions = [router.choose(one, each, f"r{i}") for i, each in enumerate(asked)]
    router.ended(decisions[1], asked[1], answer(asked[1].input_ids))
    (cost,) = router.choose(one, request(tokens(64, seed=9)), None).costs
    assert cost.wait == pytest.approx(50_000 * router._engines["b0"].prefill_rate)


def test_a_pool_that_becomes_slower_as_a_whole_has_no_slow_engine():
    router, among = CostRouter(), candidates()
    for turn in range(200):
        asked = request(tokens(640, seed=turn))
        decision = router.choose([among[turn % 2]], asked, None)
        router.ended(decision, asked, answer(asked.input_ids, [1] * 50, seconds=0.1 * 1.03**turn))
    assert [engine.slowness for engine in router._engines.values()] == [1.0, 1.0]


def test_an_eviction_that_the_engine_shows_is_believed_with_all_that_follows():
    clock = Clock()
    router, ids = CostRouter(clock=clock), tokens(1280)
    one = candidates(1)
    serve(router, ids, "a", one)
    serve(router, [*ids, *tokens(640, seed=5)], "b", one)
    clock.now += 1
    assert serve(router, ids, "a", one, cached=320).held_tokens == 1279
    decision = serve(router, [*ids, *tokens(640, seed=5)], "b", one)
    assert decision.held_tokens == 1280


def test_prompts_sent_together_do_not_suggest_an_eviction():
    router, ids, one = CostRouter(), tokens(1280), candidates(1)
    asked = [request(ids) for _ in range(4)]
    decisions = [router.choose(one, each, f"s{i}") for i, each in enumerate(asked)]
    assert [decision.held_tokens for decision in decisions] == [0, 1279, 1279, 1279]
    for decision, each in zip(decisions, asked, strict=True):
        router.ended(decision, each, answer(ids, cached=0))
    assert serve(router, ids, "s9", one).held_tokens == 1279


def test_the_capacity_that_an_engine_states_bounds_what_it_is_believed_to_hold():
    router, one = CostRouter(), candidates(1)
    router.observe("b0", state(capacity=1280))
    serve(router, tokens(1280, seed=1), "a", one)
    serve(router, tokens(1280, seed=2), "b", one)
    assert serve(router, tokens(1280, seed=1), "c", one).held_tokens == 0


def test_a_capacity_that_is_not_stated_is_learned():
    """Two sessions of 6,400 tokens take turns on an engine that has room for one."""
    clock = Clock()
    router, one = CostRouter(clock=clock), candidates(1)
    wrong = []
    for turn in range(60):
        clock.now += 1
        decision = serve(router, tokens(6400, seed=turn % 2), f"r{turn % 2}", one, cached=0)
        wrong.append(decision.held_tokens)
    assert wrong[3] > 0
    assert sum(held > 0 for held in wrong[-20:]) <= 4


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 5),  # rollout
            st.sampled_from(["serve", "fail", "hold", "release", "forget", "lose"]),
            st.integers(1, 6),  # blocks of the prompt
            st.lists(st.booleans(), min_size=3, max_size=3).filter(any),
        ),
        max_size=60,
    )
)
def test_it_chooses_among_the_candidates_only_and_keeps_nothing_of_what_has_ended(steps):
    clock = Clock()
    router = CostRouter(clock=clock)
    open_requests = []
    for rollout, step, blocks, offered in steps:
        clock.now += 0.1
        ids = tokens(blocks * BLOCK_TOKENS, seed=rollout // 2)
        among = [Candidate(f"b{i}", 0) for i, is_offered in enumerate(offered) if is_offered]
        if step == "release":
            router.release(f"r{rollout}")
        elif step == "forget":
            router.forget(among[0].backend_id)
        else:
            asked = request(ids)
            decision = router.choose(among, asked, f"r{rollout}")
            assert decision.backend_id in {each.backend_id for each in among}
            assert 0 <= decision.held_tokens < len(ids)
            if step == "hold":
                open_requests.append((decision, asked))
            else:
                cached = 0 if step == "lose" else decision.held_tokens
                result = None if step == "fail" else answer(ids, cached=cached)
                router.ended(decision, asked, result)
    for decision, asked in open_requests:
        router.ended(decision, asked, None)
    for rollout in range(6):
        router.release(f"r{rollout}")
    assert (len(router._sent), len(router._rollouts), len(router._groups), len(router._chains)) == (
        0,
        0,
        0,
        0,
    )
    for engine in router._engines.values():
        assert engine.expected == pytest.approx(0, abs=1e-6)
        assert (engine.in_flight, engine.assigned, engine.weight) == (0, {}, 0)


# ---- what it costs


def test_a_decision_does_not_look_at_each_token_in_python():
    """Compare it with a loop over the prompt, the quickest of each, because other tests share the processor."""
    router, among = CostRouter(), candidates(8)
    for i in range(32):
        serve(router, tokens(8000, seed=i), f"r{i}", among)
    ids = tokens(8000, seed=3)
    decisions, loops = [], []
    for turn in range(50):
        asked = request([*ids, *tokens(100 * (turn + 1), seed=77)])
        started = time.perf_counter()
        decision = router.choose(among, asked, "r3")
        decided = time.perf_counter()
        assert len([hash(token) for token in asked.input_ids]) > 8000
        loops.append(time.perf_counter() - decided)
        decisions.append(decided - started)
        router.ended(decision, asked, answer(asked.input_ids, cached=decision.held_tokens))
    assert min(decisions) < min(loops)


def test_forgetting_a_backend_while_it_works_is_harmless():
    router, ids = CostRouter(), tokens(300)
    asked = request(ids)
    decision = router.choose(candidates(1), asked, "r")
    router.forget("b0")
    router.ended(decision, asked, answer(ids))
    assert serve(router, ids, "r", candidates(1)).held_tokens == 0


@pytest.mark.parametrize("ids", [[5], tokens(BLOCK_TOKENS - 1)])
def test_prompts_below_a_block_are_routed_too(ids):
    router = CostRouter()
    assert serve(router, ids, "r").held_tokens == 0
    assert serve(router, ids, "r").reason is Reason.HOME


def test_a_choice_counts_for_the_next_one_whether_it_was_settled_or_not():
    for often in (0, 1, 2):
        router, ids = CostRouter(clock=Clock()), [tokens(4_000, seed) for seed in (1, 2)]
        asked = [request(each) for each in ids]
        chosen = []
        for number, each in enumerate(asked):
            chosen.append(router.choose(candidates(), each, f"r{number}"))
            for _ in range(often):
                router.settle()
        assert {each.backend_id for each in chosen} == {"b0", "b1"}
        for decision, each in zip(chosen, asked, strict=True):
            router.ended(decision, each, answer(each.input_ids))
