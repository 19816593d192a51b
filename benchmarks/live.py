"""Measure live sessions: whether traffic, judging, training and new weights get in each other's way.

Run: python benchmarks/live.py [--json FILE] [--quick | --smoke]

The policy and its judge are scripted engines in a process of their own. Users are in this process, and ask the service
over HTTP for streamed answers. A trainer leases and acknowledges batches, and loads new weights.

- `lost`: requests of concurrent sessions without a whole answer, and answers that are not recorded, while the weights
  change every `update_seconds`. `duplicated`: turns that were recorded or delivered more than once. `inexact`: turns
  that were delivered with another text than their user read, or with a version that was not loaded then.
- `overhead_ms_p50`: the median time of an answer with recording, judging and training, minus that of one that is only
  served. Two services take turns with the same conversations. `ttft_added_ms_p50`: the same for the first text.
- `leftovers`: open sessions, and rows in the file of the sessions' store, after `abandoned` sessions were left alone,
  some in the middle of an answer, for as long as sessions are kept.
"""

from __future__ import annotations

import sqlite3
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import anyio
import psutil
from common import HERE, Figures, Options, Server, report, run, temporary_folder, told_address
from pydantic import HttpUrl
from support.live.trainer import CLOSE_SECONDS, Trainer
from support.live.users import Clock, User

from api_schemas.inference import BackendSpec
from api_schemas.sessions import SessionRequest, SessionState
from rollout_service.cli.server_child import running_child

AIMS = {
    "lost": "0",
    "duplicated": "0",
    "inexact": "0",
    "overhead_ms_p50": "<= 5",
    "ttft_added_ms_p50": "<= 5",
    "leftovers": "0",
}
SETTLE_SECONDS = 240.0
"""How long judging and training may take after the last answer."""
KEPT_SECONDS = 3.0
"""How long an abandoned answer waits for its client, a session stays open, and then is kept."""
LEFT_SECONDS = 120.0
PAIR_TURNS = 10
"""The compared turns of a session. Serving alone renders the whole prompt for each turn, so in long sessions it is the
slower of the two."""
TABLES = ("sessions", "turns", "contents", "parts")


@dataclass(frozen=True, slots=True)
class Plan:
    sessions: int
    turns: int
    think_seconds: float
    """Between the answers of a session."""
    update_seconds: float
    latency: float
    """Seconds of an answer."""
    judge_latency: float
    pairs: int
    """Answers of each service whose times are compared."""
    pair_users: int
    abandoned: int
    at_once: int
    """The abandoned sessions that are served at the same time."""


FULL = Plan(
    sessions=1_000,
    turns=5,
    think_seconds=15.0,
    update_seconds=20.0,
    latency=0.5,
    judge_latency=0.2,
    pairs=800,
    pair_users=8,
    abandoned=10_000,
    at_once=64,
)
QUICK = Plan(
    sessions=24,
    turns=4,
    think_seconds=1.0,
    update_seconds=2.0,
    latency=0.2,
    judge_latency=0.05,
    pairs=48,
    pair_users=4,
    abandoned=100,
    at_once=16,
)
SMOKE = Plan(
    sessions=12,
    turns=3,
    think_seconds=0.5,
    update_seconds=0.5,
    latency=0.05,
    judge_latency=0.02,
    pairs=20,
    pair_users=2,
    abandoned=4,
    at_once=4,
)


@asynccontextmanager
async def bench(folder: Path, plan: Plan, live: str) -> AsyncIterator[Server]:
    """Run a service with the two engines, and these settings of live sessions."""
    await anyio.Path(folder).mkdir()
    address, config = folder / "engines", folder / "rollout.toml"
    config.write_text(
        f'[sandbox]\nprovider = "local"\n[sandboxes.pressure]\nenabled = false\n'
        f"[gateway]\nretry_seconds = {KEPT_SECONDS}\n"
        f"[live]\nmax_sessions = 50000\n{live}\n[live.judge]\nvotes = 1\nat_once = 64\n"
    )
    script = [str(HERE / "programs" / "live_engines.py")]
    script += ["--latency", str(plan.latency), "--judge-latency", str(plan.judge_latency)]
    flags = ["--config", str(config), "--engine", "none", "--log-level", "warning"]
    async with told_address(script, address) as urls:
        policy, judge = urls.split()
        flags += ["--backend", policy]
        async with running_child(folder, flags) as server:
            await server.client.add_backend(BackendSpec(url=HttpUrl(judge), pool="judge"))
            yield Server(server.client, psutil.Process(server.process.pid))


