"""A simulated engine of finite concurrency, with long-tailed rollouts, on which `dapo.py` measures schedulers.

Guarantees: a seed draws the same tasks for every scheduler. A free slot goes to the rollout that has waited longest.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Key = tuple[int, int]
"""A group's number and a sample's."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The distribution of tasks. Times are in units of the median rollout's."""

    group_size: int = 8
    task_sigma: float = 0.5
    """The spread of log-times between tasks: hard tasks take longer for all samples."""
    sample_sigma: float = 0.8
    """The spread of log-times within a task."""
    tail_share: float = 0.03
    """The share of rollouts whose time is multiplied by a Pareto variate, as when an agent goes in circles."""
    tail_alpha: float = 1.5
    longest: float = 24.0
    """The limit of a rollout's time."""


@dataclass(frozen=True, slots=True)
class DrawnTask:
    """A task, with its future rewards and times."""

    number: int
    rewards: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def informative(self) -> bool:
        """Whether its rewards differ."""
        return len(set(self.rewards)) > 1


def tasks(workload: Workload, uninformative: float, seed: int) -> Iterator[DrawnTask]:
    """Yield tasks without end; of those without variance, half are always solved, and half never."""
    draw = random.Random(f"{seed}:{uninformative}")
    number = 0
    while True:
        yield DrawnTask(number, _rewards(draw, workload, uninformative), _seconds(draw, workload))
        number += 1


def _rewards(draw: random.Random, workload: Workload, uninformative: float) -> tuple[float, ...]:
    size = workload.group_size
    solved = draw.choice((0, size)) if draw.random() < uninformative else draw.randint(1, size - 1)
    rewards = [1.0] * solved + [0.0] * (size - solved)
    draw.shuffle(rewards)
    return tuple(rewards)


def _seconds(draw: random.Random, workload: Workload) -> tuple[float, ...]:
    task = draw.lognormvariate(0.0, workload.task_sigma)
    times = []
    for _ in range(workload.group_size):
        time = task * draw.lognormvariate(0.0, workload.sample_sigma)
        if draw.random() < workload.tail_share:
            time *= draw.paretovariate(workload.tail_alpha)
        times.append(min(workload.longest, time))
    return tuple(times)


class SimulatedEngine:
    """Runs as many rollouts at once as it has places; the others wait in order."""

    def __init__(self, places: int) -> None:
        self.now = 0.0
        self.busy = 0.0
        """Place-seconds in which a rollout ran, including cancelled rollouts."""
        self.places = places
        self._waiting: deque[tuple[Key, float]] = deque()
        self._running: list[tuple[float, Key]] = []

    @property
    def idle_share(self) -> float:
        """The share of all place-seconds so far in which no rollout ran."""
        unfinished = sum(end - self.now for end, _ in self._running)
        return max(0.0, 1.0 - (self.busy - unfinished) / (self.places * self.now))

    def submit(self, key: Key, seconds: float) -> None:
        self._waiting.append((key, seconds))

    def run(self, tasks: Sequence[DrawnTask]) -> None:
        """Submit all samples of tasks, in order."""
        for task in tasks:
            for sample, seconds in enumerate(task.seconds):
                self.submit((task.number, sample), seconds)

    def step(self) -> Key:
        """Move on to the next rollout's end."""
        while self._waiting and len(self._running) < self.places:
            key, seconds = self._waiting.popleft()
            heapq.heappush(self._running, (self.now + seconds, key))
            self.busy += seconds
        self.now, key = heapq.heappop(self._running)
        return key
