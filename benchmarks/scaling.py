"""Measure how the rollouts per second of a cluster grow with its nodes, and model larger clusters.

Run: python benchmarks/scaling.py [--json FILE] [--quick | --smoke]

1, 2, 4 and 8 nodes run on this machine, as `rollout-service serve` with local sandboxes, a Redis that flushes every
write to the disk of the folder for temporary files, and a folder for trajectories. Engines are scripted: a turn takes a
fixed time, so the rate should grow as the nodes do, as long as the machine's cores leave room. `cpu_share_N` is what
the benchmark takes of them, engines included, `machine_cpu_share_N` what everything does that runs there. All nodes
always have work: rollouts are submitted as fast as they can end, and one for each place stays queued.

- `efficiency_N`: the rate of N nodes over N times the rate of one. Rates are medians of windows, each of so many
  completions that every place has had the same number of rollouts.
- `service_cpu_ms_per_rollout`: CPU time of the services' processes, with what they take anyway, such as heartbeats.
- `requests_growth`: the requests of a rollout with 8 nodes over those with one.
- `requests_per_rollout_N`, `redis_bytes_per_rollout_N`: what the services ask of Redis, and the bytes of that in both
  directions; `redis_commands_per_rollout` counts the commands inside functions too, with 8 nodes.
- `redis_us_per_request`: CPU time of Redis's thread for one of a rollout's requests, where many come at once, each with
  a socket of its own; `redis_ms_per_rollout` is that of all requests of a rollout, `redis_us_per_rollout_and_node` by
  how much it grows with each node, and `redis_us_per_idle_node` that of a node without rollouts in a second.
  `redis_cpu_ms_per_rollout_N` is what it took in this run: more, since hardly any request came with another.
- `idle_cpu_ms_per_second`: CPU time of a node's process without rollouts; `idle_cpu_ms_per_second_32` is that where
  32 nodes are idle, and `idle_requests_per_second_32` what each of them asks of Redis. Only the full size has them.
- `model_error`: the largest relative difference between a measured rate and that of the model in
  `support/scaling/model.py`, which gets the CPU times, the requests, the flushes and the bytes of this same
  run. Rates serve only to take what nodes use without rollouts off the costs of a rollout.
- `modeled_efficiency_N`: the same as `efficiency_N`, in the model, with a host of its own for each node.
- `limit_nodes`: the nodes at which the first station of `first_bottleneck` (in the settings) is fully used;
  `typical_` stands for hosts of 16 cores with 64 agents whose rollouts take 60 s.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import psutil
from common import Figures, Options, report, run, temporary_folder
from rich.console import Console
from rich.table import Table
from support.redis_usage import measured_redis
from support.scaling.busy_redis import calls_of, request_seconds, rollout_seconds
from support.scaling.local_cluster import LocalCluster, Usage, local_cluster
from support.scaling.model import Cluster, Costs, limits, predict, window_rates

if TYPE_CHECKING:
    from pydantic import JsonValue

NODES = (1, 2, 4, 8)
LARGER = (16, 32, 64, 128, 256, 512, 1_000)
WARM_UP_ROUNDS = 2.2
"""The first spreads the rollouts, the second fills the queue."""
LATE_SECONDS = 300.0
"""A busy machine may take so long for what should take a minute."""
SETTLE_SECONDS = 10.0
"""How long a node that has started has more to do than one that is idle."""
LINK_BYTES = 1.25e9
"""What Redis's network carries in a second: 10 Gbit/s."""
TYPICAL = Cluster(nodes=1, places=64, turns=4, turn_seconds=15.0, cores=16)
"""Few long turns, which are quicker to simulate than many short ones."""
GROWTH = 0.1
"""By what share of one node's costs they may grow over the measured nodes and count as constant."""
AIMS = {
    "efficiency_8": ">= 0.95",
    "model_error": "<= 0.05",
    "modeled_efficiency_1000": ">= 0.95",
    "redis_ms_per_rollout": "<= 1",
    "requests_growth": "<= 1.1",
    "idle_cpu_ms_per_second": "<= 5",
    "idle_requests_per_second_32": "<= 1",
}


@dataclass(frozen=True, slots=True)
class Plan:
    places: int
    turns: int
    turn_seconds: float
    windows: int
    rounds: int
    """The rollouts of each place in a window."""
    idle_seconds: float
    typical: Sequence[int]
    """The numbers of nodes for which the typical cluster is simulated."""
    idle_nodes: int = 0
    """How many nodes are left idle at the end; 0: this is not measured."""


