"""Measure what the gateway adds to a call, next to a bare engine and Agent Lightning's proxy.

Run: python benchmarks/gateway.py [--json FILE] [--quick | --smoke] [--peer none]

Agents in this process hold conversations with tools and send all of them with every call, to the Chat Completions API
of three targets, which take turns in each round: the scripted engine itself, the gateway of a service, and the proxy of
Agent Lightning (in .venv-lightning, which scripts/install-lightning makes) with its default settings. Engine, service
and proxy are processes of their own. The engine's chat route does not render messages, so the bare engine and the
proxy are spared what the gateway does itself; the gateway calls the engine's `/generate`.

- `added_ms_`: the median time of a call, from sending it to having read its answer, minus that of the same call to the
  bare engine. At `_c64`, 64 agents call at once, an answer takes the engine `engine_seconds`, and the calls come in
  evenly; at `_c1`, one agent calls an instant engine. Answers are not streamed, since the proxy refuses that.
- `ttft_added_ms_`: the same for the first text of a streamed answer, at `_c64`.
- `calls_per_second`: 64 agents and an instant engine. Agents, engine and service share the machine's cores.
- `cpu_ms_per_call_`: CPU time of the service, or of the proxy. On a busy machine, trust these figures.
- `long_call_ms`: one more call of a conversation of `long_call_tokens`, minus the same ids sent to `/generate`.
- `memory_mb_per_conversation`: growth of the process with 31 turns, each with a tool's output of 20 kB, per
  conversation; all of them are open.
- `bridged_share`, `merge_factor`: recorded runs of real agents, replayed through capture. The share of the prompt
  tokens, of all calls but each run's first, that stay in the segment of the turn before; and calls per segment. `_all`
  has also the recordings in which a compaction, an error or a sub-agent was provoked. `replayed` in the settings has
  each.
- `lost_tokens`, `invented_tokens`: ids that the engine sampled and that are in no trajectory, and the reverse.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from common import Figures, Options, percentile, report, run, temporary_folder
from pydantic import JsonValue
from support.gateway.agents import Agent, Timings, converse, time_generate
from support.gateway.lightning import LightningProxy, lightning_proxy
from support.gateway.replays import replay_all, replay_figures
from support.gateway.targets import BareEngine, Engine, OwnGateway, Target, engine, own_gateway, tokens_in

AIMS = {
    "added_ms_p50_c64": "<= 3",
    "ttft_added_ms_p50": "<= 5",
    "calls_per_second": ">= 300",
    "long_call_ms": "<= 25",
    "lost_tokens": "0",
}
ENGINE_SECONDS = 0.5
OUTPUT_CHARACTERS = 1_000
LONG_TURNS, LONG_CHARACTERS = 26, 8_000
"""They make about 100,000 tokens."""
OPEN_TURNS, OPEN_CHARACTERS = 31, 20_000

LIGHTNING = "lightning"
OF_PEER = (
    "added_ms_p50_c64",
    "added_ms_p99_c64",
    "added_ms_p50_c1",
    "added_ms_p99_c1",
    "calls_per_second",
    "cpu_ms_per_call_c64",
    "cpu_ms_per_call_saturated",
    "memory_mb_per_conversation",
)
"""The figures of the proxy, by their names after its own; null without it."""


@dataclass(frozen=True, slots=True)
class Plan:
    agents: int
    """Those that call at once; shorter runs have fewer than the names of the figures say."""
    rounds: int
    turns: int
    """The turns of each of the agents in a round with the slow engine."""
    fast_turns: int
    """The same with the instant engine."""
    single_turns: int
    """The turns of the agent that is alone."""
    long_calls: int
    conversations: int
    """The open conversations whose memory is measured."""


FULL = Plan(agents=64, rounds=5, turns=8, fast_turns=16, single_turns=40, long_calls=20, conversations=16)
QUICK = Plan(agents=16, rounds=1, turns=2, fast_turns=2, single_turns=6, long_calls=3, conversations=2)
SMOKE = Plan(agents=2, rounds=1, turns=1, fast_turns=1, single_turns=1, long_calls=1, conversations=2)


@dataclass(slots=True)
class Measured:
    timings: Timings = field(default_factory=Timings)
    rates: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0

    @property
    def cpu_ms(self) -> float:
        return self.cpu_seconds / len(self.timings.whole) * 1e3


@dataclass(slots=True)
class Bench:
    """An engine with everything that stands in front of it."""

    engine: Engine
    own: OwnGateway
    targets: dict[str, Target]


Measurements = Mapping[str, Measured]


async def main(given: Options) -> None:
    plan, with_peer = given.plan(FULL, QUICK, SMOKE), given.chosen["peer"] == LIGHTNING
    figures: Figures = {}
    ids = Counter[str]()
    with temporary_folder() as folder:
        async with bench(folder, ENGINE_SECONDS, ids, with_peer=with_peer) as slow:
            figures |= await latencies(slow, plan)
        async with bench(folder, 0.0, ids, with_peer=with_peer) as instant:
            figures |= await memory(instant, plan)  # first, while the processes have not grown yet
            figures |= await throughput(instant, plan)
            figures |= await long_call(instant, plan)
    if not with_peer:
        figures |= dict.fromkeys(f"{LIGHTNING}_{name}" for name in OF_PEER)
    replayed = replay_all()
    figures |= replay_figures(replayed) | {"lost_tokens": ids["lost"], "invented_tokens": ids["invented"]}
    settings: dict[str, JsonValue] = {
        "engine_seconds": ENGINE_SECONDS,
        "output_characters": OUTPUT_CHARACTERS,
        "plan": asdict(plan),
        "peer": given.chosen["peer"],
        "load_average": list(psutil.getloadavg()),
        "replayed": {name: asdict(each) | {"kept_share": each.kept_share} for name, each in replayed.items()},
    }
    report("The gateway's own cost", given, settings, dict(sorted(figures.items())), AIMS)


@asynccontextmanager
async def bench(folder: Path, latency: float, ids: Counter[str], *, with_peer: bool) -> AsyncIterator[Bench]:
    """Run an engine and what is compared, and count ids that were lost or invented in the block."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    async with AsyncExitStack() as stack:
        scripted = await stack.enter_async_context(engine(folder, latency))
        own = await stack.enter_async_context(own_gateway(folder, scripted))
        targets: dict[str, Target] = {"bare": BareEngine(scripted.url), "own": own}
        if with_peer:
            targets[LIGHTNING] = await stack.enter_async_context(lightning_proxy(folder, scripted))
        async with own.open(1) as accesses:  # once the engine was registered, which samples too
            await converse([Agent(accesses[0], 0, OUTPUT_CHARACTERS)], 1)
        before = scripted.sampled() - own.captured
        yield Bench(scripted, own, targets)
        sampled = scripted.sampled() - before
        ids["lost"] += tokens_in(sampled - own.captured)
        ids["invented"] += tokens_in(own.captured - sampled)


