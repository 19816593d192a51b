"""Measure what a kill of the service costs in turns, and what saving the turns costs in latency.

Run: python benchmarks/resume.py [--json FILE] [--quick | --smoke]

- `turns_kept`: the service is killed with SIGKILL at random moments amid rollouts of 20 turns; the share of the turns
  answered by then that are not sampled again after the restart.
- `added_ms_per_turn_sqlite`, `added_ms_per_turn_redis`: the median of what saving adds to a turn, of two whole services
  that take turns on one core, between the answer to a turn and the request for the next, tool call included; only one
  of them saves its turns. `low` and `high` are its bounds with a confidence of 95 %, `added_cpu_ms_per_turn` is what
  saving adds to the CPU time of the service, in the background too;
- `added_ms_per_turn_in_process`: the same of two conversations in one process, without a service around them.
"""

from __future__ import annotations

import random
import tempfile
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import anyio
from common import HERE, Options, Server, child, report, run, service
from engine import read_turns
from service import submit
from support.paired_services import compare_services
from support.paired_turns import added_milliseconds
from support.redis_usage import measured_redis
from support.turns_kept import turns_kept

from api_schemas.rollouts import RolloutState

TURNS = 20
ROLLOUTS = 16
FIRST_TURNS = 2
"""Kills come once rollouts have had some turns."""
ENVIRONMENT = HERE / "environments" / "echo"
AIMS = {
    "turns_kept": ">= 0.90",
    "added_ms_per_turn_sqlite": "<= 0.20",
    "added_ms_per_turn_redis": "<= 0.20",
    "added_ms_per_turn_in_process": "<= 0.20",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The amounts of what is measured."""

    kills: int
    turn_seconds: float
    pairs: int
    """The pairs of turns of two services."""
    paired_rollouts: int
    """The rollouts whose turns are compared in one process."""


FULL = Plan(kills=6, turn_seconds=2.0, pairs=2_000, paired_rollouts=32)
QUICK = Plan(kills=2, turn_seconds=0.4, pairs=80, paired_rollouts=8)
SMOKE = Plan(kills=1, turn_seconds=0.2, pairs=4, paired_rollouts=1)


async def main(given: Options) -> None:
    """Measure both figures, and report them."""
    plan = given.plan(FULL, QUICK, SMOKE)
    figures = await kill_amid_rollouts(plan.kills, plan.turn_seconds)
    figures |= await added_latency(plan.pairs)
    with tempfile.TemporaryDirectory(prefix="rollout-benchmark-") as name:
        added = await added_milliseconds(Path(name), plan.paired_rollouts)
        figures["added_ms_per_turn_in_process"] = added
    settings = {"rollouts": ROLLOUTS, "turns": TURNS}
    report("Resume", given, settings, figures, AIMS)


async def kill_amid_rollouts(kills: int, turn_seconds: float) -> dict[str, float | int | None]:
    """Kill the service `kills` times amid rollouts, let them end, and count the turns that were sampled again."""
    with tempfile.TemporaryDirectory(prefix="rollout-benchmark-") as name:
        folder = Path(name)
        address, record = folder / "engine", folder / "turns"
        script = [str(HERE / "engine.py"), "--delay", str(turn_seconds)]
        async with child([*script, "--address", str(address), "--record", str(record)], address) as url:
            finished = []
            numbers = iter(range(1_000_000))
            for _ in range(kills):
                async with serving(folder, url) as server:
                    limit = anyio.CapacityLimiter(ROLLOUTS)
                    under_way = (await server.client.page(limit=1)).counts
                    missing = ROLLOUTS - sum(n for state, n in under_way.items() if not state.terminal)
                    for number in [next(numbers) for _ in range(missing)]:
                        await submit(server, limit, f"r-{number}", number, TURNS)
                    seconds = random.uniform(FIRST_TURNS, TURNS - FIRST_TURNS) * turn_seconds
                    await anyio.sleep(seconds)
                    server.process.kill()
                finished.append({number: len(ours) for number, ours in read_turns(record).items()})
            async with serving(folder, url) as server:
                await all_ended(server)
                rollouts = [rollout async for rollout in server.client.rollouts()]
            wrong = [r for r in rollouts if r.state is not RolloutState.COMPLETED or r.usage.turns != TURNS]
            if wrong:
                raise SystemExit(f"{len(wrong)} rollouts went wrong: {wrong[0].model_dump_json(indent=2)}")
            answered = {number: len(ours) for number, ours in read_turns(record).items()}
    return {
        "turns_kept": turns_kept(finished, answered, turns=TURNS),
        "turns_sampled_again": sum(count - TURNS for count in answered.values()),
        "kills": kills,
        "rollouts": len(rollouts),
    }


def serving(folder: Path, url: str) -> AbstractAsyncContextManager[Server]:
    """Run the service on its state of before; a crash must not use up the attempts."""
    more = "max_attempts = 1000\n"
    return service(folder, url, workers=2 * ROLLOUTS, environment=ENVIRONMENT, pipeline=more)


async def all_ended(server: Server) -> None:
    """Wait until no rollout is left."""
    while True:
        counts = (await server.client.page(limit=1)).counts
        if not any(counts.get(state) for state in RolloutState if not state.terminal):
            return
        await anyio.sleep(0.25)


async def added_latency(pairs: int) -> dict[str, float | int | None]:
    """Measure what saving adds to a turn of a service with each store."""
    figures: dict[str, float | int | None] = {}
    async with measured_redis() as redis:
        for store, url in (("sqlite", None), ("redis", redis.url)):
            with tempfile.TemporaryDirectory(prefix="rollout-benchmark-") as name:
                figures |= (await compare_services(Path(name), pairs, redis_url=url)).figures(store)
    return figures


if __name__ == "__main__":
    run(main, "Measure what a kill of the service costs in turns, and what saving turns costs in latency.")