async def open_users(server: Server, count: int, clock: Clock, *, train: bool) -> dict[str, User]:
    users: dict[str, User] = {}
    limit = anyio.CapacityLimiter(32)

    async def one() -> None:
        async with limit:
            opened = await server.client.open_session(SessionRequest(train=train))
        headers = {"authorization": f"Bearer {opened.key}", "content-type": "application/json"}
        session_id = opened.session.session_id
        users[session_id] = User(session_id, f"{opened.url}/v1", headers, clock)

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(one)
    return users


def connections() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def concurrent_sessions(folder: Path, plan: Plan) -> Figures:
    """Let many sessions talk while weights change, and compare all that was delivered with what they got."""
    clock = Clock()
    async with bench(folder, plan, "") as server:
        users = await open_users(server, plan.sessions, clock, train=True)
        trainer = Trainer(server.client, clock)
        async with anyio.create_task_group() as background:
            background.start_soon(trainer.train)
            background.start_soon(trainer.update, plan.update_seconds)
            started, cpu = time.perf_counter(), server.cpu_seconds
            await _talk(list(users.values()), plan)
            seconds, cpu = time.perf_counter() - started, server.cpu_seconds - cpu
            recorded = await _end(server, users, trainer)
            background.cancel_scope.cancel()
        memory = server.memory_mb
    trainer.check(users)
    return _traffic(users, recorded, trainer) | {
        "requests_per_second": sum(user.requests for user in users.values()) / seconds,
        "cpu_ms_per_request": cpu * 1e3 / max(1, sum(user.requests for user in users.values())),
        "memory_mb": memory,
        "updates": clock.loaded,
    }


def _traffic(users: dict[str, User], recorded: dict[str, int], trainer: Trainer) -> Figures:
    answered = {name: len(user.answers) for name, user in users.items()}
    unrecorded = sum(max(0, count - recorded[name]) for name, count in answered.items())
    twice = sum(max(0, recorded[name] - user.requests) for name, user in users.items())
    twice += sum(count - 1 for count in trainer.delivered.values())
    lost = [problem for user in users.values() for problem in user.problems]
    lost += [
        f"{name}: {count} answers, {recorded[name]} recorded"
        for name, count in answered.items()
        if recorded[name] < count
    ]
    for line in (*trainer.wrong[:10], *lost[:10]):
        print(line)
    return {
        "lost": sum(user.lost for user in users.values()) + unrecorded,
        "duplicated": twice,
        "inexact": len(trainer.wrong),
        "served": sum(answered.values()),
        "delivered": len(trainer.delivered),
        "batches": trainer.batches,
        "answer_ms_p50": statistics.median(one.seconds for user in users.values() for one in user.answers) * 1e3,
    }


async def _talk(users: Sequence[User], plan: Plan) -> None:
    async with connections() as http:

        async def converse(user: User, place: int) -> None:
            await anyio.sleep(place * plan.think_seconds / len(users))
            for _ in range(plan.turns):
                await user.ask(http)
                await anyio.sleep(plan.think_seconds)

        async with anyio.create_task_group() as group:
            for place, user in enumerate(users):
                group.start_soon(converse, user, place)


async def _end(server: Server, users: dict[str, User], trainer: Trainer) -> dict[str, int]:
    """End the sessions, wait until nothing more is delivered, and return how many turns of each were recorded."""
    limit = anyio.CapacityLimiter(16)
    recorded: dict[str, int] = {}

    async def one(session_id: str) -> None:
        async with limit:
            recorded[session_id] = len((await server.client.session(session_id)).turns)
            await server.client.end_session(session_id)

    async with anyio.create_task_group() as group:
        for session_id in users:
            group.start_soon(one, session_id)
    with anyio.move_on_after(SETTLE_SECONDS):
        batches = -1
        while batches != trainer.batches:
            batches = trainer.batches
            await anyio.sleep(2 * CLOSE_SECONDS)
    return recorded


