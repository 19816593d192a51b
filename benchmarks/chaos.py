"""Break a cluster over and over, and count from the ids on the trainer's side what is lost, duplicated or left behind.

Run: python benchmarks/chaos.py [--sandbox local|apptainer] [--trajectories folder|s3] [--shards 1|2] [--json FILE]
[--quick | --smoke]

Three nodes on machines of their own (namespaces of network, host name, processes and mounts) share a Redis over TCP, a
folder, and two engines. A trainer asks them in turn: it leases and acknowledges the batches of a run, and submits
rollouts of 20 turns. Each round kills with SIGKILL a node, the Redis, an engine, or the node that leads the runs; or it
ends a machine with everything on it; or it stops a node with SIGSTOP, or cuts its network, for longer than its leases;
or it moves the shared folder away for as long, and may leave an empty one in its place. With `--trajectories s3` there
is an object store instead of the folder (`.cache/seaweedfs`), and it is stopped or killed. With `--shards 2` the store
is spread over two Redis, one of which is killed at a time.
It happens at a random moment after observed progress, and the next round begins once the cluster is well again.

- `lost`: groups and rollouts that were never delivered; `failed`: those that ended in another way than they should;
- `duplicated`: groups and rollouts in two acknowledged batches, or that came again after their acknowledgment; rollouts
  that did not end exactly once, and results that differ when they are read again from another node;
- `leftovers`: processes, mounts, networks and sandbox folders that outlive the services, and, once a node keeps nothing
  that has ended, keys of rollouts or runs in the Redis and segment files;
- `turns_kept`: of the turns that the engines had answered when their node was killed, the share that was not sampled
  again; `turns_kept_away` for nodes that were stopped or cut off. `_of` is the number of turns,
  and `_rollouts` that of the rollouts that had them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import Any

import anyio
from common import HERE, Figures, Options, folder_kept_on_error, report, run
from crash import RUN_ID, Ledger, compare
from engine import Turn, read_turns
from programs.chaos_trainer import BATCHES, RESULTS, digest
from support.cluster import ENGINES, Cluster, Fault, Plan
from support.cluster_leftovers import after_all, after_retention, on_machines, stored
from support.network import connect, enter
from support.turns_kept import turns_at_stake

from api_schemas.rollouts import RolloutState
from api_schemas.runs import FileTasks, RunRequest
from api_schemas.tasks import Limits
from rollout_client.client import RolloutClient
from rollout_service.cluster.identity import is_gone
from rollout_service.settings import StoreSettings
from rollout_service.store import Store
from rollout_service.store.redis import RedisConfig
from rollout_service.store.sharded import ShardedStore
from sandboxes.host.children import start_process

TERMINAL = {state for state in RolloutState if state.terminal}
KINDS = ("node", "machine", "redis", "engine", "leader", "pause", "partition", "folder")
TURNS, GROUP_TURNS = 20, 2
IN_FLIGHT, MAX_GROUPS = 24, 6
FIRST_GROUP_NUMBER = 1_000_000
"""The numbers in the prompts of groups begin here; those of other rollouts are smaller."""
TASKS = 1_000
PROGRESS_SECONDS, DRAIN_SECONDS = 120.0, 300.0
FULL = Plan(5 * len(KINDS), turn_seconds=2.0, away_seconds=(11.0, 16.0), longest_seconds=3.0)
QUICK = Plan(len(KINDS), turn_seconds=0.2, away_seconds=(4.5, 5.0), longest_seconds=1.0)
KILLED, AWAY = ("node", "machine", "leader"), ("pause", "partition")
AIMS = {"lost": "0", "failed": "0", "duplicated": "0", "leftovers": "0", "turns_kept": ">= 0.90"}


class Trainer:
    """The trainer's process and its ledgers."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._folder = cluster.folder

    @property
    def batches(self) -> Ledger:
        """What it has been given by the run."""
        return Ledger.read(self._folder / BATCHES)

    @property
    def of_groups(self) -> list[str]:
        """The rollouts in the batches that it saw acknowledged."""
        return [str(one) for line in self._lines(BATCHES, "acknowledged") for one in line["rollouts"]]

    @property
    def submitted(self) -> list[str]:
        """The rollouts that it submitted."""
        return [str(line["submitted"]) for line in self._lines(RESULTS, "submitted")]

    @property
    def results(self) -> list[dict[str, Any]]:
        """The results that it was given of them."""
        return self._lines(RESULTS, "result")

    async def start(self) -> None:
        """Start it; the cluster ends it."""
        script = [str(HERE / "programs" / "chaos_trainer.py"), str(self._folder), RUN_ID]
        script += [str(TURNS), str(IN_FLIGHT), *self._cluster.urls]
        with (self._folder / "trainer.log").open("ab") as log:
            self.process = await start_process(
                [sys.executable, *script],
                stdout=log,
                stderr=log,
                env={**os.environ, "ROLLOUT_KEY": self._cluster.key},
            )
        self._cluster.processes["trainer"] = self.process

    async def progress(self) -> None:
        """Wait until another batch is acknowledged and another result delivered."""
        batches, results = len(self.batches.acknowledged), len(self.results)
        with anyio.fail_after(PROGRESS_SECONDS):
            while len(self.batches.acknowledged) == batches or len(self.results) == results:
                if self.process.returncode is not None:
                    raise RuntimeError("the trainer has ended; see its log")
                await anyio.sleep(0.1)

    async def end(self) -> None:
        """End the run, and wait until everything is delivered."""
        self.process.send_signal(signal.SIGTERM)
        async with RolloutClient(self._cluster.urls[0], self._cluster.key) as client:
            await client.open_run(RUN_ID).end()
        with anyio.fail_after(DRAIN_SECONDS):
            if await self.process.wait() != 0:
                raise RuntimeError("the trainer has failed; see its log")

    def _lines(self, name: str, kind: str) -> list[dict[str, Any]]:
        """Return the whole lines of a ledger that have a field of this name."""
        path = self._folder / name
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if kind in line]


