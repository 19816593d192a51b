"""Every backend is remembered in full, however many are registered at once."""

from pathlib import Path
from threading import Event

import anyio
import pytest
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from rollout_service.base.errors import ConfigurationError, StoreError
from rollout_service.engines.errors import UnknownBackend
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.serving import awaited_backends
from rollout_service.engines.serving.awaited_backends import AwaitedBackends
from rollout_service.engines.serving.policies import PolicyServing, backend_id_of_spec
from rollout_service.store.engines_contract import SharedBackend
from rollout_service.store.file_backends import FileBackends
from rollout_service.testing import Counting, ScriptedEngine
from rollout_service.tokens import ChatRenderer
from tests.support.engines.pools import POLICY, policy_engine
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_saving_at_once_leaves_a_whole_file_and_no_draft(tmp_path: Path) -> None:
    backends = FileBackends(tmp_path / "backends.json", backend_id_of_spec)
    specs = [BackendSpec(url=HttpUrl(f"http://127.0.0.1:{port}")) for port in range(9000, 9020)]
    async with anyio.create_task_group() as tasks:
        for spec in specs:
            tasks.start_soon(backends.put, SharedBackend(backend_id_of_spec(spec), spec))
    again = FileBackends(tmp_path / "backends.json", backend_id_of_spec)
    assert [each.spec for each in await again.backends()] == specs
    assert [path.name async for path in anyio.Path(tmp_path).iterdir()] == ["backends.json"]


@pytest.mark.parametrize("text", ['[{"url": "http://127.0.0.1:9", "later": 1}]', "[{"])
async def test_a_file_of_another_release_is_named(tmp_path: Path, text: str) -> None:
    remembered = tmp_path / "backends.json"
    remembered.write_text(text)
    with pytest.raises(ConfigurationError, match=r"in \S+/backends.json cannot be read: ") as caught:
        await FileBackends(remembered, backend_id_of_spec).backends()
    assert "pydantic" not in str(caught.value)
    assert remembered.read_text() == text


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
    async with policy_engine() as engine, Pools() as pools:
        spec = BackendSpec(url=HttpUrl(engine.url))
        backends = FileBackends(tmp_path / "backends.json", backend_id_of_spec)
        await backends.put(SharedBackend(backend_id_of_spec(spec), spec))
        serving = PolicyServing(pools, backends)
        async with serving.reconnecting([spec]):
            await until(serving.views, 30)
            assert len(await backends.backends()) == 1


async def test_an_engine_that_cannot_be_recorded_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited_backends, "RECONNECT_SECONDS", 0)
    spec = BackendSpec(url=HttpUrl("http://127.0.0.1:9"))
    awaited = AwaitedBackends()
    reasons = []

    async def register() -> None:
        reasons.append(awaited.reasons["it"])
        if len(reasons) < 3:
            raise StoreError("the Redis is full")
        awaited.forget("it")

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            awaited.begin(tasks, "it", spec, register)
    assert reasons == ["not tried yet", "the Redis is full", "the Redis is full"]


async def test_a_removal_that_is_not_recorded_keeps_no_engine_from_being_tried_again() -> None:
    awaited, spec, tried = AwaitedBackends(), BackendSpec(url=HttpUrl("http://127.0.0.1:9")), []

    async def register() -> None:
        tried.append(spec)
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        for count in (1, 2):
            awaited.begin(tasks, "it", spec, register)
            await anyio.wait_all_tasks_blocked()
            assert len(tried) == count
            assert await awaited.end("it")


@pytest.mark.slow
@pytest.mark.parametrize("pauses", range(0, 60, 4))
async def test_an_engine_that_is_cleared_while_it_is_registered_is_gone(tmp_path: Path, pauses: int) -> None:
    async with policy_engine() as engine, Pools() as pools:
        serving = PolicyServing(pools, FileBackends(tmp_path / "backends.json", backend_id_of_spec))
        spec = BackendSpec(url=HttpUrl(engine.url))
        async with serving.reconnecting([spec]):
            for _ in range(pauses):
                await anyio.sleep(0.002)
            assert await serving.clear("policy") == 1
            assert serving.views() == []
            await serving.register(spec)
            assert [view.pool for view in serving.views()] == ["policy"]


