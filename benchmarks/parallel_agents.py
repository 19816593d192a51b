"""Measure sub-agents: whether they run at the same time, share slots fairly, and what each of them costs the service.

Run: python benchmarks/parallel_agents.py [--json FILE] [--quick | --smoke]

Engines are scripted and run in a process of their own: the agent's takes no time and assigns all its tasks in one turn,
and every task takes its sub-agent one turn of a fixed time. No rollout has a sandbox.

- `width8_ratio`: the time of agents that assign 8 tasks over that of agents that assign one, medians of one rollout at
  a time.
- `fairness_max_min`: many agents assign 8 tasks each while all slots are held by another one, which then ends. The
  longest wait of an agent from then on over the shortest. `slots_busy_share` is the least time that the engine needs
  for all of them over the time until the last one has ended.
- `cpu_ms_per_branch`: the CPU time of the service's process for each task beyond the first of a rollout, next to the
  time of its engine, `engine_ms_per_branch`. Rollouts with many and with one task are compared.
- `memory_kb_per_branch`: the growth of the service's resident memory while all those tasks waited for a slot, over
  their number, with what their agents take.
- `branches_100_ok`: 1 if all 100 tasks of one turn have a valid result, else 0.
"""

from __future__ import annotations

import os
import statistics
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import psutil
from common import HERE, Options, Server, report, run, temporary_folder, told_address

from api_schemas.inference import BackendSpec
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Stage
from api_schemas.tasks import Task
from rollout_service.cli.server_child import running_child

POOL = "frozen-1"
WIDTH = 8
MOST = 100
LATE_SECONDS = 600.0
AIMS = {"width8_ratio": "<= 1.2", "fairness_max_min": "< 3", "branches_100_ok": "1"}


@dataclass(frozen=True, slots=True)
class Plan:
    latency: float
    """Seconds of a task."""
    repeats: int
    """Rollouts whose times are compared, and measurements of the CPU time."""
    costed: int
    """Rollouts whose CPU time is compared."""
    cost_width: int
    agents: int
    """Agents that share the slots."""
    slots: int
    share_latency: float
    """Seconds of a task while slots are shared."""
    hold: float
    """Seconds for which slots are held until all agents wait."""


FULL = Plan(1.0, repeats=5, costed=32, cost_width=16, agents=512, slots=32, share_latency=0.25, hold=45.0)
QUICK = Plan(0.5, repeats=2, costed=8, cost_width=16, agents=48, slots=8, share_latency=0.1, hold=6.0)
SMOKE = Plan(0.5, repeats=1, costed=2, cost_width=16, agents=12, slots=8, share_latency=0.1, hold=3.0)


@asynccontextmanager
async def bench(folder: Path, *, latency: float, hold: float, slots: int, workers: int) -> AsyncIterator[Server]:
    await anyio.Path(folder).mkdir()
    address, config = folder / "engines", folder / "rollout.toml"
    config.write_text(
        f'[sandbox]\nprovider = "local"\n[pipeline]\ninit_workers = 64\ninit_queue = 512\n'
        f"rollout_queue = 64\nrollout_workers = {workers}\nevaluate_workers = 64\nsubagent_slots = {slots}\n"
        "[sandboxes.pressure]\nenabled = false\n"
    )
    plug_in, path = str(HERE / "environments" / "delegation"), os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{plug_in}{os.pathsep}{path}"  # the service is a child of this process
    script = [str(HERE / "programs" / "delegation_engines.py")]
    script += ["--latency", str(latency), "--hold", str(hold)]
    flags = ["--config", str(config), "--engine", "none", "--log-level", "warning"]
    async with told_address(script, address) as urls:
        policy, frozen = urls.split()
        async with running_child(folder, [*flags, "--backend", policy]) as server:
            await server.client.add_backend(BackendSpec.model_validate({"url": frozen, "pool": POOL}))
            yield Server(server.client, psutil.Process(server.process.pid))


async def roll_out(server: Server, count: int, tasks: int, kind: str = "plain") -> list[Rollout]:
    """Run rollouts at once that assign so many tasks each, and return them once all have ended."""
    ids = await submit(server, count, tasks, kind)
    return await ended(server, ids, tasks)


async def submit(server: Server, count: int, tasks: int, kind: str = "plain") -> list[str]:
    task = Task(environment="delegation", instance={"tasks": tasks, "kind": kind})
    ids = [f"r-{uuid.uuid4().hex[:12]}" for _ in range(count)]
    limit = anyio.CapacityLimiter(32)

    async def one(rollout_id: str) -> None:
        async with limit:
            await server.client.submit(RolloutRequest(rollout_id=rollout_id, task=task))

    async with anyio.create_task_group() as group:
        for rollout_id in ids:
            group.start_soon(one, rollout_id)
    return ids


async def ended(server: Server, ids: Sequence[str], tasks: int) -> list[Rollout]:
    """Wait for rollouts, and return them; refuse those that did not go as planned."""
    rollouts = []
    with anyio.fail_after(LATE_SECONDS):
        for rollout_id in ids:
            rollout = await server.client.wait(rollout_id)
            if rollout.state is not RolloutState.COMPLETED or rollout.reward_parts.get("valid") != tasks:
                shown = rollout.model_copy(update={"trajectory": None})
                raise SystemExit(f"a rollout with {tasks} tasks went wrong: {shown.model_dump_json(indent=2)}")
            rollouts.append(rollout)
    return rollouts


