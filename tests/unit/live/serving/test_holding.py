"""A request of a session waits for a paused pool as long as it may, and no longer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import pytest
from prometheus_client import CollectorRegistry

from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.contract import GenerateRequest, Generation, TokenChunk, new_request_id
from rollout_service.engines.errors import BackendRejected, NoBackendError
from rollout_service.live.metrics import LiveMetrics
from rollout_service.live.register import PoolHeldError
from rollout_service.live.serving.engines import HeldPool
from rollout_service.testing.gateway import ManualPool

REQUEST = GenerateRequest(new_request_id(), [1])


class PausedPool(ManualPool):
    paused = False
    in_service = True


@dataclass
class Waiting:
    pool: PausedPool
    held: HeldPool
    signal: ChangeSignal
    registry: CollectorRegistry
    chunks: list[TokenChunk] = field(default_factory=list)
    ended: list[Generation | Exception] = field(default_factory=list)

    def change(self, *, paused: bool) -> None:
        self.pool.paused = paused
        self.signal.notify()

    async def generate(self) -> None:
        try:
            self.ended.append(await self.held.generate(REQUEST, affinity="a", on_tokens=self.chunks.append))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.ended.append(error)

    def count(self, outcome: str) -> float:
        labels = {"pool": "p", "outcome": outcome}
        return self.registry.get_sample_value("rollout_live_held_seconds_count", labels) or 0.0


@asynccontextmanager
async def waiting(seconds: float) -> AsyncIterator[Waiting]:
    pool, signal, registry = PausedPool(), ChangeSignal(), CollectorRegistry()
    held = HeldPool("p", pool, lambda: signal.next, seconds, LiveMetrics(registry))
    bench = Waiting(pool, held, signal, registry)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.generate)
            await anyio.wait_all_tasks_blocked()
            yield bench


async def test_a_request_that_nothing_holds_passes_through():
    async with waiting(0.05) as bench:
        await anyio.sleep(0.1)
        bench.pool.calls[0].finish("hi")
    [generation] = bench.ended
    assert isinstance(generation, Generation)
    assert [chunk.ids for chunk in bench.chunks] == [[104, 105]]
    assert bench.count("served") == bench.count("refused") == 0


async def test_a_pause_that_is_too_long_aborts_the_request():
    async with waiting(0.05) as bench:
        bench.change(paused=True)
    [error] = bench.ended
    assert isinstance(error, PoolHeldError)
    assert error.retry_after >= 1
    assert bench.pool.calls[0].cancelled
    assert bench.count("refused") == 1


async def test_short_pauses_are_waited_for_and_do_not_add_up():
    async with waiting(0.3) as bench:
        for _ in range(3):
            bench.change(paused=True)
            await anyio.sleep(0.15)
            bench.change(paused=False)
            await anyio.lowlevel.checkpoint()
        bench.pool.calls[0].finish("hi")
    assert isinstance(bench.ended[0], Generation)
    assert bench.count("served") == 1


async def test_tokens_that_still_come_are_no_pause():
    async with waiting(0.2) as bench:
        bench.change(paused=True)
        for _ in range(4):
            await anyio.sleep(0.1)
            bench.pool.calls[0].say("a")
            bench.signal.notify()
        bench.pool.calls[0].finish()
    assert isinstance(bench.ended[0], Generation)


@pytest.mark.parametrize(
    ("error", "kind"), [(NoBackendError("none"), PoolHeldError), (BackendRejected("no"), BackendRejected)]
)
async def test_a_pool_without_engines_is_told_as_one_to_wait_for(error, kind):
    async with waiting(5) as bench:
        bench.pool.calls[0].fail(error)
    assert type(bench.ended[0]) is kind
