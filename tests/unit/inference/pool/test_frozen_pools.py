"""A frozen pool takes no weights, does not wait for those of others, and counts those that it gets all the same."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web
from pydantic import HttpUrl

from api_schemas.inference import (
    BackendSpec,
    BackendState,
    PauseRequest,
    ResumeRequest,
    WeightsRequest,
    is_frozen,
)
from rollout_service.engines.errors import PoolFrozen
from rollout_service.engines.pool.backend_handle import VersionWatch
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.engines.serving.policies import PolicyServing, backend_id_of_spec
from rollout_service.store.file_backends import FileBackends
from rollout_service.testing import Counting, ScriptedEngine
from tests.support.engines.pools import POLICY, request
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

OPTIONS = PoolOptions(hold_seconds=20.0, probe_interval=0.05, slow_start=0.0)


class Engine(ScriptedEngine):
    """Counts the weights that it is given; loading them waits for `may_load`."""

    def __init__(self) -> None:
        super().__init__(Counting(512), model_path=POLICY, vocab_size=512)
        self.loads = 0
        self.may_load = anyio.Event()
        self.may_load.set()

    async def _update(self, body: dict[str, Any]) -> web.Response:
        self.loads += 1
        await self.may_load.wait()
        return await super()._update(body)


@asynccontextmanager
async def serving(folder: Path, **engines: ScriptedEngine) -> AsyncIterator[tuple[PolicyServing, Pools]]:
    """Serve these engines, each in the pool of its name, with `_` for `-`."""
    async with AsyncExitStack() as stack:
        pools = await stack.enter_async_context(Pools(OPTIONS))
        served = PolicyServing(pools, FileBackends(folder / "backends.json", backend_id_of_spec))
        for name, engine in engines.items():
            await stack.enter_async_context(engine)
            await served.register(BackendSpec(url=HttpUrl(engine.url), pool=name.replace("_", "-")))
        yield served, pools


async def sample(pools: Pools, pool: str) -> list[int]:
    with anyio.fail_after(10):
        return (await pools[pool].generate(request(4))).versions


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("frozen", True),
        ("frozen-1", True),
        ("frozen-", True),
        ("policy", False),
        ("frozen1", False),
        ("Frozen-1", False),
        ("not-frozen-1", False),
    ],
)
def test_the_name_alone_says_whether_a_pool_is_frozen(name: str, frozen: bool) -> None:
    assert is_frozen(name) is frozen


@pytest.mark.parametrize("force", [False, True])
async def test_a_frozen_pool_refuses_weights_and_its_engine_never_hears_of_them(tmp_path: Path, force: bool) -> None:
    engine = Engine()
    async with serving(tmp_path, frozen_1=engine) as (served, pools):
        weights = WeightsRequest(path=str(POLICY), version=3, pool="frozen-1", force=force)
        with pytest.raises(PoolFrozen, match="'frozen-1' is frozen") as caught:
            await served.orders.update_weights(weights)
        assert (caught.value.status, caught.value.code) == (409, "pool_frozen")
        assert "register" in caught.value.hint
        assert engine.loads == 0
        assert not pools["frozen-1"].paused
        assert await sample(pools, "frozen-1") == [0] * 4


async def test_a_frozen_pool_that_has_no_engine_refuses_weights_too(tmp_path: Path) -> None:
    async with serving(tmp_path) as (served, _):
        with pytest.raises(PoolFrozen):
            await served.orders.update_weights(WeightsRequest(path="/weights", version=1, pool="frozen-9"))


async def test_a_frozen_pool_is_paused_resumed_and_drained_like_any_other(tmp_path: Path) -> None:
    async with serving(tmp_path, frozen_1=Engine()) as (served, pools):
        (outcome,) = (await served.orders.pause(PauseRequest(pool="frozen-1"))).outcomes
        assert outcome.ok
        assert pools["frozen-1"].paused
        await served.orders.resume(ResumeRequest(pool="frozen-1"))
        assert await sample(pools, "frozen-1") == [0] * 4
        (view,) = served.views()
        assert (await served.drain(view.backend_id)).state is BackendState.DRAINING


async def test_weights_of_the_policy_do_not_hold_up_a_frozen_pool(tmp_path: Path) -> None:
    policy, frozen = Engine(), Engine()
    policy.may_load = anyio.Event()
    async with serving(tmp_path, policy=policy, frozen_1=frozen) as (served, pools):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(served.orders.update_weights, WeightsRequest(path=str(POLICY), version=7))
            await until(lambda: policy.loads, 10)
            assert pools["policy"].paused
            assert await sample(pools, "frozen-1") == [0] * 4
            policy.may_load.set()
        assert await sample(pools, "policy") == [7] * 4
        assert await sample(pools, "frozen-1") == [0] * 4
        assert (policy.loads, frozen.loads) == (1, 0)
        assert served.frozen_version_changes() == {"frozen-1": 0}


async def test_weights_that_somebody_gives_to_a_frozen_engine_are_counted(tmp_path: Path) -> None:
    policy, frozen = Engine(), Engine()
    async with serving(tmp_path, policy=policy, frozen_1=frozen) as (served, pools):
        assert await sample(pools, "frozen-1") == [0] * 4
        for version in (4, 4, 5):
            await frozen._update({"model_path": str(POLICY), "weight_version": str(version)})
            assert await sample(pools, "frozen-1") == [version] * 4
        await served.orders.update_weights(WeightsRequest(path=str(POLICY), version=9))
        assert await sample(pools, "policy") == [9] * 4
        assert served.frozen_version_changes() == {"frozen-1": 2}


def test_an_engine_is_compared_with_itself_and_a_new_one_with_the_pool() -> None:
    watch = VersionWatch("frozen-1")
    for backend_id, version, changes in [
        ("a", 0, 0),
        ("b", 1, 1),  # the pool serves two policies now
        ("a", 0, 1),
        ("b", 1, 1),
        ("a", 1, 2),
        ("c", 1, 2),
    ]:
        watch.saw(backend_id, version)
        assert watch.changes == changes, backend_id
