"""What the service itself costs: latency that it adds to a turn, turns per second, memory per waiting rollout.

Run: python benchmarks/service.py [--json FILE] [--quick]

Every turn is one bash call in a local sandbox; the engine is scripted, so that it costs no compute of its own.
Added latency of a turn = the agent stage's wall time less the engine's scripted seconds and less the time in the
bash tool, over the turns; the engine's HTTP transfer counts as added. The median is over rollouts, whose orders
are spread evenly over time, so that their turns do not all end at once; `burst_added_ms_p50_c64` is the worst case,
in which they do. Memory is the growth of the service's process alone, when most rollouts wait for the engine, over
their number then.

`service_cpu_ms_per_turn` is the CPU time of the service's process, starting and ending the rollouts included: on a
machine that is busy with other things it is the figure to trust.

`limit_*` figures are the same turns without the service, in one bare loop: the HTTP call to the same engine and
a line to a running bash. They are what this machine can do at all.
"""

from __future__ import annotations

import statistics
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import anyio
from bare import Bare, bare_turns
from common import HERE, Options, Server, child, report, run, service

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Span, Stage
from api_schemas.tasks import Limits, Task

ENGINE_SECONDS = 2.0
SPREAD_SECONDS = {1: 0.0, 64: 2.0, 512: 6.0}
"""Over how long the orders are spread, by concurrency: whole turns of the engine."""
COMMAND = "echo hello"
AIMS = {
    "added_ms_p50_c64": "< 3",
    "turns_per_second_c64": "> 500",
    "memory_mb_per_rollout_c512": "< 1",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    slow_turns: dict[int, int]
    """Turns of each rollout with the slow engine, by concurrency."""
    fast_turns: int
    """Turns of each rollout with the instant engine."""


FULL = Plan(slow_turns={1: 10, 64: 10, 512: 12}, fast_turns=100)
QUICK = Plan(slow_turns={1: 2, 64: 2, 512: 5}, fast_turns=40)


async def main(given: Options) -> None:
    """Measure all figures, and report them."""
    plan = QUICK if given.quick else FULL
    figures: dict[str, float | int | None] = {}
    async with measured_service(ENGINE_SECONDS) as (server, engine_url):
        rollouts, _ = await roll_out(server, 64, plan.slow_turns[64])
        figures["burst_added_ms_p50_c64"] = latencies(rollouts, 64)["added_ms_p50_c64"]
        for concurrency, spread in SPREAD_SECONDS.items():
            idle_mb = server.memory_mb
            rollouts, peak = await roll_out(server, concurrency, plan.slow_turns[concurrency], spread)
            figures |= latencies(rollouts, concurrency)
        figures["memory_mb_per_rollout_c512"] = (peak.memory_mb - idle_mb) / peak.waiting
        figures["waiting_at_once_c512"] = peak.waiting
        bare = await bare_turns(engine_url, COMMAND, concurrency=64, turns=2, spread_seconds=2.0)
        figures["limit_added_ms_p50_c64"] = bare.added_ms(ENGINE_SECONDS)
    async with measured_service(0.0) as (server, engine_url):
        await roll_out(server, 64, 5)
        figures |= await throughput(server, engine_url, plan.fast_turns)
    order = ["added_ms_p50_c1", "added_ms_p50_c64", "added_ms_p50_c512", "turns_per_second_c64"]
    order += ["memory_mb_per_rollout_c512"]
    figures = {name: figures[name] for name in (*order, *sorted(figures.keys() - set(order)))}
    settings = {"engine_seconds": ENGINE_SECONDS, "command": COMMAND, "fast_turns": plan.fast_turns}
    report("The service's own cost", given, settings, figures, AIMS)


@asynccontextmanager
async def measured_service(engine_seconds: float) -> AsyncIterator[tuple[Server, str]]:
    """A service before a scripted engine that takes so long for a turn; gives the engine's URL too."""
    with tempfile.TemporaryDirectory(prefix="rollout-benchmark-") as name:
        folder = Path(name)
        address = folder / "engine"
        script = [
            "rollout_service.inference.fakes",
            "--delay",
            str(engine_seconds),
            "--address",
            str(address),
        ]
        async with (
            child(script, address) as engine_url,
            service(
                folder, engine_url, workers=max(SPREAD_SECONDS), environment=HERE / "environments" / "echo"
            ) as server,
        ):
            yield server, engine_url


@dataclass(frozen=True, slots=True)
class Peak:
    """When most rollouts were with the agent at once."""

    waiting: int = 0
    memory_mb: float = 0.0


async def roll_out(
    server: Server, count: int, turns: int, spread_seconds: float = 0.0
) -> tuple[list[Rollout], Peak]:
    """So many rollouts at once; returns them, and the service's memory when most of them were with the agent."""
    ids = [f"{uuid.uuid4().hex[:8]}-{number}" for number in range(count)]
    peak = Peak()
    async with anyio.create_task_group() as group:
        limit = anyio.CapacityLimiter(32)
        for number, rollout_id in enumerate(ids):
            group.start_soon(submit, server, limit, rollout_id, number, turns)
            await anyio.sleep(spread_seconds / count)
    before = set(ids)
    while True:
        counts = (await server.client.page(limit=1)).counts
        peak = max(peak, Peak(counts.get(RolloutState.ROLLOUT, 0), server.memory_mb), key=astuple)
        if not any(counts.get(state) for state in RolloutState if not state.terminal):
            break
        await anyio.sleep(0.25)
    rollouts = [rollout async for rollout in server.client.rollouts() if rollout.rollout_id in before]
    check(rollouts, count, turns)
    return rollouts, peak


async def submit(
    server: Server, limit: anyio.CapacityLimiter, rollout_id: str, number: int, turns: int
) -> None:
    """Order one rollout that ends after so many turns."""
    limits = Limits(max_turns=turns, agent_seconds=600, rollout_seconds=900)
    task = Task(environment="echo", instance={"number": number})
    async with limit:
        await server.client.submit(RolloutRequest(rollout_id=rollout_id, task=task, limits=limits))


def check(rollouts: Sequence[Rollout], count: int, turns: int) -> None:
    """Refuse to report figures of rollouts that did not do what is measured."""
    wrong = [
        rollout
        for rollout in rollouts
        if rollout.state is not RolloutState.COMPLETED
        or (rollout.usage.turns, rollout.usage.tool_calls, rollout.attempt) != (turns, turns, 1)
    ]
    if wrong or len(rollouts) != count:
        example = wrong[0].model_dump_json(indent=2) if wrong else ""
        raise SystemExit(f"{len(wrong)} of {len(rollouts)} rollouts (of {count}) went wrong: {example}")


def agent_span(rollout: Rollout) -> Span:
    """The span of the stage that the agent runs in."""
    [span] = [span for span in rollout.spans if span.stage is Stage.ROLLOUT]
    return span


def latencies(rollouts: Sequence[Rollout], concurrency: int) -> dict[str, float]:
    """Milliseconds per turn, medians over the rollouts."""

    def median_ms(seconds: Callable[[Span], float]) -> float:
        return statistics.median(seconds(agent_span(rollout)) for rollout in rollouts) / turns * 1e3

    turns = rollouts[0].usage.turns
    engine = ENGINE_SECONDS * turns
    return {
        f"added_ms_p50_c{concurrency}": median_ms(lambda span: span.seconds - span.tool_seconds - engine),
        f"engine_transfer_ms_p50_c{concurrency}": median_ms(lambda span: span.engine_seconds - engine),
        f"tool_ms_p50_c{concurrency}": median_ms(lambda span: span.tool_seconds),
    }


async def throughput(server: Server, engine_url: str, turns: int) -> dict[str, float]:
    """Turns per second with an instant engine, and what the bare loop does at the same place."""
    cpu = server.cpu_seconds
    rollouts, _ = await roll_out(server, 64, turns)
    cpu = server.cpu_seconds - cpu
    spans = [agent_span(rollout) for rollout in rollouts]
    begun = min(span.started_at.timestamp() for span in spans)
    ended = max(span.started_at.timestamp() + span.seconds for span in spans)
    rate = 64 * turns / (ended - begun)
    bare: Bare = await bare_turns(engine_url, COMMAND, concurrency=64, turns=turns)
    return {
        "turns_per_second_c64": rate,
        "limit_turns_per_second_c64": bare.turns_per_second,
        "share_of_limit_c64": rate / bare.turns_per_second,
        "service_cpu_ms_per_turn": cpu / (64 * turns) * 1e3,
    }


if __name__ == "__main__":
    run(main, "What the service itself costs.")
