"""Real clients with only a base URL and a key are served, and what they got is what a trainer gets, id for id."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from api_schemas.rollouts import Rollout
from api_schemas.rollouts.sessions import RolloutKind
from api_schemas.sessions import OpenedSession, SessionRequest
from rollout_client.client import ClientRun
from tests.support.live.child_service import LiveService, live_service
from tests.support.samples import sampled_by_turn

pytestmark = pytest.mark.timeout(120)

Messages = list[dict[str, Any]]
Ask = Callable[[OpenedSession, Messages], Awaitable[str]]


async def openai_whole(opened: OpenedSession, messages: Messages) -> str:
    async with AsyncOpenAI(base_url=f"{opened.url}/v1", api_key=opened.key) as client:
        answer = await client.chat.completions.create(model="any", messages=messages)
        return answer.choices[0].message.content or ""


async def openai_streamed(opened: OpenedSession, messages: Messages) -> str:
    async with AsyncOpenAI(base_url=f"{opened.url}/v1", api_key=opened.key) as client:
        stream = await client.chat.completions.create(model="any", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def openai_responses(opened: OpenedSession, messages: Messages) -> str:
    async with AsyncOpenAI(base_url=f"{opened.url}/v1", api_key=opened.key) as client:
        answer = await client.responses.create(model="any", input=messages)
        return answer.output_text


async def anthropic_whole(opened: OpenedSession, messages: Messages) -> str:
    async with AsyncAnthropic(base_url=opened.url, api_key=opened.key) as client:
        answer = await client.messages.create(model="any", max_tokens=200, messages=messages)
        return "".join(block.text for block in answer.content if block.type == "text")


async def anthropic_streamed(opened: OpenedSession, messages: Messages) -> str:
    async with (
        AsyncAnthropic(base_url=opened.url, api_key=opened.key) as client,
        client.messages.stream(model="any", max_tokens=200, messages=messages) as stream,
    ):
        return await stream.get_final_text()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[LiveService]:
    async with live_service(tmp_path / "state") as found:
        yield found


async def converse(opened: OpenedSession, ask: Ask, words: Sequence[str]) -> Messages:
    """Say these words, one after the other, and check that each comes back."""
    messages: Messages = []
    for word in words:
        messages.append({"role": "user", "content": f"Please say {word}"})
        answer = await ask(opened, messages)
        assert answer == f"You said {word}."
        messages.append({"role": "assistant", "content": answer})
    return messages


async def leased(run: ClientRun, count: int = 1) -> list[Rollout]:
    """Lease and acknowledge so many batches, and return their rollouts."""
    found: list[Rollout] = []
    for _ in range(count):
        batch = await run.lease(timeout_seconds=30)
        assert batch is not None, (await run.view()).model_dump_json()
        found += [sample.rollout for group in batch.groups for sample in group.samples]
        await batch.ack()
    return found


@pytest.mark.parametrize("ask", [openai_whole, openai_streamed, openai_responses, anthropic_whole, anthropic_streamed])
async def test_what_a_client_got_is_what_a_trainer_gets(service, ask):
    opened = await service.client.open_session(SessionRequest(train=True, user="alice"))
    before = len(service.engine.sampled)
    await converse(opened, ask, ["one", "two", "three"])
    sampled = service.engine.sampled[before:]
    session = await service.client.session(opened.session.session_id)
    turns = [mark.turn for mark in session.turns]
    assert len(turns) == 3
    run = await service.train()
    for turn, value in zip(turns, (1.0, -1.0, 0.5), strict=True):
        await service.client.feedback(session.session_id, value, turn=turn)
    await service.client.end_session(session.session_id)
    (rollout,) = await leased(run)
    assert rollout.kind is RolloutKind.SESSION
    assert rollout.session.session_id == session.session_id
    assert rollout.reward == pytest.approx(0.5 / 3)
    assert sampled_by_turn(rollout.trajectory) == dict(zip(turns, sampled, strict=True))
    assert [(mark.turn, mark.value, mark.usable) for mark in rollout.turn_marks] == [
        (turn, value, True) for turn, value in zip(turns, (1.0, -1.0, 0.5), strict=True)
    ]
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        await ask(opened, [{"role": "user", "content": "Please say more"}])
    assert caught.value.status_code == 410
