"""`/ready` warns of faults that keep only some rollouts waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from rollout_client.errors import NotFoundError, UnavailableError
from tests.support.gateway.service import gateway_service, scripted

pytestmark = pytest.mark.anyio


async def test_the_default_pool_without_an_engine_while_another_pool_has_one(tmp_path: Path) -> None:
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


async def test_an_order_for_a_pool_that_does_not_exist_is_refused_for_good(tmp_path: Path) -> None:
    async with scripted("a") as engine, gateway_service(tmp_path, []) as service:
        with pytest.raises(UnavailableError):  # an engine may be registered yet
            await service.client.update_weights("/w/1", 1)
        await service.client.add_backend(BackendSpec(url=HttpUrl(engine.url)))
        with pytest.raises(NotFoundError, match="there is no pool 'polciy'; did you mean policy") as caught:
            await service.client.update_weights("/w/1", 1, pool="polciy")
        assert (caught.value.problem.code, caught.value.problem.retryable) == ("unknown_pool", False)