async def main(given: Options) -> None:
    seed, began = time.time_ns(), time.monotonic()
    plan = replace(given.plan(FULL, QUICK, QUICK), **given.chosen)
    await connect()
    with folder_kept_on_error("chaos-") as folder:
        cluster = Cluster(folder, plan)
        async with AsyncExitStack() as stack:
            await cluster.start(stack)
            trainer = await start_work(cluster)
            faults = await break_it(cluster, trainer, plan.rounds, random.Random(seed))
            await trainer.end()
            figures = await delivered(cluster, trainer)
            await cluster.stop_nodes()
            figures |= {"stored_before_retention": len(await stored(cluster))}
            left = await on_machines(cluster) + await after_retention(cluster)
        left += await after_all(cluster)
        figures |= {"leftovers": len(left)} | kept(cluster, faults)
        well = [fault.well_seconds for fault in faults]
        figures |= {"well_seconds_median": statistics.median(well), "well_seconds_max": max(well)}
        figures |= {"seconds": time.monotonic() - began}
        settings = {"seed": seed, "turn_seconds": plan.turn_seconds} | given.chosen
        report("A cluster under faults", given, settings, {"rounds": plan.rounds} | figures, AIMS)
        for one in left:
            sys.stderr.write(f"left: {one}\n")
        if any(figures[name] for name, aim in AIMS.items() if aim == "0"):
            raise RuntimeError("something was lost, duplicated or left")


async def start_work(cluster: Cluster) -> Trainer:
    path = cluster.folder / "tasks.jsonl"
    numbers = range(FIRST_GROUP_NUMBER, FIRST_GROUP_NUMBER + TASKS)
    path.write_text("\n".join(json.dumps({"number": number}) for number in numbers))
    source = FileTasks(path=str(path), environment="echo", epochs=None, shuffle=True)
    order = RunRequest(
        run_id=RUN_ID,
        source=source,
        group_size=2,
        batch_size=2,
        limits=Limits(max_turns=GROUP_TURNS),
        filters=[],
        max_concurrent=MAX_GROUPS,
        infrastructure_retries=100,
    )
    async with RolloutClient(cluster.urls[0], cluster.key) as client:
        await client.create_run(order)
    trainer = Trainer(cluster)
    await trainer.start()
    return trainer


