"""Programs that are agents, inside and outside, run to their end, through a lost engine too."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import orjson
import pytest

from api_schemas.external import RolloutAccess
from api_schemas.rollouts import Rollout, RolloutState, StopReason
from rollout_service.environments.builtin.calc import environment
from rollout_service.testing import ScriptedEngine
from rollout_service.tokens import ChatRenderer, check_invariants
from tests.support.api.server import api_server
from tests.support.gateway.service import END, POLICY, GatewayService, OneAnswer, gateway_service, scripted
from tests.support.processes.service import scripted_engine
from tests.support.samples import sampled_of_one
from tests.support.turns import called, turn_of

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
            ids, _ = sampled_of_one((await finished(service)).trajectory)
    assert ids == ChatRenderer.load(POLICY).encode(TEXT + END)


EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"
CALL = turn_of(called("calculate", expression="6 * 7"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("gateway")
    answer = environment.dataset()[0]["answer"]
    with (
        scripted_engine(folder, CALL, rf"\boxed{{{answer}}}<|im_end|>") as engine,
        api_server(folder, "--backend", engine.url) as server,
    ):
        yield server.url


@pytest.mark.parametrize("example", ["openai_chat.py", "anthropic_messages.py"])
def test_an_example_solves_its_task(url, example):
    command = [sys.executable, str(EXAMPLES / example), "--url", url, "--rollouts", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("completed, reward 1.0, 2 turns")


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
            text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
            assert text == "Two."
            await service.end(reward=0.25, reward_parts={"style": 0.25})
            rollout = await service.client.wait("r", timeout_seconds=30)
    assert (rollout.reward, rollout.reward_parts) == (0.25, {"style": 0.25})
