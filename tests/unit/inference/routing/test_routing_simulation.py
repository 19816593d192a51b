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

import pytest

from api_schemas.trajectories import FinishReason
from rollout_service.inference.contract import BackendLoad, GenerateRequest, Generation, new_request_id
from rollout_service.inference.routing import Candidate, CostRouter, LeastLoaded
from rollout_service.testing.kv_cache import KVCache

GROUPS, GROUP_SIZE, TURNS = 8, 8, 10
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
    world: World = field(default_factory=World)
    cached: int = 0
    seconds: list = field(default_factory=list)
    reasons: Counter = field(default_factory=Counter)

    def run(self):
        rng = random.Random(self.seed)
        try:
            self.router = self.make_router(clock=self.world)
        except TypeError:
            self.router = self.make_router()
        slowness = self.slowness or [1.0] * self.engines
        self.fleet = {
            f"e{i}": Engine(self.world, KVCache(self.capacity), slow) for i, slow in enumerate(slowness)
        }
        if self.capacity:
            for name in self.fleet:
                self.router.observe(
                    name,
                    BackendLoad(
                        running=0, waiting=0, used_tokens=0, token_usage=0.0, capacity_tokens=self.capacity
                    ),
                )
        prompts = [self.tokens(rng, rng.randint(900, 1700)) for _ in range(GROUPS)]
        rollouts = [prompts[group] for group in range(GROUPS) for _ in range(GROUP_SIZE)]
        rng.shuffle(rollouts)
        for number, prompt in enumerate(rollouts):
            turns = [
                (self.tokens(rng, 8, 150), self.tokens(rng, 20, 180), rng.lognormvariate(-0.7, 1.2))
                for _ in range(TURNS)
            ]
            self.world.after(
                number * 0.05, lambda p=prompt, t=turns, n=number: self.turn(f"r{n}", list(p), t)
            )
        self.world.run()
        return self

    @staticmethod
    def tokens(rng, low, high=None):
        return [rng.randrange(50_000) for _ in range(rng.randint(low, high or low))]

    def turn(self, name, ids, turns):
        if not turns:
            self.router.release(name)
            return
        (sampled, observation, wait), *rest = turns
        request = GenerateRequest(new_request_id(), list(ids))
        among = [Candidate(each, engine.running) for each, engine in self.fleet.items()]
        decision = self.router.choose(among, request, name)
        self.reasons[decision.reason] += 1

        def answer(cached, seconds):
            self.cached += cached
            self.seconds.append(seconds)
            self.router.ended(
                decision,
                request,
                Generation(
                    output_ids=sampled,
                    logprobs=[0.0] * len(sampled),
                    versions=[0] * len(sampled),
                    finish_reason=FinishReason.STOP,
                    prompt_tokens=len(ids),
                    cached_tokens=cached,
                    backend_id=decision.backend_id,
                    engine_seconds=seconds,
                ),
            )
            more = [*ids, *sampled, *observation]
            self.world.after(wait, lambda: self.turn(name, more, rest))

        self.fleet[decision.backend_id].serve(request.input_ids, sampled, answer)

    @property
    def imbalance(self):
        loads = [engine.served_tokens for engine in self.fleet.values()]
        return max(loads) / statistics.mean(loads)


@pytest.mark.parametrize("engines", [2, 4])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_prefixes_are_kept_and_load_spreads(engines, seed):
    capacity = 60_000 * 4 // engines
    ideal = Simulation(LeastLoaded, 1, seed, capacity=None).run().cached
    ours = Simulation(CostRouter, engines, seed, capacity=capacity).run()
    assert ours.cached >= 0.97 * ideal
    assert ours.imbalance <= 1.1


def test_the_cost_router_is_no_slower_than_counting_rollouts():
    ours, counted = (
        statistics.mean([statistics.mean(Simulation(router, 4, seed).run().seconds) for seed in range(3)])
        for router in (CostRouter, LeastLoaded)
    )
    assert ours <= 1.01 * counted


def test_a_slow_engine_is_given_less():
    run = Simulation(CostRouter, 4, 1, slowness=(1.0, 1.0, 1.0, 4.0)).run()
    loads = [engine.served_tokens for engine in run.fleet.values()]
    assert loads[3] < 0.8 * statistics.mean(loads[:3])


def test_rollouts_do_not_change_backends():
    run = Simulation(CostRouter, 4, 1).run()
    assert run.reasons["moved"] <= 0.02 * run.reasons.total()
