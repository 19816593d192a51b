"""Real SGLang servers take weights over a process group; no rollout is lost with one, and cancelled requests end."""

import json
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.from_thread import start_blocking_portal

from api_schemas.inference import (
    BackendState,
    DistributedWeights,
    KvHandling,
    WeightsGroupRequest,
    WeightsRequest,
)
from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import GenerateRequest, SamplingOptions, new_request_id
from rollout_service.engines.errors import WeightsConflict
from rollout_service.engines.local_servers.cpu_server import DEFAULT_ENVIRONMENT, SGLangCpuServer
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.testing import write_random_checkpoint
from sandboxes.host.ports import free_port
from tests.support.waiting import collect, until

pytestmark = [
    pytest.mark.extended("rollout_service/engines/"),
    pytest.mark.anyio,
    pytest.mark.sglang,
    pytest.mark.xdist_group("sglang"),
    pytest.mark.timeout(480),
]

PYTHON = DEFAULT_ENVIRONMENT / "bin" / "python"
TRAINER = Path(__file__).parents[2] / "support" / "engines" / "broadcast_weights.py"
PROMPT = [11, 42, 7, 199, 23, 5, 310]
LONG = 400
OPTIONS = PoolOptions(slow_start=0.0, probe_interval=0.5, hold_seconds=60.0)


def request(budget=LONG, prompt=PROMPT, **sampling):
    return GenerateRequest(new_request_id(), prompt, SamplingOptions(max_new_tokens=budget, **sampling))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return [write_random_checkpoint(folder / str(seed), seed=seed) for seed in range(3)]


def serving(model: Path) -> Iterator[SGLangCpuServer]:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(SGLangCpuServer(model)) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def first(checkpoints: list[Path]) -> Iterator[SGLangCpuServer]:
    yield from serving(checkpoints[0])


@pytest.fixture
def second(checkpoints: list[Path]) -> Iterator[SGLangCpuServer]:
    yield from serving(checkpoints[0])


@asynccontextmanager
async def pooled(*servers: SGLangCpuServer):
    async with Pools(OPTIONS) as pools:
        for server in servers:
            await pools.register(server.url)
        yield pools["policy"]


def tensors_of(folder: Path) -> dict[str, list]:
    told = subprocess.run([PYTHON, TRAINER, "tensors", folder], capture_output=True, check=True, text=True)
    return json.loads(told.stdout)


@asynccontextmanager
async def trainer(port: int, size: int, *folders: Path):
    command = [str(PYTHON), str(TRAINER), str(port), str(size), "weights", *map(str, folders)]
    async with await anyio.open_process(command, stderr=None) as process:
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()


async def loaded_from_disk(pool, folder: Path, version: int) -> list[list[int]]:
    """Return the tokens that each backend samples greedily with the weights in a folder."""
    await pool.update_weights(str(folder), version)
    return [(await pool.generate(request(40, temperature=0.0))).output_ids for _ in range(2)]


async def test_weights_come_over_a_process_group_in_the_middle_of_requests(first, second, checkpoints):
    port = free_port()
    tensors = await anyio.to_thread.run_sync(tensors_of, checkpoints[1])
    weights = DistributedWeights(type="distributed", bucket_bytes=100_000, **tensors)
    group = WeightsGroupRequest(master_address="127.0.0.1", master_port=port, world_size=3, backend="gloo")
    results = []
    async with pooled(first, second) as pool:
        with pytest.raises(WeightsConflict, match="has no group 'weights'"):
            await pool.load_weights(WeightsRequest(source=weights, version=100))
        with pytest.raises(WeightsConflict, match=r"\[1, 1\] of the backends make 3"):
            await pool.controller.join_group(group.model_copy(update={"world_size": 4}))
        with pytest.raises(WeightsConflict, match="nothing listens"):
            await pool.controller.join_group(group.model_copy(update={"timeout_seconds": 0.3}))
        async with trainer(port, 3, checkpoints[1]) as process:
            joined = await pool.controller.join_group(group)
            assert [(each.ok, each.ranks) for each in joined.outcomes] == [(True, [1]), (True, [2])]
            async with anyio.create_task_group() as tasks:
                for _ in range(6):
                    tasks.start_soon(collect, results, lambda: pool.generate(request()))
                await until(lambda: sum(view.in_flight for view in pool.views()) == 6, 60)
                await process.stdin.send(b"go\n")
                outcome = await pool.load_weights(WeightsRequest(source=weights, version=100))
        assert [each.error for each in outcome.outcomes] == [None, None]
        assert (outcome.version, outcome.kv, outcome.held) == (100, KvHandling.FLUSHED, 6)
        assert sum(each.in_flight for each in outcome.outcomes) == 6
        for each in results:
            assert each.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
            assert each.versions == sorted(each.versions)
            assert set(each.versions) <= {0, 100}
        broadcast = [(await pool.generate(request(40, temperature=0.0))).output_ids for _ in range(2)]
        assert await loaded_from_disk(pool, checkpoints[1], 101) == broadcast
        assert await loaded_from_disk(pool, checkpoints[2], 102) != broadcast


async def test_no_request_is_lost_when_a_server_is_killed(first, second):
    results = []
    async with pooled(first, second) as pool:

        async def roll_out(name: str):
            ids = list(PROMPT)
            for _ in range(4):
                part = await pool.generate(request(120, ids), affinity=name)
                results.append(part)
                ids += [*part.output_ids, 17, 23]

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(roll_out, f"r{number}")
            await until(lambda: len(results) >= 2 and all(view.in_flight for view in pool.views()), 60)
            os.killpg(second.pid, signal.SIGKILL)
        assert len(results) == 32
        for each in results:
            assert len(each.output_ids) == len(each.logprobs) == len(each.versions)
            assert len(each.output_ids) == 120 or each.finish_reason is FinishReason.STOP
        states = {view.url: view.state for view in pool.views()}
        assert states == {first.url: BackendState.READY, second.url: BackendState.FAILED}


async def test_a_cancelled_request_ends_in_the_engine_within_a_second(first):
    async with pooled(first) as pool:
        seconds = [await _seconds_to_end(pool) for _ in range(3)]
    assert min(seconds) < 1.0, "on a busy machine one of them may take longer, and not all"


async def _seconds_to_end(pool):
    """Return the seconds from a long request's cancellation until its engine is idle; infinity if it ended first."""
    backend = pool._registry[pool.views()[0].backend_id].backend
    ended = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect, ended, lambda: pool.generate(request(4000 // 4, stop_token_ids=())))
        with anyio.fail_after(60):
            while not ended and not (await backend.load()).running:
                await anyio.sleep(0.005)
        if ended:
            return math.inf
        tasks.cancel_scope.cancel()
        started = time.perf_counter()
        with anyio.CancelScope(shield=True):
            while (await backend.load()).running:
                await anyio.sleep(0.005)
        return time.perf_counter() - started


async def test_an_engine_without_process_groups_says_so(checkpoints, tmp_path):
    from rollout_service.engines.kinds.embedded.process import EmbeddedEngine

    port = free_port()
    group = WeightsGroupRequest(
        master_address="127.0.0.1", master_port=port, world_size=2, backend="gloo", timeout_seconds=20
    )
    async with EmbeddedEngine(checkpoints[0]) as engine, pooled(engine) as pool:
        with socket.create_server(("127.0.0.1", port)):
            outcome = await pool.controller.join_group(group)
        assert "cannot take weights from a process group" in outcome.outcomes[0].error
        assert not outcome.outcomes[0].ok