async def break_it(cluster: Cluster, trainer: Trainer, rounds: int, draw: random.Random) -> list[Fault]:
    """Let one fault after the other happen, every kind as often."""
    faults = []
    kinds = [kind for _ in range(-(-rounds // len(KINDS))) for kind in draw.sample(KINDS, len(KINDS))]
    for kind in kinds[:rounds]:
        await trainer.progress()
        await anyio.sleep(draw.uniform(0, cluster.plan.longest_seconds))
        faults.append(await cluster.fault(kind, draw))
        sys.stderr.write(f"{len(faults)} {faults[-1]}\n")
    await trainer.progress()
    return faults


async def delivered(cluster: Cluster, trainer: Trainer) -> Figures:
    """Compare what the trainer was given with what it asked for, and with what the store knows."""
    results, of_groups = trainer.results, trainer.of_groups
    given = Counter(str(result["result"]) for result in results) + Counter(of_groups)
    async with opened(cluster) as store:
        batches = await compare(trainer.batches, store)
        ends = await ended(store)
    wrong = [one for one in results if (one["state"], one["turns"]) != ("completed", TURNS)]
    duplicated = {
        "in_batches": int(batches["duplicated"] or 0),
        "given_twice": sum((given - Counter(set(given))).values()),
        "not_ended_once": sum(ends[one] != 1 for one in given),
        "read_differently": await read_differently(cluster, results),
    }
    sys.stderr.write(f"duplicated: {duplicated}\n")
    return {
        "lost": int(batches["lost"] or 0) + len(set(trainer.submitted) - set(given)),
        "failed": len(wrong) + int(batches["failed"] or 0),
        "duplicated": sum(duplicated.values()),
        "rollouts": len(results),
        "rollouts_of_groups": len(set(of_groups)),
        "groups_acknowledged": batches["groups_acknowledged"],
        "batches_delivered_again": batches["batches_delivered_again"],
        "attempts_of_rollouts": sum(int(str(one["attempt"])) for one in results),
    }


def opened(cluster: Cluster) -> AbstractAsyncContextManager[Store]:
    """Open the store of a cluster."""
    configs = RedisConfig.of(StoreSettings(url=cluster.redis_urls))
    return ShardedStore.opened(configs, is_gone=is_gone)


async def ended(store: Store) -> Counter[str]:
    found: Counter[str] = Counter()
    for shard in store.shards:
        after = 0
        while events := await shard.events(after=after):
            after = events[-1].event_id
            found.update(one.subject for one in events if one.data.get("state") in TERMINAL)
    return found


async def read_differently(cluster: Cluster, results: Sequence[dict[str, Any]]) -> int:
    """Return how many results are others when they are read from another node than before."""
    different = 0
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RolloutClient(url, cluster.key)) for url in cluster.urls]
        for number, result in enumerate(results):
            client = clients[number % len(clients)]
            rollout = await client.get(str(result["result"]), trajectory=True)
            different += digest(rollout) != result["digest"]
    return different


def kept(cluster: Cluster, faults: Sequence[Fault]) -> Figures:
    """Return which share of the answered turns was not sampled again after a node was gone."""
    turns: dict[int, list[Turn]] = defaultdict(list)
    for engine in ENGINES:
        for number, ours in read_turns(cluster.record(engine)).items():
            if number < FIRST_GROUP_NUMBER:
                turns[number] += ours
    rollouts = [sorted(ours) for ours in turns.values()]
    figures: Figures = {}
    for name, kinds in (("turns_kept", KILLED), ("turns_kept_away", AWAY)):
        moments = [(fault.at, fault.address or "") for fault in faults if fault.kind in kinds]
        stake = turns_at_stake(rollouts, moments, turns=TURNS)
        figures |= {name: stake.kept, f"{name}_of": stake.answered, f"{name}_rollouts": stake.rollouts}
    return figures | {"turns": sum(map(len, rollouts))}


if __name__ == "__main__":
    enter()
    run(
        main,
        __doc__ or "",
        {"sandbox": ["local", "apptainer"], "trajectories": ["folder", "s3"], "shards": ["1", "2"]},
    )
