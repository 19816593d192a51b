"""Engines behind one gateway are told apart by URL path alone, and one engine can serve two pools."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
import pytest
from aiohttp import web
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec, BackendState
from rollout_client.client import NotFoundError, RolloutClient
from rollout_service.engines.pool.pools import backend_id_of
from rollout_service.engines.shipped import policy_folder
from rollout_service.testing import Counting, ScriptedEngine
from tests.support.gateway.service import gateway_service

pytestmark = pytest.mark.anyio

POLICY = policy_folder("calc-tuned")


@asynccontextmanager
async def gateway(engines: dict[str, str]) -> AsyncIterator[str]:
    """Serve each engine below its own path, and pass the rest of the path on percent-encoded, as received."""
    async with aiohttp.ClientSession() as session:

        async def pass_on(request: web.BaseRequest) -> web.Response:
            prefix = next(prefix for prefix in engines if request.rel_url.raw_path.startswith(f"{prefix}/"))
            url = engines[prefix] + request.rel_url.raw_path.removeprefix(prefix)
            body = await request.read()
            async with session.request(request.method, url, params=request.query, data=body) as answer:
                content = await answer.read()
                return web.Response(body=content, status=answer.status, content_type="application/json")

        runner = web.ServerRunner(web.Server(pass_on))
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()


async def states(client: RolloutClient) -> dict[str, BackendState]:
    return {backend.backend_id: backend.state for backend in await client.backends()}


async def test_backends_are_told_apart_by_path_and_pool_and_remembered_so(tmp_path: Path) -> None:
    first = ScriptedEngine(Counting(512), model_path=POLICY, vocab_size=512)
    second = ScriptedEngine(Counting(512), model_path=POLICY, vocab_size=512)
    with anyio.fail_after(120):
        async with (
            first,
            second,
            gateway({"/engines/first": first.url, "/engines/a%20b": second.url}) as url,
        ):
            near, far = HttpUrl(f"{url}/engines/first"), HttpUrl(f"{url}/engines/a%20b")
            async with gateway_service(tmp_path, []) as service:
                policy = (await service.client.add_backend(BackendSpec(url=near))).backend_id
                spaced = (await service.client.add_backend(BackendSpec(url=far))).backend_id
                judge = (await service.client.add_backend(BackendSpec(url=near, pool="judge"))).backend_id
                assert set(await states(service.client)) == {policy, spaced, judge}
                await service.client.drain_backend(spaced)
                assert await states(service.client) == {
                    policy: BackendState.READY,
                    spaced: BackendState.DRAINING,
                    judge: BackendState.READY,
                }
                await service.client.remove_backend(spaced)
                with pytest.raises(NotFoundError):
                    await service.client.remove_backend(spaced)
            async with gateway_service(tmp_path, []) as service:
                while set(await states(service.client)) != {policy, judge}:
                    await anyio.sleep(0.05)


async def test_a_backend_that_is_away_is_not_forgotten_when_others_come(tmp_path: Path) -> None:
    away, other = (ScriptedEngine(Counting(512), model_path=POLICY, vocab_size=512) for _ in range(2))
    with anyio.fail_after(120):
        async with away, gateway_service(tmp_path, []) as service:
            lost = (await service.client.add_backend(BackendSpec(url=HttpUrl(away.url), pool="judge"))).backend_id
        async with other:
            async with gateway_service(tmp_path, []) as service:
                there = (await service.client.add_backend(BackendSpec(url=HttpUrl(other.url)))).backend_id
            port = int(away.url.rpartition(":")[2])
            back = ScriptedEngine(Counting(512), model_path=POLICY, vocab_size=512, port=port)
            async with back, gateway_service(tmp_path, []) as service:
                while set(await states(service.client)) != {lost, there}:
                    await anyio.sleep(0.05)


@pytest.mark.parametrize(
    "addresses",
    [
        ("http://gateway/a", "http://gateway/b"),
        ("http://gateway", "https://gateway"),
        ("http://gateway:8000", "http://gateway:8000/v2"),
    ],
)
def test_addresses_of_different_engines_have_different_ids(addresses: tuple[str, str]) -> None:
    assert len({backend_id_of(address, "policy") for address in addresses}) == 2


def test_addresses_of_one_engine_have_one_id() -> None:
    addresses = ["http://gateway", "http://Gateway/", "http://gateway:80"]
    assert {backend_id_of(address, "policy") for address in addresses} == {"policy@gateway:80"}
