"""Measure what a kill of the service costs in turns, and what saving the turns costs in latency.

Run: python benchmarks/resume.py [--json FILE] [--quick | --smoke]

- `turns_kept`: the service is killed with SIGKILL at random moments amid rollouts of 20 turns; the share of the turns
  answered by then that are not sampled again after the restart.
- `added_ms_per_turn_sqlite`, `added_ms_per_turn_redis`: the median of what saving adds to a turn, of two whole services
  that take turns on one core, between the answer to a turn and the request for the next, tool call included; only one
  of them saves its turns. `low` and `high` are its bounds with a confidence of 95 %, `added_cpu_ms_per_turn` is what
  saving adds to the CPU time of the service, in the background too;
- `resume_seconds`, `resume_replayed_seconds`: from a kill in the last turn of 20, each of which ran a command of
  `command_seconds` in Apptainer, until the engine is asked again; the service starts in this time. The first goes on in
  its saved sandbox, the second runs the commands again. `resume_replayed_tools` is how many commands the first ran
  again;
- `added_ms_per_turn_in_process`: the same of two conversations in one process, without a service around them.
"""

from __future__ import annotations

import random
import time
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
from common import HERE, Figures, Options, Server, report, run, service, temporary_folder, timed_engine
from engine import read_turns
from service import submit
from support.paired_services import compare_services
from support.paired_turns import added_milliseconds
from support.redis_usage import measured_redis
from support.turns_kept import turns_kept

from api_schemas.rollouts import RolloutState

TURNS = 20
ROLLOUTS = 16
SAVING_SECONDS = 1.0
"""How long the engine takes for a turn, in the middle of which the service is killed with its sandbox saved."""
FIRST_TURNS = 2
"""Kills come once rollouts have had some turns."""
ENVIRONMENT = HERE / "environments" / "echo"
AIMS = {
    "turns_kept": ">= 0.90",
    "resume_replayed_tools": "<= 0",
    "added_ms_per_turn_sqlite": "<= 0.20",
    "added_ms_per_turn_redis": "<= 0.20",
    "added_ms_per_turn_in_process": "<= 0.20",
}


@dataclass(frozen=True, slots=True)
class Plan:
    kills: int
    turn_seconds: float
    pairs: int
    """The pairs of turns of two services."""
    paired_rollouts: int
    """The rollouts whose turns are compared in one process."""
    resumed_turns: int
    """The turns of a rollout that is resumed at its last one."""
    command_seconds: float
    """How long its commands take."""


FULL = Plan(kills=6, turn_seconds=2.0, pairs=2_000, paired_rollouts=32, resumed_turns=20, command_seconds=2.0)
QUICK = Plan(kills=2, turn_seconds=0.4, pairs=80, paired_rollouts=8, resumed_turns=20, command_seconds=0.5)
SMOKE = Plan(kills=1, turn_seconds=0.2, pairs=4, paired_rollouts=1, resumed_turns=4, command_seconds=0.05)


async def main(given: Options) -> None:
    plan = given.plan(FULL, QUICK, SMOKE)
    figures = await kill_amid_rollouts(plan.kills, plan.turn_seconds)
    figures |= await resume_after(plan.resumed_turns, plan.command_seconds)
    figures |= await added_latency(plan.pairs)
    with temporary_folder() as folder:
        added = await added_milliseconds(folder, plan.paired_rollouts)
        figures["added_ms_per_turn_in_process"] = added
    settings = {"rollouts": ROLLOUTS, "turns": TURNS, "command_seconds": plan.command_seconds}
    report("Resume", given, settings, figures, AIMS)


async def kill_amid_rollouts(kills: int, turn_seconds: float) -> Figures:
    """Kill the service `kills` times amid rollouts, let them end, and count the turns that were sampled again."""
    with temporary_folder() as folder:
        record = folder / "turns"
        async with timed_engine(folder, turn_seconds) as url:
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
    while True:
        counts = (await server.client.page(limit=1)).counts
        if not any(counts.get(state) for state in RolloutState if not state.terminal):
            return
        await anyio.sleep(0.25)


async def resume_after(turns: int, command_seconds: float) -> Figures:
    """Kill the service in the last turn of a rollout, with and without a saved sandbox."""
    saved, replayed_tools = await resume(turns, command_seconds, save_seconds=command_seconds / 2)
    replayed, _ = await resume(turns, command_seconds, save_seconds=0)
    return {
        "resume_seconds": saved,
        "resume_replayed_seconds": replayed,
        "resume_replayed_tools": replayed_tools,
    }


async def resume(turns: int, command_seconds: float, save_seconds: float) -> tuple[float, int]:
    """Return the seconds from the kill until the last turn is asked for again, and how many commands ran again."""
    with temporary_folder() as folder:
        record, more = folder / "turns", f"[sandboxes]\nsave_seconds = {save_seconds}\n"
        command = f"sleep {command_seconds}; echo hello"
        async with timed_engine(folder, SAVING_SECONDS, "--command", command) as url:
            serving = partial(
                service, folder, url, workers=1, environment=ENVIRONMENT, pipeline=more, provider="apptainer"
            )
            async with serving() as server:
                await submit(server, anyio.CapacityLimiter(1), "r-0", 0, turns)
                while len(read_turns(record).get(0, ())) < turns - 1:  # noqa: ASYNC110  another process writes it
                    await anyio.sleep(0.02)
                await anyio.sleep(command_seconds + SAVING_SECONDS / 2)
                killed = time.monotonic()
                server.process.kill()
            async with serving() as server:
                await all_ended(server)
                async with aclosing(server.client.events(kinds=["rollout.resume"], after=0, follow=False)) as seen:
                    [event] = [one.data async for one in seen]
            asked = read_turns(record)[0][-1].asked
    if event["outcome"] != "resumed":
        raise SystemExit(f"the rollout did not go on: {event}")
    return asked - killed, int(str(event["turns"])) - int(str(event["restored_turns"]))


async def added_latency(pairs: int) -> Figures:
    """Measure what saving adds to a turn of a service with each store."""
    figures: Figures = {}
    async with measured_redis() as redis:
        for store, url in (("sqlite", None), ("redis", redis.url)):
            with temporary_folder() as folder:
                figures |= (await compare_services(folder, pairs, redis_url=url)).figures(store)
    return figures


if __name__ == "__main__":
    run(main, "Measure what a kill of the service costs in turns, and what saving turns costs in latency.")
