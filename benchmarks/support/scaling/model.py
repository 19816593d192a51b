"""A discrete-event model of nodes that share a Redis, for sizes of a cluster that one machine cannot run.

It has the stations through which a rollout goes: the places of its node, the one thread of the node's process, the
cores of its host, and Redis, whose one thread runs all calls that wait, flushes their writes to its disk together, and
answers. The model decides nothing: all times are given, as `Costs`. It knows neither
what the network between hosts takes nor what one engine takes from another.

A place is taken for an agent's turns alone. The set-up and the evaluation of other rollouts go on beside it, as in the
service. CPU time of the service is spread evenly over the steps of a rollout: its set-up, its turns, its evaluation.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import simpy

Process = Generator[simpy.Event, Any, None]

STATES = 5
"""The events of a rollout: it is queued, in each of three stages, and has ended."""
BACKGROUND_SECONDS = 2.0
"""How often a modeled node does what it does without rollouts."""
PATIENCE = 100
"""The times of a rollout after which the costs of one are taken to be wrong."""
MOST_NODES = 1_000_000
PREFETCHED = 2
"""The rollouts of a node that are set up and wait for a place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What rollouts take of each station, in seconds unless a name says otherwise."""

    service: float
    """CPU time of the node's process for a rollout of its own."""
    listening: float = 0.0
    """CPU time of each node's process for a rollout of any node."""
    sandboxes: float = 0.0
    """CPU time of a rollout's processes beside the service's."""
    idle: float = 0.0
    """CPU time of a node per second, whatever it works on."""
    redis: float
    """CPU time of Redis's thread for a rollout."""
    telling: float = 0.0
    """The additional CPU time of a rollout for each node of the cluster."""
    redis_idle: float = 0.0
    """CPU time of Redis's thread per second for each node, whatever it works on."""
    flush: float = 0.0
    """Time of one flush to Redis's disk, during which its thread does nothing else."""
    redis_bytes: float = 0.0
    """Bytes between Redis and the services for a rollout."""
    telling_bytes: float = 0.0
    """The additional bytes of a rollout for each node of the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A size of a cluster, and its rollouts."""

    nodes: int
    places: int
    """The agents at once at each node."""
    turns: int
    turn_seconds: float
    """The time of a turn in the engine."""
    cores: int
    """The cores of each host."""
    nodes_on_host: int = 1

    @property
    def rollout_seconds(self) -> float:
        """The time that a rollout spends in the engine."""
        return self.turns * self.turn_seconds

    @property
    def bound(self) -> float:
        """The rollouts per second if everything but the engine took no time."""
        return self.nodes * self.places / self.rollout_seconds


@dataclass(frozen=True, slots=True)
class Prediction:
    rate: float
    """Rollouts per second."""
    process: float
    """The share of the time in which a node's process uses the CPU."""
    cores: float
    """The same of a host's cores, on average."""
    redis: float
    """The same of Redis's thread."""
    disk: float
    """The share of the time in which Redis flushes."""


def window_rates(ends: Sequence[float], completions: int) -> list[float]:
    """Return the rollouts per second in each of the successive windows of as many completions.

    If each place completes equally many rollouts in a window, it does not matter how their ends are spread over it.
    """
    ordered = sorted(ends)
    edges = ordered[::completions]
    return [completions / (after - before) for before, after in itertools.pairwise(edges)]


def predict(cluster: Cluster, costs: Costs, *, rounds: int = 1) -> Prediction:
    """Simulate until each place has had a rollout, on average, and then `rounds` more, which count.

    Raises:
        ValueError: Next to nothing completes, because the given costs are too high.
    """
    simulation = _Simulation(cluster, costs)
    each = cluster.nodes * cluster.places
    simulation.run_until(each)
    simulation.reset()
    began = simulation.env.now
    simulation.run_until(rounds * each + 1)
    seconds = simulation.env.now - began
    return Prediction(
        rate=window_rates(simulation.ends, rounds * each)[0],
        process=statistics.mean(node.busy for node in simulation.nodes) / seconds,
        cores=statistics.mean(host.busy for host in simulation.hosts) / seconds / cluster.cores,
        redis=min(1.0, simulation.redis.busy / seconds),  # calls under way at the start count as a whole
        disk=simulation.redis.flushing / seconds,
    )


def demands(cluster: Cluster, costs: Costs, *, link_bytes: float) -> dict[str, float]:
    """Return what share of each station the cluster needs for its full rate; what is above 1 cannot be had.

    The disk is left out: the writes that wait share one flush.

    Args:
        cluster: the size.
        costs: the costs.
        link_bytes: what Redis's network carries in a second.
    """
    each = cluster.places / cluster.rollout_seconds
    nodes, rate = cluster.nodes, cluster.bound
    process = costs.idle + each * (costs.service + nodes * costs.listening)
    return {
        "node_process": process,
        "node_cores": cluster.nodes_on_host * (process + each * costs.sandboxes) / cluster.cores,
        "redis_thread": nodes * costs.redis_idle + rate * (costs.redis + nodes * costs.telling),
        "redis_network": rate * (costs.redis_bytes + nodes * costs.telling_bytes) / link_bytes,
    }