FULL = Plan(8, 8, 2.0, windows=3, rounds=1, idle_seconds=10.0, typical=LARGER, idle_nodes=32)
QUICK = Plan(2, 4, 0.4, windows=3, rounds=1, idle_seconds=1.0, typical=LARGER[:2])
SMOKE = Plan(2, 4, 0.4, windows=1, rounds=1, idle_seconds=0.5, typical=LARGER[:1])


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured with a number of nodes, per rollout unless a name says otherwise."""

    nodes: int
    rates: Sequence[float]
    """Rollouts per second, one for each window."""
    service_cpu: float
    children_cpu: float
    redis_cpu: float
    requests: float
    """What services asked of Redis."""
    commands: float
    """Commands that ran in Redis, those inside functions included."""
    redis_bytes: float
    log_bytes: float
    idle_service_cpu: float
    """CPU seconds per second of each node without rollouts."""
    idle_requests: float
    """Requests to Redis per second of a node without rollouts."""
    cpu_share: float
    """The share of the machine's CPU time that the benchmark used, engines and load included."""
    machine_share: float
    """The share that was used by whatever ran on the machine."""

    @property
    def rate(self) -> float:
        """The median of the windows."""
        return statistics.median(self.rates)


async def measure(cluster: LocalCluster, plan: Plan) -> Point:
    """Measure the nodes that there are, without rollouts and with as many as they take."""
    completions = plan.rounds * cluster.slots
    resting = [await cluster.usage()]
    await anyio.sleep(plan.idle_seconds)
    resting.append(await cluster.usage())
    async with anyio.create_task_group() as group:
        group.start_soon(cluster.load)
        await anyio.sleep(WARM_UP_ROUNDS * cluster.rollout_seconds)
        before = await cluster.usage()
        seconds, ends, needed = (
            plan.windows * plan.rounds * 1.02 + 0.3,
            list[float](),
            completions * plan.windows,
        )
        with anyio.fail_after(LATE_SECONDS):
            while len(ends) <= needed:
                await anyio.sleep(seconds * cluster.rollout_seconds)
                after = await cluster.usage()
                ends = await cluster.ends(before.at, after.at)
                seconds = 0.5
        group.cancel_scope.cancel()
    await cluster.empty()
    rates = window_rates(ends, completions)[: plan.windows]
    return point(len(cluster.nodes), rates, len(ends), resting, (before, after))


def point(nodes: int, rates: Sequence[float], completed: int, resting: Sequence[Usage], busy: Sequence[Usage]) -> Point:
    """Return what each of the completed rollouts took."""
    (rest_before, rest_after), (before, after) = resting, busy
    rest_seconds = rest_after.at - rest_before.at
    old, new = before.redis, after.redis
    cpus = psutil.cpu_count() or 1
    return Point(
        nodes=nodes,
        rates=rates,
        service_cpu=(after.service_cpu - before.service_cpu) / completed,
        children_cpu=(after.children_cpu - before.children_cpu) / completed,
        redis_cpu=(new.cpu_seconds - old.cpu_seconds) / completed,
        requests=(new.calls - old.calls) / completed,
        commands=(new.commands - old.commands) / completed,
        redis_bytes=(new.network_bytes - old.network_bytes) / completed,
        log_bytes=(new.log_bytes - old.log_bytes) / completed,
        idle_service_cpu=(rest_after.service_cpu - rest_before.service_cpu) / rest_seconds / nodes,
        idle_requests=(rest_after.redis.calls - rest_before.redis.calls) / rest_seconds / nodes,
        cpu_share=(after.all_cpu - before.all_cpu) / (after.at - before.at) / cpus,
        machine_share=(after.machine_cpu - before.machine_cpu) / (after.at - before.at) / cpus,
    )


async def rest(cluster: LocalCluster, plan: Plan) -> tuple[float | None, float | None]:
    """Return the CPU milliseconds and the requests of each of many idle nodes in a second."""
    if not plan.idle_nodes:
        return None, None
    await cluster.grow(plan.idle_nodes)
    await anyio.sleep(SETTLE_SECONDS)
    before = await cluster.usage()
    await anyio.sleep(2 * plan.idle_seconds)
    after = await cluster.usage()
    of_all = (after.at - before.at) * plan.idle_nodes
    cpu, requests = after.service_cpu - before.service_cpu, after.redis.calls - before.redis.calls
    return cpu * 1e3 / of_all, requests / of_all


