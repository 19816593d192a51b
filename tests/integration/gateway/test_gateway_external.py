"""A program outside drives a rollout through the gateway over real HTTP, and reports its end."""

import anyio
import httpx
import orjson

from api_schemas.external import RolloutAccess
from api_schemas.rollouts import RolloutState, StopReason
from rollout_service.tokens import ChatRenderer, check_invariants
from tests.support.gateway.service import END, POLICY, gateway_service, scripted

CHAT = "/v1/chat/completions"


def client_of(access: RolloutAccess) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {access.key}"}
    return httpx.AsyncClient(base_url=access.url, headers=headers, timeout=30)


def chat(text: str, **fields: object) -> dict[str, object]:
    return {"model": "policy", "messages": [{"role": "user", "content": text}]} | fields


async def test_a_program_answers_a_task_and_the_environment_scores_it(tmp_path):
    with anyio.fail_after(60):
        async with scripted("The answer is 2.") as engine, gateway_service(tmp_path, [engine]) as service:
            access = await service.begin()
            async with client_of(access) as http:
                answer = await http.post(CHAT, json=chat("What is 1+1?"))
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == "The answer is 2."
            assert (await service.end(answer=r"\boxed{2}", attempt=1)).status_code == 202
            rollout = await service.client.wait("r", timeout_seconds=30)
    assert rollout.state is RolloutState.COMPLETED, rollout.error
    assert rollout.reward == 1.0
    assert rollout.stop_reason is StopReason.FINISHED
    assert rollout.access is None
    assert rollout.usage.turns == 1
    assert rollout.trajectory is not None
    check_invariants(rollout.trajectory)
    [segment] = rollout.trajectory.segments
    sampled = [i for i, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask]
    assert sampled == ChatRenderer.load(POLICY).encode(f"The answer is 2.{END}")


async def test_an_answer_is_streamed_and_a_reward_is_reported(tmp_path):
    with anyio.fail_after(60):
        async with scripted("Two.") as engine, gateway_service(tmp_path, [engine]) as service:
            access = await service.begin()
            async with (
                client_of(access) as http,
                http.stream("POST", CHAT, json=chat("1+1?", stream=True)) as answer,
            ):
                lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
            chunks = [orjson.loads(line.removeprefix("data: ")) for line in lines]
            text = "".join(
                chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]
            )
            assert text == "Two."
            await service.end(reward=0.25, reward_parts={"style": 0.25})
            rollout = await service.client.wait("r", timeout_seconds=30)
    assert (rollout.reward, rollout.reward_parts) == (0.25, {"style": 0.25})
