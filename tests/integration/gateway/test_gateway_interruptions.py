"""A program's streamed answer goes on through a weight update and the loss of an engine, and it notices neither."""

import anyio
import httpx
import orjson

from api_schemas.external import RolloutAccess
from api_schemas.rollouts import Rollout
from rollout_service.testing import ScriptedEngine
from rollout_service.tokens import ChatRenderer, check_invariants
from tests.support.gateway.service import END, POLICY, GatewayService, OneAnswer, gateway_service, scripted

TEXT = "one two three four five six seven eight nine ten"
BODY = {"model": "policy", "stream": True, "messages": [{"role": "user", "content": "Count."}]}


async def read_through(access: RolloutAccess, interrupt) -> str:
    """Stream an answer, interrupt it after its first text, and return all of it."""
    headers, text = {"x-api-key": access.key}, ""
    async with (
        httpx.AsyncClient(base_url=access.url, timeout=60) as http,
        http.stream("POST", "/v1/chat/completions", json=BODY, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            choices = orjson.loads(line.removeprefix("data: "))["choices"]
            was_silent = not text
            text += "".join(choice["delta"].get("content") or "" for choice in choices)
            if was_silent and text:
                await interrupt()
    return text


async def finished(service: GatewayService) -> Rollout:
    await service.end(reward=1.0)
    return await service.client.wait("r", timeout_seconds=30)


def sampled(rollout: Rollout) -> tuple[list[int], list[int]]:
    """Return the sampled ids and their versions."""
    assert rollout.trajectory is not None
    check_invariants(rollout.trajectory)
    [segment] = rollout.trajectory.segments
    kept = [i for i, mask in enumerate(segment.loss_mask) if mask]
    return [segment.token_ids[i] for i in kept], [segment.versions[i] for i in kept]


async def test_a_weight_update_in_the_middle_changes_versions_and_nothing_that_is_seen(tmp_path):
    with anyio.fail_after(120):
        async with scripted(TEXT, latency=2.0) as engine, gateway_service(tmp_path, [engine]) as service:
            access = await service.begin()

            async def update() -> None:
                await service.client.update_weights(str(POLICY), 1)

            assert await read_through(access, update) == TEXT
            ids, versions = sampled(await finished(service))
    assert ids == ChatRenderer.load(POLICY).encode(TEXT + END)
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}


async def test_an_engine_that_dies_in_the_middle_is_replaced_by_another(tmp_path):
    with anyio.fail_after(120):
        async with (
            ScriptedEngine(OneAnswer(TEXT), model_path=POLICY, vocab_size=512, latency=2.0) as one,
            ScriptedEngine(OneAnswer(TEXT), model_path=POLICY, vocab_size=512, latency=2.0) as other,
            gateway_service(tmp_path, [one, other]) as service,
        ):
            access = await service.begin()

            async def kill() -> None:
                busy: list[ScriptedEngine] = [engine for engine in (one, other) if engine.in_flight]
                for engine in busy:
                    await engine.die()

            assert await read_through(access, kill) == TEXT
            ids, _ = sampled(await finished(service))
    assert ids == ChatRenderer.load(POLICY).encode(TEXT + END)
