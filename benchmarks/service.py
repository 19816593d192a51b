"""Measure the service's own cost: the latency added to a turn, turns per second, and memory per waiting rollout.

Run: python benchmarks/service.py [--json FILE] [--quick | --smoke]

Every turn is one bash call in a local sandbox. The engine is scripted: it needs no compute, and records when it was
asked and when it answered. The added latency of a turn is the time, measured at the engine, from handing an answer to
the socket until that rollout's next request has arrived, minus the time that the same command takes in a bare bash
after such a rest (`tool_ms_p50_c256`; `tool_ms_p50` is its cost in a hot loop). It includes the way in both directions,
HTTP in the service, tokens, the tool call, and waiting for the CPU. It does not include the time that the engine takes
to parse requests and write answers.

Figures cover the turns during which all rollouts were with the agent, except each rollout's first, whose command starts
its shell. Submissions are spread evenly over some seconds to keep turns from all ending at the same moment. Memory is
the growth of only the service's process at the moment when most rollouts wait for the engine, over their number then.

`service_cpu_ms_per_turn` and `_per_rollout` are the CPU time of the service's process, for a turn, and for everything
else in a rollout's life. On a machine that is also busy with other work, trust these figures. `limit_*` figures are for
the same turns in bare loops without the service: the HTTP call to the same engine and a line to a running bash. The one
for `c256` has the service's rhythm and is timed and computed in the same way. A rollout rests for seconds between two
turns, after which everything costs more than in a hot loop, including the bare loop's turns.
"""

from __future__ import annotations

import itertools
import statistics
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path

import anyio
from common import HERE, Figures, Options, Server, percentile, report, run, service, temporary_folder, timed_engine
from engine import COMMAND, MODEL, read_turns
from support.bare_turns import bare_turns
from tokenizers import Tokenizer

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.tasks import Limits, Task

RHYTHM = 256
"""The concurrency at which the bare loops are timed in the service's rhythm."""
SPREAD_TURNS = {1: 0, 64: 1, 256: 2, 512: 3}
"""The turns of the engine over whose time submissions are spread, by concurrency."""
AIMS = {
    "added_ms_p50_c64": "< 3",
    "added_ms_p50_c256": "<= 2",
    "added_ms_p99_c256": "<= 10",
    "turns_per_second_c64": "> 500",
    "memory_mb_per_rollout_c512": "< 1",
}


