"""Every backend is remembered in full, however many are registered at once."""

from pathlib import Path

import anyio
import pytest
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.serving.policies import PolicyServing, backend_id_of_spec
from rollout_service.engines.shipped import policy_folder
from rollout_service.store.engines_contract import SharedBackend
from rollout_service.store.file_backends import FileBackends
from rollout_service.testing import Counting, ScriptedEngine

pytestmark = pytest.mark.anyio

POLICY = policy_folder("calc-tuned")


async def test_saving_at_once_leaves_a_whole_file_and_no_draft(tmp_path: Path) -> None:
    backends = FileBackends(tmp_path / "backends.json", backend_id_of_spec)
    specs = [BackendSpec(url=HttpUrl(f"http://127.0.0.1:{port}")) for port in range(9000, 9020)]
    async with anyio.create_task_group() as tasks:
        for spec in specs:
            tasks.start_soon(backends.put, SharedBackend(backend_id_of_spec(spec), spec))
    again = FileBackends(tmp_path / "backends.json", backend_id_of_spec)
    assert [each.spec for each in await again.backends()] == specs
    assert [path.name async for path in anyio.Path(tmp_path).iterdir()] == ["backends.json"]


async def test_engines_that_are_waited_for_are_cleared_too(tmp_path: Path) -> None:
    gone = BackendSpec(url=HttpUrl("http://127.0.0.1:9"))
    remembered = tmp_path / "backends.json"
    remembered.write_text(f"[{gone.model_dump_json()}]")
    with anyio.fail_after(30):
        async with Pools() as pools:
            backends = FileBackends(remembered, backend_id_of_spec)
            serving = PolicyServing(pools, backends)
            async with serving.reconnecting([]):
                while "not tried yet" in serving.waiting.values():
                    await anyio.sleep(0.01)
                assert await serving.clear("judge") == 0
                assert await serving.clear("policy") == 1
                assert serving.waiting == {}
                assert await backends.backends() == []
                assert await serving.clear("policy") == 0


async def test_an_engine_that_is_both_remembered_and_in_the_settings_is_registered_once(
    tmp_path: Path,
) -> None:
    async with ScriptedEngine(Counting(512), model_path=POLICY, vocab_size=512) as engine, Pools() as pools:
        spec = BackendSpec(url=HttpUrl(engine.url))
        backends = FileBackends(tmp_path / "backends.json", backend_id_of_spec)
        await backends.put(SharedBackend(backend_id_of_spec(spec), spec))
        serving = PolicyServing(pools, backends)
        async with serving.reconnecting([spec]):
            with anyio.fail_after(30):
                while not serving.views():
                    await anyio.sleep(0.01)
            assert len(await backends.backends()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("pauses", range(0, 60, 4))
async def test_an_engine_that_is_cleared_while_it_is_registered_is_gone(tmp_path: Path, pauses: int) -> None:
    async with ScriptedEngine(Counting(512), model_path=POLICY, vocab_size=512) as engine, Pools() as pools:
        serving = PolicyServing(pools, FileBackends(tmp_path / "backends.json", backend_id_of_spec))
        spec = BackendSpec(url=HttpUrl(engine.url))
        async with serving.reconnecting([spec]):
            for _ in range(pauses):
                await anyio.sleep(0.002)
            assert await serving.clear("policy") == 1
            assert serving.views() == []
            await serving.register(spec)
            assert [view.pool for view in serving.views()] == ["policy"]