async def overhead(folder: Path, plan: Plan) -> Figures:
    """Let the same users ask two services in turn, of which one records, judges and trains."""
    clock = Clock()
    async with bench(folder / "on", plan, "") as on, bench(folder / "off", plan, "") as off:
        trainer = Trainer(on.client, clock)
        async with anyio.create_task_group() as background:
            background.start_soon(trainer.train)
            learning: list[User] = []
            plain: list[User] = []
            for _ in range(max(1, plan.pairs // (plan.pair_users * PAIR_TURNS))):
                here = list((await open_users(on, plan.pair_users, clock, train=True)).values())
                there = list((await open_users(off, plan.pair_users, clock, train=False)).values())
                await _take_turns(here, there, 1 + PAIR_TURNS)
                learning += here
                plain += there
            background.cancel_scope.cancel()
    with_it, without = ([one for user in users for one in user.answers[1:]] for users in (learning, plain))
    return {
        "overhead_ms_p50": _added([one.seconds for one in with_it], [one.seconds for one in without]),
        "ttft_added_ms_p50": _added([one.first_seconds for one in with_it], [one.first_seconds for one in without]),
        "plain_ms_p50": statistics.median(one.seconds for one in without) * 1e3,
        "plain_ttft_ms_p50": statistics.median(one.first_seconds for one in without) * 1e3,
    }


def _added(ours: Sequence[float], bare: Sequence[float]) -> float:
    return (statistics.median(ours) - statistics.median(bare)) * 1e3


async def _take_turns(learning: Sequence[User], plain: Sequence[User], turns: int) -> None:
    """Let each pair of users ask one after the other, and all pairs at once."""
    async with connections() as http:

        async def converse(place: int, pair: tuple[User, User]) -> None:
            await anyio.sleep(place * 0.05)
            for turn in range(turns):
                for user in pair if turn % 2 else reversed(pair):
                    await user.ask(http)

        async with anyio.create_task_group() as group:
            for place, pair in enumerate(zip(learning, plain, strict=True)):
                group.start_soon(converse, place, pair)


async def abandoned_sessions(folder: Path, plan: Plan) -> Figures:
    """Leave sessions alone, and look for what is left of them."""
    kept = f"train = true\nidle_seconds = {KEPT_SECONDS}\nretention_seconds = {KEPT_SECONDS}\n"
    async with bench(folder, plan, kept) as server:
        before = server.memory_mb
        await _abandon(server, plan)
        peak = server.memory_mb
        is_open = await _until_closed(server)
    rows = await anyio.to_thread.run_sync(_rows, folder)
    return {
        "leftovers": is_open + rows,
        "left_open": is_open,
        "left_rows": rows,
        "abandoned_memory_mb": peak - before,
    }


async def _abandon(server: Server, plan: Plan) -> None:
    limit = anyio.CapacityLimiter(plan.at_once)
    async with connections() as http, anyio.create_task_group() as group:

        async def one(number: int) -> None:
            async with limit:
                (user,) = (await open_users(server, 1, Clock(), train=True)).values()
                await user.abandon(http, at_once=number % 4 == 0)

        for number in range(plan.abandoned):
            group.start_soon(one, number)


async def _until_closed(server: Server) -> int:
    """Wait until no session is shown, for a time; return how many are open then."""
    deadline = time.monotonic() + LEFT_SECONDS
    while True:
        shown = [session async for session in server.client.sessions()]
        if not shown or time.monotonic() > deadline:
            return sum(session.state is SessionState.OPEN for session in shown)
        await anyio.sleep(1.0)


def _rows(folder: Path) -> int:
    """Count what the store of sessions has about single sessions, once the service has ended."""
    with closing(sqlite3.connect(folder / "live.sqlite3")) as db:
        return sum(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES)


async def main(given: Options) -> None:
    plan = given.plan(FULL, QUICK, SMOKE)
    figures: Figures = {}
    with temporary_folder() as folder:
        await anyio.Path(folder / "pairs").mkdir()
        figures |= await overhead(folder / "pairs", plan)
        figures |= await concurrent_sessions(folder / "many", plan)
        figures |= await abandoned_sessions(folder / "abandoned", plan)
    report("Live sessions", given, {"plan": asdict(plan)}, dict(sorted(figures.items())), AIMS)


if __name__ == "__main__":
    run(main, "Measure whether serving, judging, training and new weights get in each other's way.")