def line(points: Sequence[Point], costs: Sequence[float]) -> tuple[float, float]:
    """Return what a rollout takes, and what it takes more for each node.

    A growth of less than a tenth over all points counts as none, since it would be taken on to a thousand nodes.
    """
    nodes = [one.nodes for one in points]
    slope, first = statistics.linear_regression(nodes, costs)
    slope = slope if slope * (nodes[-1] - nodes[0]) > GROWTH * (first + slope * nodes[0]) else 0.0
    return max(0.0, statistics.mean(costs) - slope * statistics.mean(nodes)), slope


@dataclass(frozen=True, slots=True)
class RedisTimes:
    """Measured times of Redis, in seconds."""

    flush: float
    """The time of one flush."""
    request: float
    """CPU time for one request of a rollout, where many come at once."""


def model_costs(points: Sequence[Point], times: RedisTimes) -> Costs:
    """Return the costs of the model: what grows with the nodes is what each node takes for all rollouts.

    A Redis that is hardly used takes several times as long for a request as a busy one, since none shares its wake-up
    and its flush. The model asks when it is full, so the busy one's time counts.
    """
    idle = statistics.median(one.idle_service_cpu for one in points)
    idle_requests = statistics.median(one.idle_requests for one in points)

    def busy(one: Point, cost: float, at_rest: float) -> float:
        return max(0.0, cost - at_rest * one.nodes / one.rate)

    service, listening = line(points, [busy(one, one.service_cpu, idle) for one in points])
    requests, telling = line(points, [busy(one, one.requests, idle_requests) for one in points])
    redis_bytes, telling_bytes = line(points, [one.redis_bytes for one in points])
    return Costs(
        service=service,
        listening=listening,
        sandboxes=statistics.median(one.children_cpu for one in points),
        idle=idle,
        redis=requests * times.request,
        telling=telling * times.request,
        redis_idle=idle_requests * times.request,
        flush=times.flush,
        redis_bytes=redis_bytes,
        telling_bytes=telling_bytes,
    )


def table_of(title: str, cluster: Cluster, costs: Costs, sizes: Sequence[int]) -> list[dict[str, JsonValue]]:
    """Simulate a cluster in several sizes; print and return what comes of it."""
    rows: list[dict[str, JsonValue]] = []
    shown = Table("nodes", "rollouts/s", "efficiency", "process", "cores", "Redis", "disk", title=title)
    for nodes in sizes:
        sized = replace(cluster, nodes=nodes)
        found = predict(sized, costs)
        shares = (found.rate / sized.bound, found.process, found.cores, found.redis, found.disk)
        shown.add_row(f"{nodes:,}", f"{found.rate:,.2f}", *(f"{share:.3f}" for share in shares))
        names = ("efficiency", "node_process", "node_cores", "redis_thread", "redis_disk")
        rows.append({"nodes": nodes, "rate": found.rate, **dict(zip(names, shares, strict=True))})
    Console(width=100).print(shown)
    return rows


def model_errors(points: Sequence[Point], plan: Plan, costs: Costs) -> dict[int, float]:
    """Return by how much the model's rate differs from each that was measured, all nodes on this machine."""
    cores = psutil.cpu_count() or 1
    errors = {}
    for one in points:
        here = Cluster(
            nodes=one.nodes,
            places=plan.places,
            turns=plan.turns,
            turn_seconds=plan.turn_seconds,
            cores=cores,
            nodes_on_host=one.nodes,
        )
        errors[one.nodes] = predict(here, costs, rounds=plan.rounds).rate / one.rate - 1
    return errors


def measured_figures(points: Sequence[Point]) -> Figures:
    figures: Figures = {}
    first, largest = points[0], points[-1]
    for one in points:
        figures[f"rollouts_per_second_{one.nodes}"] = one.rate
        figures[f"spread_{one.nodes}"] = (max(one.rates) - min(one.rates)) / one.rate
        figures[f"cpu_share_{one.nodes}"] = one.cpu_share
        figures[f"machine_cpu_share_{one.nodes}"] = one.machine_share
        figures[f"service_cpu_ms_per_rollout_{one.nodes}"] = one.service_cpu * 1e3
        figures[f"requests_per_rollout_{one.nodes}"] = one.requests
        figures[f"redis_bytes_per_rollout_{one.nodes}"] = one.redis_bytes
        figures[f"redis_cpu_ms_per_rollout_{one.nodes}"] = one.redis_cpu * 1e3
    figures["requests_growth"] = largest.requests / first.requests
    for one in points[1:]:
        figures[f"efficiency_{one.nodes}"] = one.rate / first.rate / one.nodes
    return figures | {
        "service_cpu_ms_per_rollout": largest.service_cpu * 1e3,
        "sandbox_cpu_ms_per_rollout": largest.children_cpu * 1e3,
        "redis_commands_per_rollout": largest.commands,
        "redis_bytes_per_rollout": largest.redis_bytes,
        "redis_log_bytes_per_rollout": largest.log_bytes,
    }


