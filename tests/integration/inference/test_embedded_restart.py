"""The embedded engine is restarted when it ends, and has the pool's weights before it serves."""

import os
import signal

import anyio
import httpx
import pytest

from api_schemas.inference import BackendState
from rollout_service.engines.kinds.embedded.process import EmbeddedEngine
from rollout_service.engines.local_servers.process import kept_running
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.engines.shipped import policy_folder

pytestmark = pytest.mark.anyio

MODEL = policy_folder("calc-tuned")


async def test_a_killed_engine_comes_back_with_the_pools_weights() -> None:
    made: list[EmbeddedEngine] = []

    def make(port: int) -> EmbeddedEngine:
        made.append(EmbeddedEngine(MODEL, port=port))
        return made[-1]

    options = PoolOptions(probe_interval=0.1, slow_start=0.0)
    async with kept_running(make) as url, Pools(options) as pools, httpx.AsyncClient(base_url=url) as http:
        await pools.register(url)
        assert (await pools["policy"].update_weights(str(MODEL), 7)).changed
        for kills in range(2):
            os.kill(made[-1].pid, signal.SIGKILL)
            with anyio.fail_after(60):
                while len(made) == kills + 1 or pools.views()[0].state is not BackendState.READY:
                    await anyio.sleep(0.05)
            (view,) = pools.views()
            assert (view.url, view.weight_version) == (url, 7)
            assert (await http.get("/model_info")).json()["weight_version"] == "7"
        last = made[-1].pid
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)
