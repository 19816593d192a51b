"""What saving turns adds to a turn between two whole services, of which one saves them and the other does not.

The two services share one core, and take turns: while one has an answer to work on, the other waits for its own. So the
noise of the machine reaches both alike, and the median difference of pairs of turns shows tens of microseconds. Between
two turns is a rest, which is long enough to save the turn before: with a real engine, a turn takes longer.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from aiohttp import web
from common import HERE, Figures, Server, service
from engine import MODEL, PROMPT, PROMPTS, OneTurn, TimedConnection, TimedServer

from api_schemas.rollouts import RolloutRequest
from api_schemas.tasks import Limits, Task
from rollout_service.testing.sglang_engine import ScriptedEngine

TURNS = 100
"""The turns of a rollout; its prompts grow with them."""
WARM_PAIRS = 40
"""The pairs that are left out while the services start the sandboxes of their first rollouts."""
REST_SECONDS = 0.04
"""The rest before each turn: a turn is saved some 20 ms after it was made."""
ANSWER_SECONDS = 60.0


class HeldEngine(ScriptedEngine):
    """Holds each answer back until it is released, and measures the time from the answer to the next request."""

    def __init__(self) -> None:
        super().__init__(OneTurn(), model_path=MODEL)
        self.is_holding = False
        """Whether answers are held back yet: a service first checks its engine."""
        self._asked = anyio.Event()
        self._released = anyio.Event()
        self._arrived = self._answered = 0.0
        self._length = 0
        self._turns_of_rollout = 0

    async def turn(self) -> float | None:
        """Release an answer; return after how many seconds the next request came, None if it is not of interest.

        It is not after the first answer of a rollout, which starts a shell, nor after its last one.
        """
        number = self._turns_of_rollout
        self._asked = anyio.Event()
        self._released.set()
        await self.until_asked()
        return self._arrived - self._answered if self._turns_of_rollout > number > 1 else None

    async def until_asked(self) -> None:
        with anyio.fail_after(ANSWER_SECONDS):
            await self._asked.wait()

    def _server(self) -> web.Server:
        return TimedServer(self._handle, handler_cancellation=True)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        connection = request.protocol
        arrived = connection.arrived if isinstance(connection, TimedConnection) else time.monotonic()
        response = await super()._handle(request)
        if request.path == "/generate" and self.is_holding:
            await self._hold(arrived)
            await response.prepare(request)
            await response.write_eof()
            self._answered = time.monotonic()
        return response

    async def _hold(self, arrived: float) -> None:
        length = PROMPTS.unpack(PROMPT.get())[0]
        self._turns_of_rollout = self._turns_of_rollout + 1 if length > self._length else 1
        self._arrived, self._length = arrived, length
        self._released = anyio.Event()
        self._asked.set()
        await self._released.wait()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Turns of two services, one of which saves them."""

    differences: Sequence[float]
    """By how many milliseconds each turn took longer when turns are saved."""
    with_ms: Sequence[float]
    without_ms: Sequence[float]
    added_cpu_ms: float
    """The CPU time of the service that saving adds to a turn, in the background too."""

    def figures(self, store: str) -> Figures:
        """Return the medians; the true median lies between `low` and `high` with a probability of 95 %."""
        low, high = interval(self.differences)
        return {
            f"added_ms_per_turn_{store}": statistics.median(self.differences),
            f"added_ms_per_turn_{store}_low": low,
            f"added_ms_per_turn_{store}_high": high,
            f"turn_ms_with_{store}": statistics.median(self.with_ms),
            f"turn_ms_without_{store}": statistics.median(self.without_ms),
            f"added_cpu_ms_per_turn_{store}": self.added_cpu_ms,
            f"pairs_{store}": len(self.differences),
        }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return bounds of the median with a confidence of 95 %, from the ranks alone."""
    ordered, count = sorted(values), len(values)
    half = 0.98 * count**0.5
    return ordered[max(0, int(count / 2 - half))], ordered[min(count - 1, int(count / 2 + half))]


async def compare_services(folder: Path, pairs: int, *, redis_url: str | None = None) -> Comparison:
    """Let two services take turns until there are this many pairs; without a Redis, each has a SQLite file."""
    async with AsyncExitStack() as stack:
        saving, plain = [await stack.enter_async_context(HeldEngine()) for _ in range(2)]
        async with _on_one_core():
            servers = [
                await stack.enter_async_context(_service(folder, engine, pairs, redis_url, resume=engine is saving))
                for engine in (saving, plain)
            ]
        await _alternate(saving, plain, WARM_PAIRS)
        before = [server.cpu_seconds for server in servers]
        found, turns = await _alternate(saving, plain, pairs)
        used = [server.cpu_seconds - then for server, then in zip(servers, before, strict=True)]
    return Comparison(
        differences=[(one - other) * 1e3 for one, other in found],
        with_ms=[one * 1e3 for one, _ in found],
        without_ms=[other * 1e3 for _, other in found],
        added_cpu_ms=(used[0] - used[1]) / turns * 1e3,
    )


@asynccontextmanager
async def _on_one_core() -> AsyncIterator[None]:
    """Start processes on one core within the block; this process stays off it afterwards.

    If this user may, they and this process go before what else runs on the machine.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-1:])
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores[:-1] or cores)


@asynccontextmanager
async def _service(
    folder: Path, engine: HeldEngine, pairs: int, redis_url: str | None, *, resume: bool
) -> AsyncIterator[Server]:
    """Run a service with more work than it is to do, one rollout at a time."""
    name = "saving" if resume else "plain"
    settings = f"resume = {str(resume).lower()}\ndrain_seconds = 0\n"
    if redis_url is not None:
        settings += f'[store]\nurl = "{redis_url}"\nprefix = "{name}"\n'
    state = folder / f"{name}-{'redis' if redis_url else 'sqlite'}"
    state.mkdir()
    environment = HERE / "environments" / "echo"
    async with service(state, engine.url, workers=1, environment=environment, pipeline=settings) as server:
        engine.is_holding = True
        limits = Limits(max_turns=TURNS, agent_seconds=3_600, rollout_seconds=7_200)
        for number in range(2 + (WARM_PAIRS + pairs) // (TURNS - 3)):
            task = Task(environment="echo", instance={"number": number})
            await server.client.submit(RolloutRequest(rollout_id=f"r-{number}", task=task, limits=limits))
        yield server


async def _alternate(saving: HeldEngine, plain: HeldEngine, pairs: int) -> tuple[list[tuple[float, float]], int]:
    """Let the two take turns, in random order; return the pairs of times in seconds, and the turns of each."""
    found: list[tuple[float, float]] = []
    turns = 0
    for engine in (saving, plain):
        await engine.until_asked()
    while len(found) < pairs:
        took: dict[HeldEngine, float | None] = {}
        for engine in random.sample((saving, plain), 2):
            await anyio.sleep(REST_SECONDS)
            took[engine] = await engine.turn()
        turns += 1
        one, other = took[saving], took[plain]
        if one is not None and other is not None:
            found.append((one, other))
    return found, turns
