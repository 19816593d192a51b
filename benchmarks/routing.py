"""Compare routers by their cache hits, how evenly they spread the load, and how long turns take.

Run: python benchmarks/routing.py [--json FILE] [--quick | --smoke] [--peer none]
It needs scripts/install-sglang and, without `--peer none`, scripts/install-routers.

The same sessions (64 of 10 turns, in 8 groups that share a task) go to the same engines through this service's pool,
and through the engine vendors' routers: smg, by the authors of sglang-router, and vllm-router. `sim_` figures are for 4
scripted engines with a simulated prefix cache of bounded size, each in its own process; `sglang_` figures are for 2
real SGLang servers on the CPU, with a tiny model and shorter turns. Caches are flushed between runs. Figures are
medians over runs with different seeds; those of a router begin with its name and its policy.

- `cached_vs_ideal`: prompt tokens found in a cache, over those that one engine with an unbounded cache would have found
  for the same prompts, one after the other.
- `imbalance`: tokens (prompts and answers) of the engine with the most tokens, over the mean of all engines.
- `p99_ms`: the 99th percentile of a turn's time, as its rollout sees it.
- `cached_vs_best`, `p99_vs_best`: this service's figure over the best of all others' in the same run, the most cached
  and the shortest p99, which need not be the same one's.
"""

from __future__ import annotations

import math
import re
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import anyio
import httpx
from common import HERE, Figures, Options, report, run, told_address
from support.routers import Router
from support.traffic import Ask, Shape, draw, drive

from rollout_service.engines.contract import GenerateRequest, Generation
from rollout_service.engines.local_servers.cpu_server import SGLangCpuServer
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.shipped import policy_folder

MODEL = policy_folder("calc-tuned")
OURS, PEERS = "service", "routers"
POLICIES = {
    "smg_cache_aware": ("smg", "cache_aware"),
    "smg_round_robin": ("smg", "round_robin"),
    "vllm_router_cache_aware": ("vllm-router", "cache_aware"),
    "vllm_router_sessions": ("vllm-router", "consistent_hash"),
}
"""The others' routers, each with its program and its policy, by the beginnings of their figures."""
IDLE_SECONDS = 30
"""How long an engine may take to become idle, so that its cache can be flushed."""
FIGURES = ("cached_vs_ideal", "imbalance", "p99_ms")
AIMS = {"cached_vs_ideal": ">= 0.97", "imbalance": "<= 1.05"}
AIMS_WITH_PEERS = {"cached_vs_best": ">= 1.0", "p99_vs_best": "<= 1.0"}


@dataclass(frozen=True, slots=True)
class Setting:
    engines: int
    kv_tokens: int
    page: int
    """The number of tokens that all engines together can cache."""
    shape: Shape
    seeds: Sequence[int]


@dataclass(frozen=True, slots=True)
class Outcome:
    cached_vs_ideal: float
    imbalance: float
    p99_ms: float


@asynccontextmanager
async def by_service(urls: Sequence[str]) -> AsyncIterator[tuple[Ask, Callable[[str], None]]]:
    """Route through this service's pool, in this process."""
    async with Pools() as pools:
        for url in urls:
            await pools.register(url)
        pool = pools["policy"]

        async def ask(session: str, request: GenerateRequest) -> Generation:
            return await pool.generate(request, affinity=session)

        yield ask, pool.release


@asynccontextmanager
async def by_router(program: str, policy: str, urls: Sequence[str]) -> AsyncIterator[tuple[Ask, Callable[[str], None]]]:
    """Route through another's router, in a process of its own."""
    connector = aiohttp.TCPConnector(limit=0)  # httpx takes seconds for as many connections
    async with aiohttp.ClientSession(connector=connector) as http, Router(program, policy, urls) as router:
        await router.until_ready(http)

        async def ask(session: str, request: GenerateRequest) -> Generation:
            return await router.generate(http, session, request)

        yield ask, lambda _: None


@asynccontextmanager
async def simulated(setting: Setting) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = []
        for number in range(setting.engines):
            command = [str(HERE / "programs" / "kv_engine.py"), "--kv-tokens", str(setting.kv_tokens)]
            command += ["--time-scale", str(setting.shape.time_scale)]
            urls.append(await stack.enter_async_context(told_address(command, folder / f"engine-{number}")))
        yield urls


@asynccontextmanager
async def servers_of(model: Path, count: int, kv_tokens: int) -> AsyncIterator[list[str]]:
    """Start real SGLang servers on the CPU at once."""
    servers = [SGLangCpuServer(model, kv_tokens=kv_tokens) for _ in range(count)]
    async with AsyncExitStack() as stack:
        async with anyio.create_task_group() as starts:
            for server in servers:
                starts.start_soon(stack.enter_async_context, server)
        yield [server.url for server in servers]


def real(setting: Setting) -> AbstractAsyncContextManager[list[str]]:
    return servers_of(MODEL, setting.engines, setting.kv_tokens)