async def measure(
    target: Target,
    found: Measured,
    turns: int,
    *,
    agents: int,
    spread: float = 0.0,
    stream: bool = False,
) -> None:
    async with target.open(agents) as accesses:
        ours = [Agent(access, number, OUTPUT_CHARACTERS) for number, access in enumerate(accesses)]
        cpu, started = target.cpu_seconds, time.perf_counter()
        timings = await converse(ours, turns, spread_seconds=spread, stream=stream)
        found.rates.append(len(timings.whole) / (time.perf_counter() - started))
        found.cpu_seconds += target.cpu_seconds - cpu
    found.timings.whole += timings.whole
    found.timings.first += timings.first


async def latencies(slow: Bench, plan: Plan) -> Figures:
    """Measure calls that come in evenly, whole and streamed."""
    whole = {name: Measured() for name in slow.targets}
    streamed = {name: Measured() for name in ("bare", "own")}
    for _ in range(plan.rounds):
        for name, target in slow.targets.items():
            await measure(target, whole[name], plan.turns, agents=plan.agents, spread=ENGINE_SECONDS)
        for name, found in streamed.items():
            await measure(slow.targets[name], found, plan.turns, agents=plan.agents, spread=ENGINE_SECONDS, stream=True)
    figures = added(whole, "c64") | cpu(whole, "c64")
    figures |= {
        "offered_calls_per_second_c64": statistics.median(whole["bare"].rates),
        "bare_ms_p50_c64": statistics.median(whole["bare"].timings.whole) * 1e3,
        "bare_ttft_ms_p50": statistics.median(streamed["bare"].timings.first) * 1e3,
        "streamed_added_ms_p50": difference(streamed["own"].timings.whole, streamed["bare"].timings.whole),
        "streamed_cpu_ms_per_call": streamed["own"].cpu_ms,
    }
    first, bare = streamed["own"].timings.first, streamed["bare"].timings.first
    return figures | {"ttft_added_ms_p50": difference(first, bare)}


