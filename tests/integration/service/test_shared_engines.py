"""Services that share engines tell each engine once, whichever of them is asked, and whichever dies."""

import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
from aiohttp import web
from pydantic import HttpUrl

from api_schemas.inference import (
    BackendSpec,
    BackendState,
    PauseMode,
    PauseRequest,
    ResumeRequest,
    WeightsRequest,
)
from rollout_service.base.errors import StoreError
from rollout_service.cluster.identity import ServiceIdentity
from rollout_service.cluster.pool_commands import SharedCommands
from rollout_service.engines.contract import GenerateRequest, SamplingOptions, new_request_id
from rollout_service.engines.errors import (
    WeightsConflict,
    WeightsPartlyLoaded,
)
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.engines.serving import awaited_backends
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.engines.shipped import policy_folder
from rollout_service.store.cluster_contract import NodeReport
from rollout_service.store.redis import RedisConfig, RedisConnection
from rollout_service.store.redis.store import RedisCluster, RedisEngines
from rollout_service.testing import Counting, ScriptedEngine
from tests.support.processes.service import Running, service
from tests.support.redis_server import RedisServer, redis_server
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.redis]

POLICY = policy_folder("calc-tuned")
OPTIONS = PoolOptions(probe_interval=0.1, hold_seconds=30)


class CountingEngine(ScriptedEngine):
    """Counts the commands that it is given; an update waits for `may_update`."""

    def __init__(self) -> None:
        super().__init__(Counting(512), model_path=POLICY, vocab_size=512)
        self.commands: Counter[str] = Counter()
        self.may_update = anyio.Event()
        self.may_update.set()
        self.refuses = False
        for path in ("/pause_generation", "/continue_generation", "/update_weights_from_disk"):
            self._routes[path] = self._counted(path, self._routes[path])

    def _counted(self, path: str, route: Any) -> Any:
        async def counted(body: dict[str, Any]) -> web.Response:
            self.commands[path] += 1
            if path == "/update_weights_from_disk":
                await self.may_update.wait()
                if self.refuses:
                    return web.json_response({"success": False, "message": "no such folder"}, status=400)
            answer: web.Response = await route(body)
            return answer

        return counted

    @property
    def updates(self) -> int:
        return self.commands["/update_weights_from_disk"]


@dataclass
class Member:
    """A service, as far as its engines are concerned."""

    name: str
    pools: Pools
    serving: PolicyServing
    commands: SharedCommands
    cluster: RedisCluster
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def serves(self, count: int, state: BackendState | None = None) -> None:
        """Wait until it has this many backends."""
        with anyio.fail_after(20):
            while True:
                views = [view for view in self.serving.views() if state in (None, view.state)]
                if len(views) == count:
                    return
                await anyio.sleep(0.02)

    def versions(self) -> list[int]:
        return [view.weight_version for view in self.serving.views()]


@asynccontextmanager
async def member(config: RedisConfig, name: str) -> AsyncIterator[Member]:
    async with AsyncExitStack() as stack:
        connection = await RedisConnection.open(config)
        stack.push_async_callback(connection.close)
        cluster, engines = RedisCluster(connection), RedisEngines(connection)
        await cluster.join(NodeReport(name, f"owner-{name}", places=1))
        stack.push_async_callback(cluster.leave, f"owner-{name}")
        commands = SharedCommands(engines, cluster, f"owner-{name}")
        pools = await stack.enter_async_context(Pools(OPTIONS, exclusive=commands.exclusive))
        commands.attach(pools)
        await stack.enter_async_context(commands.running())
        serving = PolicyServing(pools, engines, commands)
        await stack.enter_async_context(serving.reconnecting([]))
        yield Member(name, pools, serving, commands, cluster)


@pytest.fixture
async def engines() -> AsyncIterator[list[CountingEngine]]:
    async with CountingEngine() as one, CountingEngine() as other:
        yield [one, other]


