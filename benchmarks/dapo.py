"""Measure how soon a trainer gets its batches of informative groups, against synchronous rounds and an oracle.

Run: python benchmarks/dapo.py [--json FILE] [--quick | --smoke]

A discrete-event simulation of an engine, with rollouts of long-tailed times, drives the functions of
`rollout_service.groups` that make the decisions of the service's run manager. A trainer takes consecutive batches of 32
groups of 8. Training takes no time, so all time is time to informative groups. The rewards of 30 to 70 % of the groups
do not vary. Every scheduler gets the same tasks in the same order. Figures are medians over seeds and these levels;
`_at_N` is only for the level of N % uninformative groups.

- `speedup_vs_sync`: compared with rounds as in verl's dynamic sampling: generate a round, wait for all of it, filter,
  repeat until there are enough groups, discard the rest. The size of a round (1, 2 or 3 batches) is the best one for
  that seed and level.
- `ratio_to_oracle`: compared with an oracle that knows every outcome and time beforehand. It begins only informative
  groups, the longest first, and drops nothing. It takes the faster of two schedules. The first always has exactly as
  many groups ready or under way as the batches ahead need. The second begins, right after each batch, as many groups as
  the service found among all that it began until the next batch. So starting too few groups shows, and so does starting
  too many.
- `engine_idle_share`: the share of the engine's places in which nothing ran.
- `begun_vs_needed`: the groups begun, over the number of first tasks that hold as many informative groups as the
  batches and the prefetch need.
- `stale_share`: the share of the groups begun that were dropped because they were too old.
- `tight_`: the same on an engine that cannot hold everything that is begun. The oracle's lead there grows to
  1 / (1 - uninformative): a scheduler that must roll out a group to see its rewards cannot avoid that work.
  `tight_ratio_to_greedy` compares with a scheduler that knows as little, but keeps every place busy, regardless of need
  and age.
- `on_demand_`: nothing is begun for a batch before the trainer waits for it, apart from groups that are carried over.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import anyio
from common import Figures, Options, report, run
from support.simulated_engine import DrawnTask, SimulatedEngine, Workload, tasks

from rollout_service.groups.acceptance import (
    AcceptanceRate,
    AdmissionState,
    GroupProgress,
    groups_to_start,
    oldest_allowed_version,
)
from rollout_service.groups.filters import FilterChain, GroupOutcome, SampleOutcome, ZeroVariance
from rollout_service.store.rules import is_stale

BATCH = 32
ETA = 8
ENGINES = {"": (1_024, 1), "tight_": (256, 1), "on_demand_": (1_024, 0)}
"""The engine's places, and the batches made ahead, by the prefix of the figures."""
LEVELS = (0.3, 0.4, 0.5, 0.6, 0.7)
HEADLINES = ("speedup_vs_sync", "ratio_to_oracle", "engine_idle_share")
AIMS = {"speedup_vs_sync": ">= 2", "ratio_to_oracle": "<= 1.10"}


@dataclass(frozen=True, slots=True)
class Setting:
    places: int
    batches: int
    uninformative: float
    seed: int
    ahead: int = 1
    """The number of batches made ahead of the one that the trainer waits for."""
    workload: Workload = field(default_factory=Workload)

    def tasks(self) -> Iterator[DrawnTask]:
        """Return the tasks, which are the same for all schedulers."""
        return tasks(self.workload, self.uninformative, self.seed)

    def needed(self) -> int:
        """Return how many of the first tasks hold as many informative ones as the batches and the prefetch need."""
        wanted = (self.batches + self.ahead) * BATCH
        positions = (place for place, task in enumerate(self.tasks(), start=1) if task.informative)
        return next(islice(positions, wanted - 1, None))


@dataclass(frozen=True, slots=True)
class Result:
    seconds: float
    idle_share: float
    begun: Sequence[DrawnTask] = ()
    informative_by_batch: Sequence[int] = ()
    """The number of informative groups begun, by the number of batches delivered by then."""
    stale: int = 0


