"""Count the bytecode instructions of a turn, of a rollout and of an idle second, by part, and hold them to a budget.

Run: python benchmarks/budget.py [--json FILE] [--quick | --smoke] [--budget renew]

A real service runs rollouts of the environment `echo`, one after the other, with an instant engine and local sandboxes.
A rollout of few turns and one of many differ by turns alone; the rest of the short one is the rollout's own. Unlike
times, the counts are nearly the same on every machine, however busy. They say nothing of what is done in C, by the
kernel or by other processes: `service.py` measures that.

- `turn`, `rollout`: instructions, and those of each part as `turn_routing`, `rollout_sandboxes` and so on. The part is
  that of the file of ours which runs, or which has called the library that runs;
- `idle`: instructions per second of a service without work;
- `over`: how many parts are more than a tenth over `budget.json`, which `--budget renew` writes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import anyio
import anyio.to_thread
from common import HERE, START_SECONDS, Figures, Options, report, run, temporary_folder, timed_engine

from api_schemas.rollouts import RolloutRequest
from api_schemas.tasks import Limits, Task
from rollout_client.client import RolloutClient

BUDGET = HERE / "budget.json"
FEW, MANY = 5, 45
IDLE_SECONDS = 2.0
TOLERANCE = 1.1
TRACED_START_SECONDS = 4 * START_SECONDS
SLACK = {"turn": 100, "rollout": 8_000, "idle": 5_000}  # what runs by the clock varies with the load
"""The instructions that a part may be over its budget in any case."""
PARTS: Sequence[tuple[str, str]] = (
    ("rollout_service/engines/routing/", "routing"),
    ("rollout_service/engines/pool/", "pool"),
    ("rollout_service/engines/kinds/", "engine_call"),
    ("rollout_service/engines/serving/saved_turns.py", "saving"),
    ("rollout_service/engines/serving/turn_log.py", "saving"),
    ("rollout_service/engines/", "serving"),
    ("rollout_service/tokens/", "tokens"),
    ("rollout_service/agents/", "tools"),
    ("rollout_service/pipeline/turn_writer.py", "saving"),
    ("rollout_service/store/", "saving"),
    ("rollout_service/activity.py", "steps"),
    ("rollout_service/observability/", "steps"),
    ("rollout_service/server/hangs/", "hangs"),
    ("rollout_service/server/overview/", "page"),
    ("rollout_service/server/dashboard/", "page"),
    ("rollout_service/server/events.py", "events"),
    ("rollout_service/server/", "api"),
    ("rollout_service/http/", "api"),
    ("api_schemas/", "api"),
    ("rollout_service/pipeline/", "pipeline"),
    ("rollout_service/environments/", "pipeline"),
    ("rollout_service/episodes.py", "pipeline"),
    ("sandboxes/host/processes.py", "host_processes"),
    ("sandboxes/", "sandboxes"),
)
"""The part of each file, by the first of these that its path begins with."""
OTHER = "other"
FREE = {"host_processes"}
"""Parts without a budget: how many processes are new on the host is up to the host."""

Cost = Mapping[str, float]
"""Instructions by part."""


@dataclass(frozen=True, slots=True)
class Plan:
    rounds: int
    holds_budget: bool = True


FULL, QUICK, SMOKE = Plan(11), Plan(5), Plan(1, holds_budget=False)


@dataclass(frozen=True, slots=True)
class Window:
    """The instructions that were counted in some seconds."""

    cost: Counter[str]
    seconds: float

    def without(self, idle: Cost) -> Cost:
        """Return the cost without that of an idle service in this time."""
        return {part: count - idle.get(part, 0.0) * self.seconds for part, count in self.cost.items()}


@dataclass(slots=True)
class Counted:
    """A service whose instructions are counted."""

    client: RolloutClient
    process: subprocess.Popen[str]
    rollouts: int = 0

    async def roll_out(self, turns: int) -> Window:
        self.rollouts += 1
        request = RolloutRequest(
            task=Task(environment="echo", instance={"number": self.rollouts}),
            limits=Limits(max_turns=turns, agent_seconds=600, rollout_seconds=900),
        )
        await self._order()
        began = time.perf_counter()
        rollout = await self.client.run(request)
        window = await self._window(time.perf_counter() - began)
        if rollout.usage.turns != turns:
            raise RuntimeError(f"a rollout went wrong: {rollout.model_dump_json()}")
        return window

    async def rest(self) -> Window:
        await self._order()
        await anyio.sleep(IDLE_SECONDS)
        return await self._window(IDLE_SECONDS)

    async def _order(self) -> str:
        print(file=self.process.stdin, flush=True)
        return await anyio.to_thread.run_sync(cast("IO[str]", self.process.stdout).readline)

    async def _window(self, seconds: float) -> Window:
        cost: Counter[str] = Counter()
        for file, count in json.loads(await self._order()).items():
            cost[part_of(file)] += count
        return Window(cost, seconds)


def part_of(file: str) -> str:
    return next((part for prefix, part in PARTS if file.startswith(prefix)), OTHER)


async def main(given: Options) -> None:
    """Count, report, and fail if a part is over its budget."""
    plan = given.plan(FULL, QUICK, SMOKE)
    async with counted_service() as service:
        await service.roll_out(FEW)  # first uses of everything
        await service.roll_out(MANY)
        costs = median([await count_once(service) for _ in range(plan.rounds)])
    if given.chosen["budget"] == "renew":
        rounded = {kind: {part: round(n) for part, n in sorted(cost.items())} for kind, cost in costs.items()}
        BUDGET.write_text(json.dumps(rounded, indent=1) + "\n")
    over = list(find_excess(costs, json.loads(BUDGET.read_text())))
    figures: Figures = {kind: sum(cost.values()) for kind, cost in costs.items()}
    for kind in ("turn", "rollout"):
        figures |= {f"{kind}_{part}": count for part, count in sorted(costs[kind].items())}
    figures["over"] = len(over)
    report("Bytecode instructions", given, {"rounds": plan.rounds}, figures, {"over": "0"})
    if over and plan.holds_budget:
        hint = "Spend less, or write a new budget with --budget renew and say in the commit what it is spent on."
        sys.exit("\n".join([*over, hint]))


@asynccontextmanager
async def counted_service() -> AsyncIterator[Counted]:
    """Start a service with a scripted engine, and yield it once it is ready."""
    with temporary_folder() as folder:
        async with timed_engine(folder, 0) as url:
            process = start_counted(folder, url)
            try:
                async with RolloutClient(await address_of(process, folder)) as client:
                    await ready(client)
                    yield Counted(client, process)
            finally:
                process.terminate()
                await anyio.to_thread.run_sync(process.communicate)


def start_counted(folder: Path, engine_url: str) -> subprocess.Popen[str]:
    settings = {
        "ROLLOUT_BACKENDS": json.dumps([engine_url]),
        "ROLLOUT_ENVIRONMENTS": json.dumps([str(HERE / "environments" / "echo")]),
    }
    command = [sys.executable, str(HERE / "programs" / "counted_service.py"), str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **settings})


async def address_of(process: subprocess.Popen[str], folder: Path) -> str:
    """Return the service's URL once it listens."""
    address = anyio.Path(folder / "address")
    with anyio.fail_after(TRACED_START_SECONDS):
        while not await address.exists():
            if process.poll() is not None:
                raise RuntimeError("the service did not start")
            await anyio.sleep(0.05)
    return await address.read_text()