async def measure(setting: Setting, urls: Sequence[str], policy: str, seed: int) -> Outcome:
    way = by_service(urls) if policy == OURS else by_router(*POLICIES[policy], urls)
    async with httpx.AsyncClient(timeout=60) as http, way as (ask, release):
        for url in urls:
            # A router's own checks of an engine may be under way.
            (await http.post(f"{url}/flush_cache", params={"timeout": IDLE_SECONDS})).raise_for_status()
        before = [await served_tokens(http, url) for url in urls]
        trace = await drive(draw(setting.shape, seed), ask, release)
        after = [await served_tokens(http, url) for url in urls]
    loads = [end - start for start, end in zip(before, after, strict=True)]
    ideal = await anyio.to_thread.run_sync(trace.ideal_cached_tokens, setting.page)
    times = sorted(turn.seconds for turn in trace.turns.values())
    return Outcome(
        cached_vs_ideal=trace.cached_tokens / ideal,
        imbalance=max(loads) / statistics.mean(loads),
        p99_ms=times[math.ceil(0.99 * len(times)) - 1] * 1e3,
    )


async def served_tokens(http: httpx.AsyncClient, url: str) -> float:
    """Return how many tokens of prompts and answers an engine has had so far."""
    text = (await http.get(f"{url}/metrics")).text
    lines = re.findall(r"^sglang:(?:prompt|generation)_tokens_total(?:\{.*\})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, lines))


async def compare(setting: Setting, urls: Sequence[str], *, with_peer: bool) -> Figures:
    """Measure every policy on every seed; policies alternate, so a slow minute of the machine affects them all."""
    outcomes: dict[str, list[Outcome]] = {policy: [] for policy in (OURS, *POLICIES)}
    for seed in setting.seeds:
        for policy in outcomes if with_peer else (OURS,):
            outcomes[policy].append(await measure(setting, urls, policy, seed))
    medians = {
        policy: {name: statistics.median(getattr(outcome, name) for outcome in runs) for name in FIGURES}
        for policy, runs in outcomes.items()
        if runs
    }
    return {
        ("" if policy == OURS else f"{policy}_") + name: medians[policy][name] if policy in medians else None
        for policy in outcomes
        for name in FIGURES
    } | against_best(medians)


def against_best(medians: Mapping[str, Mapping[str, float]]) -> Figures:
    """Compare this service's figures with the best of the others'; None if there are no others."""
    others = [figures for policy, figures in medians.items() if policy != OURS]
    if not others:
        return dict.fromkeys(AIMS_WITH_PEERS)
    ours = medians[OURS]
    return {
        "cached_vs_best": ours["cached_vs_ideal"] / max(other["cached_vs_ideal"] for other in others),
        "p99_vs_best": ours["p99_ms"] / min(other["p99_ms"] for other in others),
    }


REAL_SHAPE = Shape(system=96, task=(150, 350), observation=20.0, answer=12.0, longest=48, wait=0.5, arrival=0.2)


def settings(simulated_shape: Shape, real_shape: Shape, seeds: Sequence[int]) -> dict[str, Setting]:
    """Return the settings to measure, by the prefix of their figures."""
    return {
        "sim": Setting(engines=4, kv_tokens=100_000, page=16, shape=simulated_shape, seeds=seeds),
        "sglang": Setting(engines=2, kv_tokens=40_000, page=1, shape=real_shape, seeds=seeds),
    }


FULL = settings(Shape(time_scale=0.5), REAL_SHAPE, [1, 2, 3])
QUICK = settings(Shape(time_scale=0.1), replace(REAL_SHAPE, group_size=4, turns=5, time_scale=0.4), [1])
SMOKE = settings(
    Shape(groups=2, group_size=2, turns=3, time_scale=0.02),
    replace(REAL_SHAPE, groups=2, group_size=2, turns=3, time_scale=0.1),
    [1],
)


async def main(options: Options) -> None:
    chosen, peer = options.plan(FULL, QUICK, SMOKE), options.chosen["peer"]
    figures: Figures = {}
    for prefix, engines in (("sim", simulated), ("sglang", real)):
        async with engines(chosen[prefix]) as urls:
            found = await compare(chosen[prefix], urls, with_peer=peer == PEERS)
        figures |= {f"{prefix}_{name}": value for name, value in found.items()}
    told = {
        f"{prefix}_{name}": value
        for prefix, setting in chosen.items()
        for name, value in (
            ("engines", setting.engines),
            ("kv_tokens", setting.kv_tokens),
            ("sessions", setting.shape.groups * setting.shape.group_size),
            ("turns", setting.shape.turns),
            ("runs", len(setting.seeds)),
        )
    }
    wanted = AIMS | (AIMS_WITH_PEERS if peer == PEERS else {})
    aims = {f"{prefix}_{name}": aim for prefix in chosen for name, aim in wanted.items()}
    report("Routing", options, {"peer": peer, **told}, figures, aims)


if __name__ == "__main__":
    run(
        main,
        "Compare what routers keep in the engines' caches, and how evenly they spread the load.",
        {"peer": [PEERS, "none"]},
    )
