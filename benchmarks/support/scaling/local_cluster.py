"""Nodes of the service on this machine, which share a Redis, a folder and scripted engines, and what they use.

Guarantees: load arrives as time passes and asks nothing, so that Redis counts only what the services do. Everything
that was started ends with its block.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import psutil
from common import HERE, START_SECONDS, scripted_engine
from support.redis_usage import MeasuredRedis, RedisUsage

from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.tasks import Limits, Task
from rollout_client.client import RolloutClient
from rollout_service.cli.server_child import ServerChild, running_child

PREFIX = "scaling"
EVENTS = f"{{{PREFIX}}}:events"
"""The stream of the events of all nodes."""
ENGINES = 2
SPREAD = 0.2
"""By which share turns vary, since agents in step would save their turns together."""
_ENVIRONMENT = HERE / "environments" / "echo"
_LATE_SECONDS = 300.0
_LIVE = [state for state in RolloutState if not state.terminal]


@dataclass(frozen=True, slots=True)
class Usage:
    """What has been used since the start, by processes that still run."""

    at: float
    """Unix seconds."""
    service_cpu: float
    """CPU seconds of the services' processes alone."""
    children_cpu: float
    """CPU seconds of their children that have ended."""
    all_cpu: float
    """CPU seconds of everything that the benchmark has started, and its own."""
    machine_cpu: float
    """CPU seconds of the whole machine, whatever runs on it."""
    redis: RedisUsage


@dataclass(slots=True)
class LocalCluster:
    folder: Path
    redis: MeasuredRedis
    places: int
    turns: int
    turn_seconds: float
    engines: Sequence[str] = ()
    nodes: list[ServerChild] = field(default_factory=list)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def rollout_seconds(self) -> float:
        """The time that a rollout spends in the engine."""
        return self.turns * self.turn_seconds

    @property
    def slots(self) -> int:
        """The agents at once at all nodes."""
        return self.places * len(self.nodes)

    @property
    def client(self) -> RolloutClient:
        return self.nodes[0].client

    async def grow(self, count: int) -> None:
        """Start nodes until there are `count`, and wait until all are members."""
        while len(self.nodes) < count:
            folder = self.folder / f"node-{len(self.nodes) + 1}"
            folder.mkdir()
            config = folder / "rollout.toml"
            config.write_text(self._config())
            flags = ["--config", str(config), "--node-name", folder.name, "--environment", str(_ENVIRONMENT)]
            flags += ["--engine", "none", "--log-level", "warning"]
            flags += [flag for url in self.engines for flag in ("--backend", url)]
            node = running_child(folder, flags)
            self.nodes.append(await self._stack.enter_async_context(node))
        with anyio.fail_after(START_SECONDS):
            while len(await self.client.nodes()) < count:  # noqa: ASYNC110 - other processes cannot set an event
                await anyio.sleep(0.1)

    def _config(self) -> str:
        """Return the settings of a node: as many agents as places, and no more set up than keeps them busy."""
        return (
            f'[store]\nurl = "{self.redis.url}"\nprefix = "{PREFIX}"\nfolder = "{self.folder / "shared"}"\n'
            '[sandbox]\nprovider = "local"\n'
            f"[pipeline]\ninit_workers = 2\ninit_queue = 1\nrollout_queue = 2\nevaluate_workers = 8\n"
            f"rollout_workers = {self.places}\ndrain_seconds = 0\n"
            "[sandboxes.pressure]\nenabled = false\n"  # the load is intended, and must not throttle starts
            "[sandboxes.warm]\nsize = 0\n"
        )

    async def load(self) -> None:
        """Submit rollouts until cancelled, at all nodes in turn.

        Those of the first round come one after the other over the time of a rollout, so that the places do not start
        theirs together. The second round brings twice as many, and from then on so many stay queued.
        """
        began = anyio.current_time()
        async with anyio.create_task_group() as group:
            for number in itertools.count():
                await anyio.sleep_until(began + self.rollout_seconds * self._round(number))
                group.start_soon(self._submit, self.nodes[number % len(self.nodes)].client)

    def _round(self, number: int) -> float:
        """Return when to submit a rollout, in times of a rollout."""
        rounds = (number + 0.5) / self.slots
        return rounds if rounds < 1 else 1 + (rounds - 1) / 2 if rounds < 3 else rounds - 1

    async def _submit(self, client: RolloutClient) -> None:
        limits = Limits(max_turns=self.turns, agent_seconds=600, rollout_seconds=900)
        number = next(self._numbers)
        task = Task(environment="echo", instance={"number": number})
        await client.submit(RolloutRequest(rollout_id=f"r-{number}", task=task, limits=limits))

    async def empty(self) -> None:
        """Cancel what is queued or under way, and wait until all of it has ended."""
        with anyio.fail_after(_LATE_SECONDS):
            while True:
                live = [one.rollout_id for state in _LIVE async for one in self.client.rollouts(state=state)]
                if not live:
                    return
                for rollout_id in live:
                    await self.client.cancel(rollout_id)
                await anyio.sleep(0.2)

    async def ends(self, after: float, before: float) -> list[float]:
        """Return when rollouts were completed within a time.

        Raises:
            SystemExit: One has failed.
        """
        found = []
        for event in await self.redis.events(EVENTS):
            if event[b"k"] == b"rollout.state":
                state = RolloutState(json.loads(event[b"d"])["state"])
                if state is RolloutState.FAILED:
                    raise SystemExit(f"a rollout has failed: {event[b'd'].decode()}")
                if state is RolloutState.COMPLETED:
                    found.append(float(event[b"t"]))
        return sorted(end for end in found if after <= end < before)

    async def usage(self) -> Usage:
        """Return what the services, their children, Redis and the machine have used."""
        times = [psutil.Process(node.process.pid).cpu_times() for node in self.nodes]
        ours = psutil.Process()
        everything = [_cpu_times(one) for one in (ours, *ours.children(recursive=True))]
        machine = psutil.cpu_times()
        return Usage(
            at=time.time(),
            service_cpu=sum(each.user + each.system for each in times),
            children_cpu=sum(each.children_user + each.children_system for each in times),
            all_cpu=sum(everything),
            machine_cpu=machine.user + machine.nice + machine.system + machine.irq + machine.softirq,
            redis=await self.redis.usage(),
        )

    async def close(self) -> None:
        await self._stack.aclose()


def _cpu_times(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of its children that have ended; 0 for one that has ended itself."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


@asynccontextmanager
async def local_cluster(
    folder: Path, redis: MeasuredRedis, *, places: int, turns: int, turn_seconds: float
) -> AsyncIterator[LocalCluster]:
    """Run engines, and yield a cluster that has no node yet."""
    (folder / "shared").mkdir()
    async with AsyncExitStack() as stack:
        engines = []
        for number in range(ENGINES):
            options = ("--delay", f"{turn_seconds:g}", "--spread", f"{SPREAD:g}")
            engine = scripted_engine(folder / f"engine-{number}", *options)
            engines.append(await stack.enter_async_context(engine))
        cluster = LocalCluster(folder, redis, places, turns, turn_seconds, engines)
        stack.push_async_callback(cluster.close)
        yield cluster
