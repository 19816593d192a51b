"""Measure what 8 nodes keep in the caches of 4 engines, each node routing for itself, without a central router.

Run: python benchmarks/routing_nodes.py [--json FILE] [--quick | --smoke]

Each node is a pool of its own with its own router; they share nothing but the engines. Sessions are dealt to the nodes
in their order of arrival, as rollouts are claimed, so the samples of a group run on different nodes. Engines are
scripted, with a simulated prefix cache of bounded size, each in its own process. Caches are flushed between runs.
Figures are medians over runs with different seeds.

- `nodes_cached_share`: prompt tokens found in a cache, over those that one engine with an unbounded cache would have
  found for the same prompts, one after the other.
- `nodes_imbalance`: tokens (prompts and answers) of the engine with the most tokens, over the mean of all engines.
- `one_node_`: the same for one node that routes all sessions.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
from common import Figures, Options, report, run
from routing import Setting, served_tokens, simulated
from support.traffic import Session, Shape, draw, drive

from rollout_service.engines.contract import GenerateRequest, Generation
from rollout_service.engines.pool.pool import BackendPool
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions

NODES, ENGINES = 8, 4
FULL = (Shape(groups=16, time_scale=0.5), [1, 2, 3])
QUICK = (Shape(groups=8, time_scale=0.2), [1])
SMOKE = (Shape(groups=2, group_size=4, turns=3, time_scale=0.02), [1])
AIMS = {"nodes_cached_share": ">= 0.95", "nodes_imbalance": "<= 1.15"}


@asynccontextmanager
async def pools_of(nodes: int, urls: Sequence[str], time_scale: float) -> AsyncIterator[list[BackendPool]]:
    """Yield one pool per node, each with all engines; loads are polled every second of the traffic's time."""
    options = PoolOptions(load_interval=PoolOptions().load_interval * time_scale, slow_start=0.0)
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(nodes):
            pools = await stack.enter_async_context(Pools(options))
            for url in urls:
                await pools.register(url)
            found.append(pools["policy"])
        yield found


async def measure(setting: Setting, urls: Sequence[str], nodes: int, seed: int) -> tuple[float, float]:
    """Return the cached share and the imbalance of one run."""
    sessions = draw(setting.shape, seed)
    time_scale = setting.shape.time_scale
    async with httpx.AsyncClient(timeout=60) as http, pools_of(nodes, urls, time_scale) as pools:
        node_of = deal(sessions, pools)

        async def ask(session: str, request: GenerateRequest) -> Generation:
            return await node_of[session].generate(request, affinity=session)

        for url in urls:
            (await http.post(f"{url}/flush_cache")).raise_for_status()
        before = [await served_tokens(http, url) for url in urls]
        trace = await drive(sessions, ask, lambda session: node_of[session].release(session))
        after = [await served_tokens(http, url) for url in urls]
    loads = [end - start for start, end in zip(before, after, strict=True)]
    share = trace.cached_tokens / trace.ideal_cached_tokens(setting.page)
    return share, max(loads) / statistics.mean(loads)


def deal(sessions: Sequence[Session], pools: Sequence[BackendPool]) -> dict[str, BackendPool]:
    """Give each node its turn."""
    return {session.name: pools[number % len(pools)] for number, session in enumerate(sessions)}


async def main(options: Options) -> None:
    """Measure one node and many on the same engines and sessions."""
    shape, seeds = options.plan(FULL, QUICK, SMOKE)
    setting = Setting(engines=ENGINES, kv_tokens=100_000 * shape.groups // 8, page=16, shape=shape, seeds=seeds)
    outcomes: dict[str, list[tuple[float, float]]] = {"one_node": [], "nodes": []}
    async with simulated(setting) as urls:
        for seed in seeds:
            outcomes["one_node"].append(await measure(setting, urls, 1, seed))
            outcomes["nodes"].append(await measure(setting, urls, NODES, seed))
    figures: Figures = {}
    for prefix, runs in outcomes.items():
        figures[f"{prefix}_cached_share"] = statistics.median(share for share, _ in runs)
        figures[f"{prefix}_imbalance"] = statistics.median(imbalance for _, imbalance in runs)
    told = {
        "nodes": NODES,
        "engines": ENGINES,
        "sessions": shape.groups * shape.group_size,
        "runs": len(seeds),
    }
    report("Routing by many nodes", options, told, figures, AIMS)


if __name__ == "__main__":
    run(main, "Measure how well nodes that share engines route without a central router.")