async def ready(client: RolloutClient) -> None:
    with anyio.fail_after(TRACED_START_SECONDS):
        while True:
            if (await client.readiness()).ready:
                return
            await anyio.sleep(0.05)


async def count_once(service: Counted) -> Mapping[str, Cost]:
    """Count once what a turn, a rollout and an idle second cost."""
    rest, few, many = await service.rest(), await service.roll_out(FEW), await service.roll_out(MANY)
    idle = {part: count / rest.seconds for part, count in rest.cost.items()}
    short, long = few.without(idle), many.without(idle)
    turn = {part: (long.get(part, 0.0) - short.get(part, 0.0)) / (MANY - FEW) for part in long}
    rollout = {part: count - turn.get(part, 0.0) * FEW for part, count in short.items()}
    return {"turn": turn, "rollout": rollout, "idle": idle}


def median(rounds: Sequence[Mapping[str, Cost]]) -> Mapping[str, Cost]:
    parts = {kind: {part for one in rounds for part in one[kind]} for kind in rounds[0]}
    return {
        kind: {part: statistics.median(one[kind].get(part, 0.0) for one in rounds) for part in sorted(names)}
        for kind, names in parts.items()
    }


def find_excess(costs: Mapping[str, Cost], budget: Mapping[str, Cost]) -> Sequence[str]:
    """Return a sentence on each part that is over its budget."""
    return [
        f"{kind}: {part} takes {count:,.0f} instructions, and may take {limit:,.0f}"
        for kind, cost in costs.items()
        for part, count in cost.items()
        if part not in FREE and count > (limit := budget[kind].get(part, 0.0) * TOLERANCE + SLACK[kind])
    ]


if __name__ == "__main__":
    run(main, "Count the service's instructions.", {"budget": ["hold", "renew"]})