async def test_an_engine_gets_no_request_before_its_tokenizer_is_loaded(tmp_path: Path, monkeypatch) -> None:
    is_loading, is_over = Event(), Event()

    def load(*_: object) -> None:
        is_loading.set()
        assert is_over.wait(30)
        raise ValueError("no tokenizer")

    async with policy_engine() as one, policy_engine() as other, Pools() as pools:
        serving = PolicyServing(pools, FileBackends(tmp_path / "backends.json", backend_id_of_spec))
        first = await serving.register(BackendSpec(url=HttpUrl(one.url)))
        monkeypatch.setattr(ChatRenderer, "load", load)

        async def refused() -> None:
            with pytest.raises(ValueError, match="no tokenizer"):
                await serving.register(BackendSpec(url=HttpUrl(other.url)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refused)
            await until(is_loading.is_set)
            seen = [view.backend_id for view in serving.views()]
            is_over.set()
        assert seen == [first.backend_id]


# ---- leases


def leased(engine: ScriptedEngine, pool: str = "trained", seconds: float = 1.0) -> BackendSpec:
    return BackendSpec(url=HttpUrl(engine.url), pool=pool, lease_seconds=seconds)


async def gone(serving: PolicyServing, count: int) -> None:
    await until(lambda: len(serving.views()) == count, 30)


async def test_engines_go_with_their_lease_and_the_last_one_abandons_its_pool(tmp_path: Path) -> None:
    abandoned: list[str] = []

    async def abandon(pool: str) -> int:
        abandoned.append(pool)
        return 3

    async with (
        policy_engine() as one,
        policy_engine() as other,
        Pools() as pools,
    ):
        backends = FileBackends(tmp_path / "backends.json", backend_id_of_spec)
        announced: list[tuple[str, str, object]] = []
        serving = PolicyServing(
            pools,
            backends,
            announce=lambda kind, subject, data: announced.append((kind, subject, data)),
            on_abandoned=abandon,
        )
        async with serving.reconnecting([]):
            await serving.register(leased(one))
            kept = await serving.register(leased(other, seconds=86_400))
            unleased = await serving.register(leased(one, "policy").model_copy(update={"lease_seconds": None}))
            await gone(serving, 2)
            assert abandoned == [], "the pool has another engine"
            await serving.register(leased(other))
            with anyio.fail_after(30):
                while not announced or announced[-1][0] != "pool.abandoned":
                    await anyio.sleep(0.01)
            assert [view.backend_id for view in serving.views()] == [unleased.backend_id]
            assert [each.backend_id for each in await backends.backends()] == [unleased.backend_id]
            assert abandoned == ["trained"]
            assert ("pool.abandoned", "trained", {"rollouts": 3}) in announced
            with pytest.raises(UnknownBackend, match="is registered"):
                await serving.renew(kept.backend_id)


async def test_a_lease_that_is_renewed_while_another_ends_does_not_end(tmp_path: Path) -> None:
    class Slow(FileBackends):
        async def remove(self, backend_id: str) -> bool:
            if backend_id == first.backend_id:
                await anyio.sleep(1.0)  # meanwhile the second lease would have run out
                await serving.renew(second.backend_id)
            return await super().remove(backend_id)

    async with policy_engine() as one, policy_engine() as other, Pools() as pools:
        serving = PolicyServing(pools, Slow(tmp_path / "backends.json", backend_id_of_spec))
        async with serving.reconnecting([]):
            first = await serving.register(leased(one))
            second = await serving.register(leased(other, seconds=1.5))
            await gone(serving, 1)
            await anyio.wait_all_tasks_blocked()
            assert [view.backend_id for view in serving.views()] == [second.backend_id]


async def test_a_renewed_lease_begins_again_and_so_does_one_after_a_restart(tmp_path: Path) -> None:
    async with policy_engine() as engine:
        for _ in range(2):  # the second finds the engine in the file
            async with Pools() as pools:
                serving = PolicyServing(pools, FileBackends(tmp_path / "backends.json", backend_id_of_spec))
                async with serving.reconnecting([]):
                    if not (tmp_path / "backends.json").exists():
                        await serving.register(leased(engine, seconds=2))
                    await gone(serving, 1)
                    started = anyio.current_time()
                    await serving.renew(serving.views()[0].backend_id)
                    if (tmp_path / "restarted").exists():
                        await gone(serving, 0)
                        assert anyio.current_time() - started > 1.9
                    (tmp_path / "restarted").touch()


async def test_the_context_of_a_pool_is_the_shortest_of_its_engines(tmp_path: Path) -> None:
    def engine(context_length: int) -> ScriptedEngine:
        return ScriptedEngine(Counting(512), model_path=POLICY, vocab_size=512, context_length=context_length)

    async with engine(100) as short, engine(200) as long, Pools() as pools:
        serving = PolicyServing(pools, FileBackends(tmp_path / "backends.json", backend_id_of_spec))
        first, _ = [await serving.register(BackendSpec(url=HttpUrl(each.url))) for each in (short, long)]
        assert serving.connect("policy")[0].context_length == 100
        await serving.remove(first.backend_id)
        assert serving.connect("policy")[0].context_length == 200