def limits(cluster: Cluster, costs: Costs, *, link_bytes: float) -> dict[str, int]:
    """Return the most nodes for whose full rate each station suffices, `MOST_NODES` at most."""

    def suffices(station: str, nodes: int) -> bool:
        return demands(replace(cluster, nodes=nodes), costs, link_bytes=link_bytes)[station] <= 1

    found = {}
    for station in demands(cluster, costs, link_bytes=link_bytes):
        low, high = 0, MOST_NODES
        while low < high:  # demands grow with the nodes
            middle = (low + high + 1) // 2
            low, high = (middle, high) if suffices(station, middle) else (low, middle - 1)
        found[station] = low
    return found


class _Host:
    """The cores that the nodes of a host share."""

    def __init__(self, env: simpy.Environment, cores: int) -> None:
        self._env = env
        self._cores = simpy.Resource(env, cores)
        self.busy = 0.0

    def run(self, seconds: float) -> Process:
        with self._cores.request() as core:
            yield core
            yield self._env.timeout(seconds)
        self.busy += seconds


class _Redis:
    """One thread: it runs all calls that wait, flushes, and answers."""

    def __init__(self, env: simpy.Environment, flush: float) -> None:
        self._env, self._flush = env, flush
        self._waiting: list[tuple[float, simpy.Event]] = []
        self._called = env.event()
        self.busy = self.flushing = 0.0
        env.process(self._work())

    def call(self, seconds: float) -> simpy.Event:
        answered = self._env.event()
        self._waiting.append((seconds, answered))
        if not self._called.triggered:
            self._called.succeed()
        return answered

    def _work(self) -> Process:
        while True:
            yield self._called
            self._called = self._env.event()
            batch, self._waiting = self._waiting, []
            seconds = sum(one for one, _ in batch)
            yield self._env.timeout(seconds + self._flush)
            self.busy += seconds
            self.flushing += self._flush
            for _, answered in batch:
                answered.succeed()


class _Node:
    """A node: its thread, and its rollouts."""

    def __init__(self, simulation: _Simulation, host: _Host) -> None:
        self._simulation, self._host = simulation, host
        self._env, self._redis = simulation.env, simulation.redis
        self._cluster, self._costs = simulation.cluster, simulation.costs
        self._thread = simpy.Resource(self._env, 1)
        self._ready = simpy.Container(self._env, PREFETCHED, init=PREFETCHED)
        own = self._costs.service + self._cluster.nodes * self._costs.listening
        self._step = own / (self._cluster.turns + 2)
        self._tool = self._costs.sandboxes / (self._cluster.turns + 2)
        self.busy = 0.0

    def start(self, after: float) -> None:
        """Begin the work of all places, spread over the time of a rollout and shifted by a part of it."""
        self._env.process(self._background(after * BACKGROUND_SECONDS))
        for _ in range(PREFETCHED):
            self._env.process(self._set_up())
        for place in range(self._cluster.places):
            share = (place + after) / self._cluster.places
            self._env.process(self._agents(share * self._cluster.rollout_seconds))

    def _compute(self, seconds: float) -> Process:
        with self._thread.request() as turn:
            yield turn
            yield from self._host.run(seconds)
        self.busy += seconds

    def _change(self) -> simpy.Event:
        return self._redis.call((self._costs.redis + self._cluster.nodes * self._costs.telling) / STATES)

    def _background(self, after: float) -> Process:
        yield self._env.timeout(after)
        while True:
            yield from self._compute(self._costs.idle * BACKGROUND_SECONDS)
            yield self._redis.call(self._costs.redis_idle * BACKGROUND_SECONDS)
            yield self._env.timeout(BACKGROUND_SECONDS)

    def _set_up(self) -> Process:
        while True:
            yield self._change()  # it is queued
            yield self._change()
            yield from self._compute(self._step)
            yield from self._host.run(self._tool)
            yield self._ready.put(1)

    def _agents(self, after: float) -> Process:
        yield self._env.timeout(after)
        while True:
            yield self._ready.get(1)
            yield self._change()
            for _ in range(self._cluster.turns):
                yield from self._compute(self._step)
                yield from self._host.run(self._tool)
                yield self._env.timeout(self._cluster.turn_seconds)
            self._env.process(self._evaluate())

    def _evaluate(self) -> Process:
        yield self._change()
        yield from self._compute(self._step)
        yield from self._host.run(self._tool)
        yield self._change()
        self._simulation.ends.append(self._env.now)


class _Simulation:
    """All stations, and the ends of rollouts since the last reset."""

    def __init__(self, cluster: Cluster, costs: Costs) -> None:
        self.cluster, self.costs = cluster, costs
        self.env = simpy.Environment()
        self.ends: list[float] = []
        self.redis = _Redis(self.env, costs.flush)
        count = -(-cluster.nodes // cluster.nodes_on_host)
        self.hosts = [_Host(self.env, cluster.cores) for _ in range(count)]
        self.nodes = [_Node(self, self.hosts[n // cluster.nodes_on_host]) for n in range(cluster.nodes)]
        for number, node in enumerate(self.nodes):
            node.start(number / cluster.nodes)

    def run_until(self, ended: int) -> None:
        """Go on until so many rollouts have ended since the last reset."""
        step = self.cluster.rollout_seconds / 8
        limit = self.env.now + PATIENCE * self.cluster.rollout_seconds * (
            1 + ended / self.cluster.nodes / self.cluster.places
        )
        while len(self.ends) < ended:
            if self.env.now > limit:
                raise ValueError("rollouts take a hundred times the time of their turns; check the costs")
            self.env.run(self.env.now + step)

    def reset(self) -> None:
        self.ends.clear()
        self.redis.busy = self.redis.flushing = 0.0
        for station in (*self.hosts, *self.nodes):
            station.busy = 0.0
