"""What ten people who watch the dashboard cost a service that works.

A service in a process of its own runs rollouts of many turns, one at a time, against an engine that answers after a
fixed time: rollouts beside each other wait for each other, which hides what viewers cost. Spells without viewers and
with ten of them take turns, so the machine's noise reaches both alike. A viewer looks at the list of rollouts: it
follows the overview, and asks for the newest 200 every two seconds, with the header that the page sends. Each figure
is the mean difference between neighboring spells; `_error` is its standard error. Of the CPU time, what the turns of a
spell cost without viewers is taken off. A turn lasts from one request to the engine to the next, without the tool in
between. `viewers_idle_cpu_percent` is what the same viewers take of the processor while no rollout runs, which is free
of the noise of the work.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import anyio
import httpx

from api_schemas.rollouts.steps import RolloutSteps, StepKind
from tests.support.processes.service import Running, scripted_engine, service

VIEWERS = 10
ASK_SECONDS = 2.0
ENGINE_SECONDS = 0.02
WORKERS = 1
CONFIG = f"""
[sandboxes.pressure]
enabled = false
[pipeline]
rollout_workers = {WORKERS}
init_workers = {WORKERS}
"""
ASKED = "/v1/summaries?limit=200"
SHARED = {"Cache-Control": "max-age=2"}


@dataclass(frozen=True, slots=True)
class Plan:
    pairs: int
    idle_pairs: int
    spell_seconds: float
    warm_seconds: float
    turns: int
    """Per rollout."""


FULL = Plan(pairs=16, idle_pairs=3, spell_seconds=5.0, warm_seconds=8.0, turns=60)
QUICK = Plan(pairs=2, idle_pairs=1, spell_seconds=3.0, warm_seconds=4.0, turns=20)
SMOKE = Plan(pairs=2, idle_pairs=1, spell_seconds=1.0, warm_seconds=1.0, turns=4)


@dataclass(frozen=True, slots=True)
class Spell:
    """A few seconds with or without viewers."""

    seconds: float
    cpu_seconds: float
    turns: int
    turn_ms: list[float]


async def measure(plan: Plan) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            scripted_engine(folder, delay=ENGINE_SECONDS) as engine,
            service(folder, engine.url, CONFIG, turns=plan.turns) as server,
        ):
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                busy = await _busy_spells(server, client, plan)
                await _until_idle(client)
                idle = await _pairs(server, client, None, plan.idle_pairs, plan.spell_seconds)
    taken = [100 * (_beyond(viewed, 0) - _beyond(plain, 0)) for plain, viewed in _paired(idle)]
    return _figures(busy) | {"viewers_idle_cpu_percent": round(statistics.mean(taken), 2)}


async def _busy_spells(server: Running, client: httpx.AsyncClient, plan: Plan) -> list[Spell]:
    async with anyio.create_task_group() as tasks:
        ended: list[str] = []
        for worker in range(WORKERS):
            tasks.start_soon(_keep_busy, client, f"w{worker}", ended)
        await anyio.sleep(plan.warm_seconds)
        spells = await _pairs(server, client, ended, plan.pairs, plan.spell_seconds)
        tasks.cancel_scope.cancel()
    return spells


async def _until_idle(client: httpx.AsyncClient) -> None:
    while await _working(client):  # noqa: ASYNC110 - another process works
        await anyio.sleep(0.2)


async def _working(client: httpx.AsyncClient) -> int:
    counts = (await client.get("/v1/overview")).json()["counts"]
    return sum(counts.get(state, 0) for state in ("queued", "init", "rollout", "evaluate"))


async def _pairs(
    server: Running, client: httpx.AsyncClient, ended: list[str] | None, count: int, seconds: float
) -> list[Spell]:
    """Return spells without and with viewers, in turn."""
    spells = []
    for number in range(count * 2):
        async with _viewers(server.url, VIEWERS if number % 2 else 0):
            await anyio.sleep(0.5)  # connections are made
            spells.append(await _spell(server, client, ended, seconds))
    return spells


async def _spell(server: Running, client: httpx.AsyncClient, ended: list[str] | None, seconds: float) -> Spell:
    """Return what a spell took; `ended`, if rollouts run, has those that end in it, of which one begins in it too."""
    if ended is not None:
        ended.clear()
    turns, cpu, begun = await _served(client), _cpu(server), time.perf_counter()
    await anyio.sleep(seconds)
    while ended is not None and len(ended) <= WORKERS:  # noqa: ASYNC110 - requests of other tasks end them
        await anyio.sleep(0.1)
    seconds, cpu = time.perf_counter() - begun, _cpu(server) - cpu
    turns = await _served(client) - turns
    times = [value for rollout_id in list(ended or ()) for value in await _turn_times(client, rollout_id, seconds)]
    return Spell(seconds, cpu, turns, times)


def _cpu(server: Running) -> float:
    times = server.process.cpu_times()
    return float(times.user + times.system)


async def _served(client: httpx.AsyncClient) -> int:
    (backend,) = (await client.get("/v1/backends")).json()
    return int(backend["served"])


async def _turn_times(client: httpx.AsyncClient, rollout_id: str, newest_seconds: float) -> list[float]:
    """Return the milliseconds of a rollout's turns that began within the last seconds."""
    answer = await client.get(f"/v1/rollouts/{rollout_id}/steps")
    steps = RolloutSteps.model_validate_json(answer.content).steps
    engine = [step for step in steps if step.kind is StepKind.ENGINE]
    tools = [step for step in steps if step.kind in (StepKind.TOOL, StepKind.SESSION)]
    times = []
    for one, following in pairwise(engine):
        if time.time() - one.started_at.timestamp() > newest_seconds + 1:
            continue
        between = (following.started_at - one.started_at).total_seconds()
        busy = sum(tool.seconds for tool in tools if one.started_at <= tool.started_at < following.started_at)
        times.append((between - busy) * 1e3)
    return times