def agent_seconds(rollout: Rollout) -> float:
    return sum(span.seconds for span in rollout.spans if span.stage is Stage.ROLLOUT)


async def width_ratio(server: Server, repeats: int) -> dict[str, float]:
    """Compare the times of agents that assign many tasks and one."""
    times: dict[int, list[float]] = {1: [], WIDTH: []}
    await roll_out(server, 1, WIDTH)  # opens connections
    for _ in range(repeats):
        for tasks, seconds in times.items():
            (rollout,) = await roll_out(server, 1, tasks)
            seconds.append(agent_seconds(rollout))
    one, many = (statistics.median(seconds) for seconds in times.values())
    return {"width8_ratio": many / one, "width1_seconds": one, "width8_seconds": many}


async def branch_cost(server: Server, plan: Plan) -> dict[str, float]:
    """Measure the CPU time of a task, as the difference of rollouts with many and with one."""
    costs = []
    for _ in range(plan.repeats):
        used = []
        for tasks in (1, plan.cost_width):
            before = server.cpu_seconds
            await roll_out(server, plan.costed, tasks)
            used.append(server.cpu_seconds - before)
        costs.append((used[1] - used[0]) / (plan.costed * (plan.cost_width - 1)) * 1e3)
    return {"cpu_ms_per_branch": statistics.median(costs), "engine_ms_per_branch": plan.latency * 1e3}


async def most_branches(server: Server) -> dict[str, float]:
    """Run one rollout with the most tasks."""
    (rollout,) = await roll_out(server, 1, MOST)
    return {"branches_100_ok": float(rollout.reward == 1.0), "branches_100_seconds": agent_seconds(rollout)}


async def shared_slots(server: Server, plan: Plan) -> dict[str, float]:
    """Let agents share slots that were all held when they came."""
    idle = server.memory_mb
    holders = await submit(server, 1, plan.slots, "hold")
    await _in_flight(server, plan.slots)
    ids = await submit(server, plan.agents, WIDTH)
    memory = idle
    while await _is_held(server, holders):
        memory = max(memory, server.memory_mb)
        await anyio.sleep(0.5)
    (holder,) = await ended(server, holders, plan.slots)
    free_at = agent_end(holder)
    rollouts = await ended(server, ids, WIDTH)
    waits = [rollout.reward_parts["queued"] - waited_before(rollout, free_at) for rollout in rollouts]
    if min(waits) <= 0:
        raise SystemExit("the slots were free before all agents waited for one: hold them for longer")
    seconds = max(map(agent_end, rollouts)) - free_at
    branches = plan.agents * WIDTH
    return {
        "fairness_max_min": max(waits) / min(waits),
        "wait_seconds_min": min(waits),
        "wait_seconds_max": max(waits),
        "slots_busy_share": branches * plan.share_latency / plan.slots / seconds,
        "branches_per_second": branches / seconds,
        "memory_kb_per_branch": (memory - idle) * 1e3 / branches,
    }


def agent_begin(rollout: Rollout) -> float:
    """Return when the agent of a rollout began, in Unix seconds."""
    return next(span.started_at.timestamp() for span in rollout.spans if span.stage is Stage.ROLLOUT)


def agent_end(rollout: Rollout) -> float:
    """Return when the agent of a rollout ended, in Unix seconds."""
    return agent_begin(rollout) + agent_seconds(rollout)


def waited_before(rollout: Rollout, moment: float) -> float:
    """Return how long an agent waited before a moment, if it did nothing else until then."""
    return max(0.0, moment - agent_begin(rollout))


async def _in_flight(server: Server, wanted: int) -> None:
    """Wait until sub-agents have so many requests at their engine."""
    with anyio.fail_after(LATE_SECONDS):
        while True:
            backends = await server.client.backends()
            if sum(one.in_flight for one in backends if one.pool == POOL) >= wanted:
                return
            await anyio.sleep(0.05)


async def _is_held(server: Server, holders: Sequence[str]) -> bool:
    return not (await server.client.get(holders[0])).state.terminal


async def main(given: Options) -> None:
    plan = given.plan(FULL, QUICK, SMOKE)
    with temporary_folder() as folder:
        wide = bench(
            folder / "wide",
            latency=plan.latency,
            hold=0.0,
            slots=plan.costed * plan.cost_width,
            workers=64,
        )
        async with wide as server:
            figures = await width_ratio(server, plan.repeats)
            figures |= await branch_cost(server, plan)
            figures |= await most_branches(server)
        shared = bench(
            folder / "shared",
            latency=plan.share_latency,
            hold=plan.hold,
            slots=plan.slots,
            workers=plan.agents + 1,
        )
        async with shared as server:
            figures |= await shared_slots(server, plan)
    settings = {"agents": plan.agents, "slots": plan.slots, "width": WIDTH, "hold_seconds": plan.hold}
    report("Sub-agents", given, settings, figures, AIMS)


if __name__ == "__main__":
    run(main, "Measure whether sub-agents run at the same time, share slots fairly, and what each costs.")