async def throughput(instant: Bench, plan: Plan) -> Figures:
    """Measure calls as fast as they go, and those of an agent that is alone."""
    many = {name: Measured() for name in instant.targets}
    single = {name: Measured() for name in instant.targets}
    for _ in range(plan.rounds):
        for name, target in instant.targets.items():
            await measure(target, single[name], plan.single_turns, agents=1)
        for name, target in instant.targets.items():
            await measure(target, many[name], plan.fast_turns, agents=plan.agents)
    rates = {prefix(name) + "calls_per_second": statistics.median(many[name].rates) for name in many}
    return rates | added(single, "c1") | cpu(many, "saturated")


async def long_call(instant: Bench, plan: Plan) -> Figures:
    """Measure the next call of a long conversation."""
    own = instant.own
    own.longest = 0
    async with own.open(1) as accesses:
        agent = Agent(accesses[0], 0, LONG_CHARACTERS)
        await converse([agent], LONG_TURNS)
        agent.output_characters = OUTPUT_CHARACTERS // 10
        before = own.cpu_seconds
        timings = await converse([agent], plan.long_calls)
        cpu_ms = (own.cpu_seconds - before) / plan.long_calls * 1e3
    ids = [300 + place % 200 for place in range(own.longest)]
    bare = await time_generate(instant.engine.url, ids, plan.long_calls)
    return {
        "long_call_ms": difference(timings.whole, bare),
        "long_call_cpu_ms": cpu_ms,
        "long_call_tokens": own.longest,
        "long_call_body_bytes": len(agent.body(stream=False)),
        "bare_long_call_ms": statistics.median(bare) * 1e3,
    }


async def memory(instant: Bench, plan: Plan) -> Figures:
    figures: Figures = {}
    processes = {"own": instant.own.server.process}
    lightning = instant.targets.get(LIGHTNING)
    if isinstance(lightning, LightningProxy):
        processes[LIGHTNING] = lightning.process
    for name, process in processes.items():
        async with instant.targets[name].open(plan.conversations) as accesses:
            agents = [Agent(access, number, OPEN_CHARACTERS) for number, access in enumerate(accesses)]
            await converse(agents[:1], OPEN_TURNS)  # takes what a process needs for the first of them
            before = process.memory_info().rss
            await converse(agents[1:], OPEN_TURNS)
            grown = process.memory_info().rss - before
        figures[f"{prefix(name)}memory_mb_per_conversation"] = grown / 1e6 / (plan.conversations - 1)
    return figures


def prefix(name: str) -> str:
    """Return how the figures of a target begin."""
    return "" if name == "own" else f"{name}_"


def difference(ours: Sequence[float], bare: Sequence[float]) -> float:
    """Return the difference between two medians, in milliseconds."""
    return (statistics.median(ours) - statistics.median(bare)) * 1e3


def added(found: Measurements, suffix: str) -> Figures:
    """Return what each target adds to a call."""
    bare = found["bare"].timings.whole
    figures: Figures = {}
    for name, each in found.items():
        whole = each.timings.whole
        if name != "bare":
            figures[f"{prefix(name)}added_ms_p50_{suffix}"] = difference(whole, bare)
            figures[f"{prefix(name)}added_ms_p99_{suffix}"] = (percentile(whole, 0.99) - percentile(bare, 0.99)) * 1e3
    return figures


def cpu(found: Measurements, suffix: str) -> Figures:
    """Return the CPU time of each target per call."""
    return {f"{prefix(name)}cpu_ms_per_call_{suffix}": each.cpu_ms for name, each in found.items() if name != "bare"}


if __name__ == "__main__":
    run(main, "Measure what the gateway adds to a call.", {"peer": [LIGHTNING, "none"]})