@pytest.fixture
async def members(shared_redis: RedisServer, engines: list[CountingEngine]) -> AsyncIterator[list[Member]]:
    """Run three services that all have both engines, registered at different ones."""
    config = shared_redis.config()
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(member(config, f"n{i}")) for i in range(3)]
        for each, engine in zip(found, engines, strict=False):
            await each.serving.register(BackendSpec(url=HttpUrl(engine.url)))
        for each in found:
            await each.serves(2, BackendState.READY)
        for engine in engines:
            engine.commands.clear()
        yield found


def weights(version: int) -> WeightsRequest:
    return WeightsRequest(path="/weights", version=version)


def request(tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(new_request_id(), [1, 2, 3], SamplingOptions(max_new_tokens=tokens))


async def test_backends_are_served_everywhere_and_removed_everywhere(
    members: list[Member], engines: list[CountingEngine]
) -> None:
    first = members[2].serving.views()[0].backend_id
    await members[2].serving.drain(first)
    for each in members:
        await each.serves(1, BackendState.DRAINING)
    await members[1].serving.remove(first)
    for each in members:
        await each.serves(1)
    assert await members[0].serving.clear("policy") == 1
    for each in members:
        await each.serves(0)


async def test_an_engine_that_did_not_answer_a_node_is_tried_again(
    shared_redis: RedisServer, engines: list[CountingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaited_backends, "RECONNECT_SECONDS", 0.05)
    config, answer = shared_redis.config(), engines[0]._routes["/model_info"]

    async def refuse(_: dict[str, Any]) -> web.Response:
        return web.json_response({}, status=503)

    async with member(config, "n1") as first:
        await first.serving.register(BackendSpec(url=HttpUrl(engines[0].url)))
        engines[0]._routes["/model_info"] = refuse
        async with member(config, "n2") as second:
            await until(lambda: set(second.serving._awaited.reasons.values()) - {"not tried yet"}, 20)
            engines[0]._routes["/model_info"] = answer
            await second.serves(1, BackendState.READY)


async def test_an_engine_that_redis_could_not_record_serves_nowhere_until_it_is_registered_again(
    engines: list[CountingEngine],
) -> None:
    spec = BackendSpec(url=HttpUrl(engines[0].url))
    with redis_server() as redis:
        async with member(redis.config("one"), "n1") as one, member(redis.config("one"), "n2") as other:
            redis.do("CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(StoreError, match="maxmemory"):
                await one.serving.register(spec)
            assert one.serving.views() == []
            redis.do("CONFIG", "SET", "maxmemory", "0")
            await one.serving.register(spec)
            await other.serves(1, BackendState.READY)


async def test_an_update_from_any_node_reaches_each_engine_once(
    members: list[Member], engines: list[CountingEngine]
) -> None:
    for version, each in enumerate(members, 1):
        outcome = await each.serving.orders.update_weights(weights(version))
        assert (outcome.version, outcome.changed, outcome.nodes_not_held) == (version, True, [])
        assert [one.ok for one in outcome.outcomes] == [True, True]
        assert [engine.updates for engine in engines] == [version, version]
        for other in members:
            await until(lambda other=other, version=version: other.versions() == [version, version], 5)
    again = await members[0].serving.orders.update_weights(weights(3))
    assert not again.changed
    assert [engine.updates for engine in engines] == [3, 3]
    assert [engine.commands["/pause_generation"] for engine in engines] == [3, 3]
    with pytest.raises(WeightsConflict, match="older") as caught:
        await members[1].serving.orders.update_weights(weights(2))
    assert caught.value.context == {"version": 3}


async def test_requests_of_every_node_are_held_by_a_pause_at_any_node(
    members: list[Member], engines: list[CountingEngine]
) -> None:
    await members[1].serving.orders.pause(PauseRequest(mode=PauseMode.ABORT))
    assert [engine.commands["/pause_generation"] for engine in engines] == [1, 1]
    sent = [engine.requests for engine in engines]
    ended = 0

    async def generate(each: Member) -> None:
        nonlocal ended
        await each.pools["policy"].generate(request())
        ended += 1

    async with anyio.create_task_group() as tasks:
        for each in members:
            tasks.start_soon(generate, each)
        await until(lambda: all(each.pools["policy"].paused for each in members), 5)
        await anyio.wait_all_tasks_blocked()
        assert (ended, [engine.requests for engine in engines]) == (0, sent)
        await members[2].serving.orders.resume(ResumeRequest())
    assert ended == 3
    assert [engine.commands["/continue_generation"] for engine in engines] == [1, 1]


async def test_a_service_that_joins_during_a_pause_holds_its_requests_too(
    shared_redis: RedisServer, engines: list[CountingEngine]
) -> None:
    config = shared_redis.config()
    async with member(config, "n1") as first:
        await first.serving.register(BackendSpec(url=HttpUrl(engines[0].url)))
        await first.serving.orders.update_weights(weights(5))
        await first.serving.orders.pause(PauseRequest())
        async with member(config, "n2") as second:
            await second.serving.register(BackendSpec(url=HttpUrl(engines[1].url)))
            assert second.pools["policy"].paused
            assert engines[1].updates == 1  # it joined with the pool's weights
            await second.serving.orders.resume(ResumeRequest())
            await second.serves(2, BackendState.READY)
            await first.serves(2, BackendState.READY)
            assert first.versions() == [5, 5]
            assert [engine.updates for engine in engines] == [1, 1]


async def test_a_failure_at_one_engine_is_reported_and_takes_it_out_everywhere(
    members: list[Member], engines: list[CountingEngine]
) -> None:
    engines[1].refuses = True
    with pytest.raises(WeightsPartlyLoaded, match="not by") as caught:
        await members[2].serving.orders.update_weights(weights(1))
    assert caught.value.context["outcome"]["version"] == 1
    for each in members:
        await each.serves(1, BackendState.FAILED)
    engines[1].refuses = False
    for each in members:
        await each.serves(2, BackendState.READY)
        assert each.versions() == [1, 1]


async def test_an_update_is_completed_when_the_service_that_carries_it_out_is_killed(
    tmp_path: Path, engines: list[CountingEngine]
) -> None:
    with redis_server() as redis, ExitStack() as stack:
        nodes: list[Running] = []
        for name in ("n1", "n2"):
            (tmp_path / name).mkdir()
            config = f'[store]\nurl = "{redis.url}"\n[cluster]\nname = "{name}"\n'
            started = partial(stack.enter_context, service(tmp_path / name, engines[0].url, config))
            nodes.append(await anyio.to_thread.run_sync(started))
        async with httpx.AsyncClient(timeout=60) as http:
            await http.post(f"{nodes[0].url}/v1/backends", json={"url": engines[1].url})
            with anyio.fail_after(60):
                for node in nodes:
                    while len((await http.get(f"{node.url}/v1/backends")).json()) < 2:
                        await anyio.sleep(0.05)
            engines[1].may_update = anyio.Event()
            body = {"path": str(POLICY), "version": 1}
            async with anyio.create_task_group() as tasks:
                asking = anyio.CancelScope()

                async def ask() -> None:
                    with asking, suppress(httpx.HTTPError):
                        await http.post(f"{nodes[0].url}/v1/weights", json=body)

                tasks.start_soon(ask)
                with anyio.fail_after(30):
                    while [engine.updates for engine in engines] != [1, 1] or int(engines[0].version) != 1:
                        await anyio.sleep(0.01)
                owner = redis.do("HGET", "{rollouts}:leader:pool:policy", "owner").decode()
                [leader] = [node for node in nodes if node.process.pid == ServiceIdentity.parse(owner).pid]
                [survivor] = [node for node in nodes if node is not leader]
                leader.stop(signal.SIGKILL)
                engines[1].may_update.set()
                answer = await http.post(f"{survivor.url}/v1/weights", json=body)
                asking.cancel()
            assert answer.status_code == 200, answer.text
            assert [each["ok"] for each in answer.json()["outcomes"]] == [True, True]
            assert engines[0].updates == 1  # it reported the version already
            assert [int(engine.version) for engine in engines] == [1, 1]
