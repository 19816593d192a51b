"""`/ready` waits for all that a rollout needs, and warns of faults that keep only some rollouts waiting."""

import threading

import anyio
import pytest
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from rollout_client.errors import NotFoundError, UnavailableError
from rollout_service.tokens import ChatRenderer
from tests.support.gateway.service import gateway_service, scripted


async def test_the_default_pool_without_an_engine_while_another_pool_has_one(tmp_path):
    async with scripted("a") as engine, gateway_service(tmp_path, []) as service:
        unready = await service.client.readiness()
        assert (unready.ready, unready.warnings) == (False, [])
        await service.client.add_backend(BackendSpec(url=HttpUrl(engine.url), pool="judge"))
        readiness = await service.client.readiness()
        assert readiness.ready
        [warning] = readiness.warnings
        assert "no backend of pool 'policy' is in service" in warning
        assert "judge" not in warning
        await service.client.add_backend(BackendSpec(url=HttpUrl(engine.url)))
        assert (await service.client.readiness()).warnings == []


async def test_a_service_is_not_ready_while_it_loads_the_chat_format_of_its_engine(tmp_path, monkeypatch):
    load, is_loaded = ChatRenderer.load, threading.Event()

    def load_late(path: str, renderer: str | None) -> ChatRenderer:
        assert is_loaded.wait(30)
        return load(path, renderer)

    monkeypatch.setattr(ChatRenderer, "load", staticmethod(load_late))
    async with scripted("a") as engine, gateway_service(tmp_path, []) as service:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(service.client.add_backend, BackendSpec(url=HttpUrl(engine.url)))
            with anyio.fail_after(20):
                while [view.state for view in await service.client.backends()] != ["ready"]:
                    await anyio.sleep(0.01)
            assert not (await service.client.readiness()).ready
            is_loaded.set()
        assert (await service.client.readiness()).ready


async def test_an_order_for_a_pool_that_does_not_exist_is_refused_for_good(tmp_path):
    async with scripted("a") as engine, gateway_service(tmp_path, []) as service:
        with pytest.raises(UnavailableError):  # an engine may be registered yet
            await service.client.update_weights("/w/1", 1)
        await service.client.add_backend(BackendSpec(url=HttpUrl(engine.url)))
        with pytest.raises(NotFoundError, match="there is no pool 'polciy'; did you mean policy") as caught:
            await service.client.update_weights("/w/1", 1, pool="polciy")
        assert (caught.value.problem.code, caught.value.problem.retryable) == ("unknown_pool", False)
