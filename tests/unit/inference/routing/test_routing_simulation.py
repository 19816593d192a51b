"""Routers keep prefixes and spread load evenly over whole rollouts, on engines in simulated time.

The engines have bounded caches, read prompts one after another, and sample more slowly the more requests they run.
There is no network and no sleep: the same seed gives the same figures.
"""

import heapq
import itertools
import random
import statistics
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import pytest

from rollout_service.engines.contract import BackendLoad, GenerateRequest, new_request_id
from rollout_service.engines.routing.contract import Candidate, LeastLoaded
from rollout_service.engines.routing.cost_router import CostRouter
from rollout_service.testing.hardware import KVCache
from tests.support.samples import generation

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("routing_simulation")]

GROUPS, GROUP_SIZE, TURNS = 8, 8, 10
POLL = 1.0
PREFILL, DECODE, CROWDING = 1e-4, 8e-3, 2e-4


class World:
    """Simulated time, and the events to come in order."""

    def __init__(self):
        self.now = 0.0
        self._events = []
        self._numbers = itertools.count()

    def __call__(self):
        return self.now

    def after(self, seconds, event):
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def run(self):
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()


@dataclass
class Engine:
    """Serves with no limit on its batch; `slowness` multiplies its times."""

    world: World
    cache: KVCache
    slowness: float = 1.0
    running: int = 0
    served_tokens: int = 0
    read_until: float = 0.0

    def serve(self, ids, sampled, answer):
        hold = self.cache.take(ids)
        self.running += 1
        self.served_tokens += len(ids) + len(sampled)
        reading = (len(ids) - hold.cached_tokens) * PREFILL * self.slowness
        self.read_until = max(self.world.now, self.read_until) + reading
        pace = (DECODE + CROWDING * (self.running - 1)) * self.slowness
        seconds = self.read_until - self.world.now + len(sampled) * pace

        def end():
            self.cache.extend(hold, [*ids, *sampled[:-1]])
            self.cache.release(hold)
            self.running -= 1
            answer(hold.cached_tokens, seconds)

        self.world.after(seconds, end)


@dataclass
class Simulation:
    """64 rollouts of 10 turns in 8 groups."""

    make_router: type
    engines: int
    seed: int
    capacity: int | None = 60_000
    slowness: tuple = ()
    pace: float = 1.0
    """The factor on all times, of engines, tools and arrivals."""
    nodes: int = 1
    """How many nodes route for themselves; they are given the rollouts in turn, and poll the engines' loads."""
    world: World = field(default_factory=World)
    cached: int = 0
    seconds: list = field(default_factory=list)
    reasons: Counter = field(default_factory=Counter)
    in_flight: Counter = field(default_factory=Counter)

    def run(self):
        rng = random.Random(self.seed)
        try:
            self.routers = [self.make_router(clock=self.world) for _ in range(self.nodes)]
        except TypeError:
            self.routers = [self.make_router() for _ in range(self.nodes)]
        slowness = [self.pace * each for each in self.slowness or [1.0] * self.engines]
        self.fleet = {f"e{i}": Engine(self.world, KVCache(self.capacity), slow) for i, slow in enumerate(slowness)}
        if self.capacity:
            for number in range(self.nodes):
                self.world.after(number / self.nodes, lambda n=number: self.report(n))
        prompts = [self.tokens(rng, rng.randint(900, 1700)) for _ in range(GROUPS)]
        rollouts = [prompts[group] for group in range(GROUPS) for _ in range(GROUP_SIZE)]
        rng.shuffle(rollouts)
        self.open = len(rollouts)
        for number, prompt in enumerate(rollouts):
            turns = [
                (
                    self.tokens(rng, 8, 150),
                    self.tokens(rng, 20, 180),
                    self.pace * rng.lognormvariate(-0.7, 1.2),
                )
                for _ in range(TURNS)
            ]
            self.world.after(
                number * 0.05 * self.pace, lambda p=prompt, t=turns, n=number: self.turn(f"r{n}", list(p), t)
            )
        self.world.run()
        return self

    def report(self, node):
        for name, engine in self.fleet.items():
            load = BackendLoad(
                running=engine.running,
                waiting=0,
                used_tokens=0,
                capacity_tokens=self.capacity,
            )
            self.routers[node].observe(name, load)
        if self.open:
            self.world.after(POLL, lambda: self.report(node))

    @staticmethod
    def tokens(rng, low, high=None):
        return [rng.randrange(50_000) for _ in range(rng.randint(low, high or low))]

    def turn(self, name, ids, turns):
        node = int(name[1:]) % self.nodes
        router = self.routers[node]
        if not turns:
            router.release(name)
            self.open -= 1
            return
        (sampled, observation, wait), *rest = turns
        request = GenerateRequest(new_request_id(), list(ids))
        among = [Candidate(each, self.in_flight[node, each]) for each in self.fleet]
        decision = router.choose(among, request, name)
        self.reasons[decision.reason] += 1
        self.in_flight[node, decision.backend_id] += 1

        def answer(cached, seconds):
            self.cached += cached
            self.seconds.append(seconds)
            self.in_flight[node, decision.backend_id] -= 1
            router.ended(
                decision,
                request,
                generation(sampled, prompt_tokens=len(ids), cached_tokens=cached, engine_seconds=seconds),
            )
            more = [*ids, *sampled, *observation]
            self.world.after(wait, lambda: self.turn(name, more, rest))

        self.fleet[decision.backend_id].serve(request.input_ids, sampled, answer)

    @property
    def imbalance(self):
        loads = [engine.served_tokens for engine in self.fleet.values()]
        return max(loads) / statistics.mean(loads)


@cache
def simulated(make_router, engines, seed, **options):
    """Run a simulation once for all tests; it depends on nothing else."""
    return Simulation(make_router, engines, seed, **options).run()


@pytest.mark.parametrize("engines", [2, 4])
@pytest.mark.parametrize("pace", [0.1, 1.0])
def test_prefixes_are_kept_and_load_spreads(engines, pace):
    """Groups stay whole; with two groups an engine, whose lengths differ, the engines' loads differ too."""
    imbalances = []
    for seed in (1, 2, 3):
        ideal = simulated(LeastLoaded, 1, seed, capacity=None).cached
        ours = simulated(CostRouter, engines, seed, capacity=60_000 * 4 // engines, pace=pace)
        assert ours.cached >= 0.995 * ideal
        imbalances.append(ours.imbalance)
    assert statistics.median(imbalances) <= 1.1


def test_the_cost_router_is_no_slower_than_counting_rollouts():
    ours, counted = (
        statistics.mean([statistics.mean(simulated(router, 4, seed, capacity=60_000).seconds) for seed in range(3)])
        for router in (CostRouter, LeastLoaded)
    )
    assert ours <= 1.01 * counted


def test_a_slow_engine_is_given_less():
    run = simulated(CostRouter, 4, 1, slowness=(1.0, 1.0, 1.0, 4.0))
    loads = [engine.served_tokens for engine in run.fleet.values()]
    assert loads[3] < 0.8 * statistics.mean(loads[:3])


def test_rollouts_do_not_change_backends():
    run = simulated(CostRouter, 4, 1, capacity=60_000)
    assert run.reasons["moved"] <= 0.02 * run.reasons.total()


@pytest.mark.parametrize("seed", [1, 2])
def test_nodes_that_share_engines_keep_prefixes_and_spread_load_without_a_central_router(seed):
    ideal = simulated(LeastLoaded, 1, seed, capacity=None).cached
    ours = simulated(CostRouter, 4, seed, nodes=8)
    assert ours.cached >= 0.95 * ideal
    assert ours.imbalance <= 1.2