class Groups:
    """Counts the samples left in each group, for schedulers that need nothing else."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.samples = 0
        self._left: dict[int, int] = {}
        self._tasks: dict[int, DrawnTask] = {}

    def begin(self, chosen: Sequence[DrawnTask]) -> None:
        self.engine.run(chosen)
        for task in chosen:
            self._tasks[task.number], self._left[task.number] = task, len(task.seconds)
            self.samples += len(task.seconds)

    def step(self) -> bool:
        """Move on to the next rollout's end; return whether an informative group ended with it."""
        number, _ = self.engine.step()
        self.samples -= 1
        self._left[number] -= 1
        return self._left[number] == 0 and self._tasks[number].informative


@dataclass(slots=True)
class OpenGroup:
    """A group of the service that is under way."""

    task: DrawnTask
    version: int
    """The trainer's version when the group began."""
    samples: list[SampleOutcome] = field(default_factory=list)
    path: list[GroupProgress] = field(default_factory=lambda: [GroupProgress()])


class Service:
    """A run that uses the service's own code to decide, and keeps in memory what the service keeps in its store."""

    def __init__(self, setting: Setting) -> None:
        self.engine = SimulatedEngine(setting.places)
        self.begun: list[DrawnTask] = []
        self.found = [0] * setting.batches
        self.stale = 0
        self._setting = setting
        self._stream = setting.tasks()
        self._chain = FilterChain([ZeroVariance()])
        self._acceptance = AcceptanceRate()
        self._open: dict[int, OpenGroup] = {}
        self._ready: list[OpenGroup] = []
        self.delivered = 0

    def begin(self) -> None:
        """Begin as many groups as the service would."""
        run = AdmissionState(
            batch_size=BATCH,
            max_concurrent=(ETA + 1) * BATCH,
            max_staleness=ETA,
            prefetch_batches=self._setting.ahead,
            version=self.delivered,
            running=len(self._open),
            ready=len(self._ready),
            acknowledged=self.delivered * BATCH,
        )
        under_way = Counter(group.path[-1] for group in self._open.values())
        for task in islice(self._stream, groups_to_start(run, under_way, self._acceptance)):
            self._open[task.number] = OpenGroup(task, self.delivered)
            self.engine.run([task])
            self.begun.append(task)
            self.found[self.delivered] += task.informative

    def step(self) -> None:
        number, sample = self.engine.step()
        group = self._open[number]
        group.samples.append(SampleOutcome(sample, group.task.rewards[sample]))
        if len(group.samples) < len(group.task.rewards):
            varied = len({outcome.reward for outcome in group.samples}) > 1
            group.path.append(GroupProgress(len(group.samples), varied))
            return
        del self._open[number]
        keep = self._chain.judge(GroupOutcome(number, tuple(group.samples))).keep
        self._acceptance.learn(kept=keep, path=group.path[1:])
        if keep:
            self._ready.append(group)

    def deliver(self) -> None:
        """Deliver a batch if there is one; the trainer's version increases immediately."""
        if len(self._ready) < BATCH:
            return
        oldest = oldest_allowed_version(version=self.delivered, max_staleness=ETA)
        fresh = [group for group in self._ready if not is_stale(group.version, oldest)]
        self.stale += len(self._ready) - len(fresh)
        self._ready = fresh
        if len(self._ready) >= BATCH:
            del self._ready[:BATCH]
            self.delivered += 1


def by_service(setting: Setting) -> Result:
    """Schedule with the service's own code."""
    service = Service(setting)
    while service.delivered < setting.batches:
        service.begin()
        service.step()
        service.deliver()
    engine = service.engine
    return Result(engine.now, engine.idle_share, service.begun, service.found, service.stale)


def by_oracle(setting: Setting, found: Sequence[int]) -> Result:
    """Schedule with full knowledge; return the faster of the two schedules."""
    exact = [(1 + setting.ahead) * BATCH] + [BATCH] * (setting.batches - 1)
    return min((_omniscient(setting, plan) for plan in (exact, found)), key=lambda result: result.seconds)