async def _keep_busy(client: httpx.AsyncClient, name: str, ended: list[str]) -> None:
    number = 0
    while True:
        number += 1
        rollout_id = f"{name}-{number}"
        order = {"rollout_id": rollout_id, "task": {"environment": "echo", "instance": {"number": number}}}
        answer = await client.post("/v1/rollouts", params={"wait": 60}, json=order)
        answer.raise_for_status()
        ended.append(rollout_id)


@asynccontextmanager
async def _viewers(url: str, count: int) -> AsyncIterator[None]:
    """Have this many people look at the service within the block."""
    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(_view, url, number)
        yield
        tasks.cancel_scope.cancel()


async def _view(url: str, number: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(_ask, client, number)
        async with client.stream("GET", "/v1/overview/stream", headers={"Accept": "text/event-stream"}) as stream:
            async for _ in stream.aiter_raw():
                pass


async def _ask(client: httpx.AsyncClient, number: int) -> None:
    await anyio.sleep(ASK_SECONDS * number / VIEWERS)  # they did not open their pages at the same moment
    while True:
        (await client.get(ASKED, headers=SHARED)).raise_for_status()
        await anyio.sleep(ASK_SECONDS)


def _paired(spells: list[Spell]) -> list[tuple[Spell, Spell]]:
    return list(zip(spells[0::2], spells[1::2], strict=True))


def _figures(spells: list[Spell]) -> dict[str, float]:
    pairs = _paired(spells)
    plain = [spell for spell, _ in pairs]
    cost = sum(spell.cpu_seconds for spell in plain) / sum(spell.turns for spell in plain)
    cpu = [100 * (_beyond(viewed, cost) - _beyond(spell, cost)) for spell, viewed in pairs]
    turns = [statistics.median(viewed.turn_ms) - statistics.median(spell.turn_ms) for spell, viewed in pairs]
    return {
        "viewers_cpu_percent": round(statistics.mean(cpu), 2),
        "viewers_cpu_percent_error": round(_error(cpu), 2),
        "viewers_turn_ms_p50": round(statistics.mean(turns), 3),
        "viewers_turn_ms_p50_error": round(_error(turns), 3),
        "viewers_plain_cpu_percent": round(
            statistics.median(spell.cpu_seconds / spell.seconds * 100 for spell in plain), 2
        ),
        "viewers_plain_turn_ms_p50": round(statistics.median(value for spell in plain for value in spell.turn_ms), 3),
        "viewers_turns": float(sum(spell.turns for spell in spells)),
    }


def _beyond(spell: Spell, cost: float) -> float:
    """Return the CPU seconds a second that a spell took beyond those of its turns, each of which takes `cost`."""
    return (spell.cpu_seconds - cost * spell.turns) / spell.seconds


def _error(differences: list[float]) -> float:
    return float(statistics.stdev(differences) / len(differences) ** 0.5)