@dataclass(frozen=True, slots=True)
class Plan:
    slow_turns: dict[int, int]
    """The turns of each rollout with the slow engine, by concurrency."""
    fast_turns: int
    """The turns of each rollout with the instant engine."""
    bare_turns: int
    """The turns of each bare loop with the slow engine."""
    engine_seconds: float = 2.0
    share: int = 1
    """The names of the figures speak of this many rollouts for each one that is run."""

    def at_once(self, concurrency: int) -> int:
        """Return how many rollouts there are at once, instead of as many as the name of a figure says."""
        return max(1, concurrency // self.share)

    def spread_seconds(self, concurrency: int) -> float:
        """Return the time over which submissions are spread."""
        return SPREAD_TURNS[concurrency] * self.engine_seconds


FULL = Plan(slow_turns={1: 10, 64: 12, 256: 16, 512: 20}, fast_turns=100, bare_turns=8)
QUICK = Plan(slow_turns={1: 3, 64: 4, 256: 4, 512: 5}, fast_turns=30, bare_turns=3)
SMOKE = Plan(dict.fromkeys(SPREAD_TURNS, 3), fast_turns=3, bare_turns=3, engine_seconds=0.3, share=64)


@dataclass(frozen=True, slots=True)
class Bench:
    server: Server
    engine_url: str
    record: Path
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """The numbers of rollouts; each has its own in its prompt."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment when most rollouts were with the agent."""

    waiting: int = 0
    memory_mb: float = 0.0


async def main(given: Options) -> None:
    plan = given.plan(FULL, QUICK, SMOKE)
    figures: Figures = {}
    async with bench(0.0) as instant:
        figures |= await throughput(instant, plan)
        bare = await bare_turns(instant.engine_url, COMMAND, concurrency=1, turns=200)
        figures |= {"limit_added_ms_p50_c1": bare.engine_ms, "tool_ms_p50": bare.tool_ms}
    async with bench(plan.engine_seconds) as slow:
        rhythm = await bare_rhythm(slow, plan)
        figures |= rhythm
        for concurrency, turns in plan.slow_turns.items():
            idle_mb = slow.server.memory_mb
            numbers, peak = await roll_out(slow, plan.at_once(concurrency), turns, plan.spread_seconds(concurrency))
            figures |= latencies(slow.record, numbers, concurrency, rhythm[f"tool_ms_p50_c{RHYTHM}"])
        figures["memory_mb_per_rollout_c512"] = (peak.memory_mb - idle_mb) / peak.waiting
        figures["waiting_at_once_c512"] = peak.waiting
    settings = {"engine_seconds": plan.engine_seconds, "command": COMMAND, "fast_turns": plan.fast_turns}
    report("The service's own cost", given, settings, dict(sorted(figures.items())), AIMS)


@asynccontextmanager
async def bench(engine_seconds: float) -> AsyncIterator[Bench]:
    """Start a service with a scripted engine that takes `engine_seconds` for a turn."""
    with temporary_folder() as folder:
        environment = HERE / "environments" / "echo"
        async with (
            timed_engine(folder, engine_seconds) as engine_url,
            service(folder, engine_url, workers=max(SPREAD_TURNS), environment=environment) as server,
        ):
            yield Bench(server, engine_url, folder / "turns")


async def roll_out(bench: Bench, count: int, turns: int, spread_seconds: float = 0.0) -> tuple[list[int], Peak]:
    """Run `count` rollouts at once to their ends; return their numbers, and when most were with the agent."""
    ids = {f"r-{uuid.uuid4().hex[:12]}": next(bench.numbers) for _ in range(count)}
    peak = Peak()
    async with anyio.create_task_group() as group:
        limit = anyio.CapacityLimiter(32)
        for rollout_id, number in ids.items():
            group.start_soon(submit, bench.server, limit, rollout_id, number, turns)
            await anyio.sleep(spread_seconds / count)
    while True:
        counts = (await bench.server.client.page(limit=1)).counts
        now = Peak(counts.get(RolloutState.ROLLOUT, 0), bench.server.memory_mb)
        peak = max(peak, now, key=astuple)
        if not any(counts.get(state) for state in RolloutState if not state.terminal):
            break
        await anyio.sleep(0.25)
    rollouts = [rollout async for rollout in bench.server.client.rollouts() if rollout.rollout_id in ids]
    check(rollouts, count, turns)
    return list(ids.values()), peak


async def submit(server: Server, limit: anyio.CapacityLimiter, rollout_id: str, number: int, turns: int) -> None:
    """Submit one rollout that ends after `turns` turns."""
    limits = Limits(max_turns=turns, agent_seconds=600, rollout_seconds=900)
    task = Task(environment="echo", instance={"number": number})
    async with limit:
        await server.client.submit(RolloutRequest(rollout_id=rollout_id, task=task, limits=limits))


def check(rollouts: Sequence[Rollout], count: int, turns: int) -> None:
    """Refuse to report figures of rollouts that did not go as planned."""
    wrong = [
        rollout
        for rollout in rollouts
        if rollout.state is not RolloutState.COMPLETED
        or (rollout.usage.turns, rollout.usage.tool_calls, rollout.attempt) != (turns, turns, 1)
    ]
    if wrong or len(rollouts) != count:
        example = wrong[0].model_dump_json(indent=2) if wrong else ""
        raise SystemExit(f"{len(wrong)} of {len(rollouts)} rollouts (of {count}) went wrong: {example}")


def latencies(file: Path, numbers: Sequence[int], concurrency: int, tool_ms: float) -> dict[str, float]:
    """Return the milliseconds added to a turn, over the turns during which all rollouts were at work."""
    turns = read_turns(file)
    ours = [turns[number] for number in numbers]
    begin, end = max(one[0].asked for one in ours), min(one[-1].asked for one in ours)
    pairs = [pair for one in ours for pair in itertools.pairwise(one[1:])]
    # If the first one ends before the last one starts, there is no such time; then all turns count.
    inside = [(turn, after) for turn, after in pairs if begin <= turn.answered and after.asked <= end] or pairs
    added = [(after.asked - turn.answered) * 1e3 - tool_ms for turn, after in inside]
    return {
        f"added_ms_p50_c{concurrency}": statistics.median(added),
        f"added_ms_p90_c{concurrency}": percentile(added, 0.9),
        f"added_ms_p99_c{concurrency}": percentile(added, 0.99),
        f"turns_timed_c{concurrency}": len(added),
    }


async def bare_rhythm(slow: Bench, plan: Plan) -> dict[str, float]:
    """Measure the latency that bare loops add to turns in the service's rhythm, and the time of the command there."""
    numbers = [next(slow.numbers) for _ in range(plan.at_once(RHYTHM))]
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    bare = await bare_turns(
        slow.engine_url,
        COMMAND,
        concurrency=len(numbers),
        turns=plan.bare_turns,
        spread_seconds=plan.spread_seconds(RHYTHM),
        prompts=[tokenizer.encode(f"Greet number {number} from the shell.").ids for number in numbers],
    )
    added = latencies(slow.record, numbers, RHYTHM, bare.tool_ms)
    return {
        f"limit_added_ms_p50_c{RHYTHM}": added[f"added_ms_p50_c{RHYTHM}"],
        f"tool_ms_p50_c{RHYTHM}": bare.tool_ms,
    }


async def throughput(instant: Bench, plan: Plan) -> dict[str, float]:
    """Measure turns per second with an instant engine and 64 rollouts, and those of bare loops in their place."""
    count, turns = plan.at_once(64), plan.fast_turns
    await roll_out(instant, 1, 1)  # takes what a service needs for the first of them
    cpu = [instant.server.cpu_seconds]
    await roll_out(instant, count, 1)
    cpu.append(instant.server.cpu_seconds)
    numbers, _ = await roll_out(instant, count, turns)
    cpu.append(instant.server.cpu_seconds)
    turns_of = read_turns(instant.record)
    ours = [turns_of[number] for number in numbers]
    seconds = max(one[-1].asked for one in ours) - min(one[0].asked for one in ours)
    rate = count * (turns - 1) / seconds
    bare = await bare_turns(instant.engine_url, COMMAND, concurrency=count, turns=turns)
    per_turn = (cpu[2] - cpu[1] - (cpu[1] - cpu[0])) / (count * (turns - 1)) * 1e3
    return {
        "turns_per_second_c64": rate,
        "limit_turns_per_second_c64": bare.turns_per_second,
        "share_of_limit_c64": rate / bare.turns_per_second,
        "service_cpu_ms_per_turn": per_turn,
        "service_cpu_ms_per_rollout": (cpu[1] - cpu[0]) / count * 1e3 - per_turn,
    }


if __name__ == "__main__":
    run(main, "Measure the service's own cost.")
