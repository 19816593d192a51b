"""A stream of tokens that stops is named, although its engine still answers everything else."""

import anyio
import httpx
import pytest

from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangVerdict
from rollout_service.testing.engine_turn import AfterTokens, Fault
from tests.support.gateway.service import gateway_service, scripted
from tests.support.hangs.service import HangService

pytestmark = pytest.mark.timeout(150)


async def test_a_stream_that_stops_in_the_middle(tmp_path):
    async with scripted("The answer is two.") as engine, gateway_service(tmp_path, [engine]) as inner:
        service = HangService(inner)
        access = await inner.begin()
        engine.inject(AfterTokens(3, Fault.HANG))
        headers = {"authorization": f"Bearer {access.key}"}
        body = {"model": "policy", "messages": [{"role": "user", "content": "1+1?"}], "stream": True}

        async def call() -> None:
            async with (
                httpx.AsyncClient(base_url=access.url, headers=headers, timeout=120) as http,
                http.stream("POST", "/v1/chat/completions", json=body) as answer,
            ):
                async for _ in answer.aiter_raw():
                    pass

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            found = await service.finding(lambda one: one.kind == StepKind.ENGINE)
            tasks.cancel_scope.cancel()
        assert (found.verdict, found.responds) == (HangVerdict.STUCK, True)
        assert found.rollouts == ["r"]
        [backend] = await service.client.backends()
        assert found.subject == backend.backend_id
        assert found.detail["tokens"] in (1, 2, 3)
        assert found.detail["request"]
        await service.client.cancel("r")
        await service.ended(found.finding_id)