async def measure_all(plan: Plan) -> tuple[list[Point], RedisTimes, Figures]:
    """Measure all numbers of nodes; return also what Redis takes, and the figures of many idle nodes."""
    with temporary_folder() as folder:
        async with (
            measured_redis() as redis,
            local_cluster(
                folder, redis, places=plan.places, turns=plan.turns, turn_seconds=plan.turn_seconds
            ) as cluster,
        ):
            flush = await redis.flush_seconds()
            points = []
            for nodes in NODES:
                await cluster.grow(nodes)
                points.append(await measure(cluster, plan))
                Console(width=100).print(f"{nodes} nodes: {points[-1].rate:.3f} rollouts per second")
            alone = await rollout_seconds(redis, folder, turns=plan.turns) / calls_of(plan.turns)
            times = RedisTimes(flush, alone + await request_seconds(redis))
            cpu, requests = await rest(cluster, plan)
            return points, times, {"idle_cpu_ms_per_second_32": cpu, "idle_requests_per_second_32": requests}


def modeled(plan: Plan, points: Sequence[Point], costs: Costs) -> tuple[Figures, dict[str, JsonValue]]:
    errors = model_errors(points, plan, costs)
    alike = Cluster(nodes=1, places=plan.places, turns=plan.turns, turn_seconds=plan.turn_seconds, cores=2)
    rows = table_of("The benchmark's rollouts, one node on a host", alike, costs, LARGER)
    typical_rows = table_of("64 rollouts of 60 s on hosts of 16 cores", TYPICAL, costs, plan.typical)
    bounds, typical_bounds = (limits(one, costs, link_bytes=LINK_BYTES) for one in (alike, TYPICAL))
    first, typical_first = (min(each, key=lambda one: each[one]) for each in (bounds, typical_bounds))
    figures: Figures = {
        "model_error": max(map(abs, errors.values())),
        "limit_nodes": bounds[first],
        "typical_limit_nodes": typical_bounds[typical_first],
    }
    figures |= {f"modeled_efficiency_{row['nodes']}": _number(row, "efficiency") for row in rows}
    return figures, {
        "model_errors": {str(nodes): error for nodes, error in errors.items()},
        "costs": dict(asdict(costs)),
        "first_bottleneck": first,
        "typical_first_bottleneck": typical_first,
        "limits": dict(bounds),
        "typical_limits": dict(typical_bounds),
        "model": list(rows),
        "typical_model": list(typical_rows),
    }


async def main(given: Options) -> None:
    """Measure, check the model against that, and let it go on."""
    plan = given.plan(FULL, QUICK, SMOKE)
    points, times, at_rest = await measure_all(plan)
    costs = model_costs(points, times)
    figures, tables = await anyio.to_thread.run_sync(modeled, plan, points, costs, abandon_on_cancel=True)
    figures = measured_figures(points) | at_rest | figures
    figures |= {
        "flush_ms": times.flush * 1e3,
        "redis_us_per_request": times.request * 1e6,
        "redis_ms_per_rollout": costs.redis * 1e3,
        "redis_us_per_rollout_and_node": costs.telling * 1e6,
        "redis_us_per_idle_node": costs.redis_idle * 1e6,
        "idle_cpu_ms_per_second": costs.idle * 1e3,
    }
    settings = {"places": plan.places, "rollout_seconds": plan.turns * plan.turn_seconds, **tables}
    report("Nodes that share a Redis", given, settings, figures, AIMS)
    stations = f"{tables['first_bottleneck']}; of the typical cluster: {tables['typical_first_bottleneck']}"
    Console(width=100).print(f"First bottleneck: {stations}")


def _number(row: Mapping[str, JsonValue], name: str) -> float:
    found = row[name]
    assert isinstance(found, float)
    return found


if __name__ == "__main__":
    run(main, "Measure how the rollouts per second of a cluster grow with its nodes, and model larger ones.")