def _omniscient(setting: Setting, plan: Sequence[int]) -> Result:
    """Begin the next number of informative groups in `plan` as soon as each batch is delivered."""
    groups = Groups(SimulatedEngine(setting.places))
    informative = (task for task in setting.tasks() if task.informative)
    ended = 0
    for delivered, count in enumerate(plan):
        chosen = list(islice(informative, count))
        groups.begin(sorted(chosen, key=lambda task: -max(task.seconds)))
        while ended < (delivered + 1) * BATCH:
            ended += groups.step()
    return Result(groups.engine.now, groups.engine.idle_share)


def by_greed(setting: Setting) -> Result:
    """Schedule without any knowledge, keeping every place busy."""
    groups, stream = Groups(SimulatedEngine(setting.places)), setting.tasks()
    ended = 0
    while ended < setting.batches * BATCH:
        while groups.samples < setting.places:
            groups.begin([next(stream)])
        ended += groups.step()
    return Result(groups.engine.now, groups.engine.idle_share)


def by_rounds(setting: Setting) -> Result:
    """Schedule synchronous rounds, of the best size for this case."""
    return min((_rounds(setting, size * BATCH) for size in (1, 2, 3)), key=lambda result: result.seconds)


def _rounds(setting: Setting, size: int) -> Result:
    groups, stream = Groups(SimulatedEngine(setting.places)), setting.tasks()
    for _ in range(setting.batches):
        found = 0
        while found < BATCH:
            groups.begin(list(islice(stream, size)))
            found += sum(groups.step() for _ in range(size * setting.workload.group_size))
    return Result(groups.engine.now, groups.engine.idle_share)


def measure(setting: Setting) -> dict[str, float]:
    service = by_service(setting)
    oracle = by_oracle(setting, service.informative_by_batch)
    return {
        "speedup_vs_sync": by_rounds(setting).seconds / service.seconds,
        "ratio_to_oracle": service.seconds / oracle.seconds,
        "engine_idle_share": service.idle_share,
        "ratio_to_greedy": service.seconds / by_greed(setting).seconds,
        "begun_vs_needed": len(service.begun) / setting.needed(),
        "stale_share": service.stale / len(service.begun),
    }


def simulate(*, batches: int, seeds: int) -> Figures:
    """Simulate all cases, and return their medians."""
    figures: Figures = {}
    for prefix, (places, ahead) in ENGINES.items():
        found = {
            level: [measure(Setting(places, batches, level, seed, ahead)) for seed in range(seeds)] for level in LEVELS
        }
        everything = [case for cases in found.values() for case in cases]
        for name in everything[0]:
            figures[prefix + name] = statistics.median(case[name] for case in everything)
        for name in HEADLINES:
            for level, cases in found.items():
                figures[f"{prefix}{name}_at_{level:.0%}".rstrip("%")] = statistics.median(case[name] for case in cases)
    for prefix in ("", "on_demand_"):
        del figures[prefix + "ratio_to_greedy"]  # a yardstick only on a full engine
    return figures


async def main(options: Options) -> None:
    """Simulate in a thread, which lets a signal end the program."""
    batches, seeds = options.plan((12, 10), (6, 2), (2, 1))
    figures = await anyio.to_thread.run_sync(lambda: simulate(batches=batches, seeds=seeds), abandon_on_cancel=True)
    settings = {"batches": batches, "batch_size": BATCH, "group_size": Workload().group_size, "eta": ETA}
    settings |= {"seeds": seeds}
    for prefix, (places, ahead) in ENGINES.items():
        settings |= {f"{prefix}engine_places": places, f"{prefix}prefetch_batches": ahead}
    report("Time to informative groups", options, settings, figures, AIMS)


if __name__ == "__main__":
    run(main, "Measure how soon a trainer gets its batches of informative groups.")
