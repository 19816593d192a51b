"""Real clients with only a base URL and a key are served, and what they got is what a trainer gets, id for id."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anthropic
import anyio
import httpx
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from api_schemas.rollouts import Rollout
from api_schemas.rollouts.sessions import MaskReason, RolloutKind
from api_schemas.sessions import OpenedSession, SessionCounts, SessionRequest
from rollout_client.client import ClientRun
from tests.support.live.child_service import LiveService, Praise, files_with, live_service
from tests.support.samples import sampled_by_turn

pytestmark = pytest.mark.timeout(120)

Messages = list[dict[str, Any]]
Ask = Callable[[OpenedSession, Messages], Awaitable[str]]
KEY = "a-key-of-a-chat-front-end"
KEYED = f'[[live.keys]]\nname = "chat"\nkey = "{KEY}"\nuser = "alice"\ntrain = true\n'


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
    async with live_service(tmp_path / "state", KEYED) as found:
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


async def test_a_front_end_with_one_key_names_its_conversations(service):
    async with AsyncOpenAI(base_url=f"{service.client.base_url}/v1", api_key=KEY) as client:

        async def say(word: str, **headers: str) -> httpx.Response:
            raw = await client.chat.completions.with_raw_response.create(
                model="any", messages=[{"role": "user", "content": word}], extra_headers=headers
            )
            assert raw.parse().choices[0].message.content == f"You said {word}."
            return raw.http_response

        for conversation in ("a/b c", "d", "a/b c"):
            await say("hello", **{"X-Session-Id": conversation})
        unrecorded = await say("nobody")
        with pytest.raises(openai.BadRequestError):
            await say("wrong", **{"X-Session-Id": "x", "X-Turn-Type": "mian"})
    assert unrecorded.headers["x-rollout-recorded"] == "no; reason=no-session"
    counts = [one.counts async for one in service.client.sessions()]
    assert sorted(one.recorded for one in counts if one.served) == [1, 2]


async def test_the_funnel_adds_up_at_every_moment(tmp_path):
    async with live_service(tmp_path / "state", judge=Praise()) as service:
        run = await service.train()
        asked = 0
        async with httpx.AsyncClient(timeout=30) as http:
            for number in range(4):
                opened = await service.client.open_session(SessionRequest(train=number != 3, user=f"u{number}"))
                messages: Messages = []
                for turn in range(5):
                    side = turn == 1
                    asking = [*messages, {"role": "user", "content": f"Please say {number}-{turn}"}]
                    headers = {"authorization": f"Bearer {opened.key}"}
                    headers |= {"X-Turn-Type": "side"} if side else {}
                    headers |= {"X-Train": "no"} if turn == 4 else {}
                    body = {"model": "any", "messages": asking}
                    response = await http.post(f"{opened.url}/v1/chat/completions", json=body, headers=headers)
                    assert response.is_success, response.text
                    messages = messages if side else [*asking, response.json()["choices"][0]["message"]]
                    asked += 1
                    check((await service.client.session_page()).counts, asked)
                await service.client.end_session(opened.session.session_id)
        await leased(run, 3)
        with anyio.fail_after(30):
            while (await service.client.session_page()).counts.waiting:
                check((await service.client.session_page()).counts, asked)
                await anyio.sleep(0.1)
        counts = (await service.client.session_page()).counts
        check(counts, asked)
        dropped = {MaskReason.SIDE: 3, MaskReason.OPTED_OUT: 3 + 5, MaskReason.NO_NEXT_STATE: 3}
        assert counts.dropped == dropped
        assert counts.delivered == 6
        assert await metrics_of(service) == {
            "delivered": 6,
            "waiting": 0,
            **{reason.value: count for reason, count in dropped.items()},
        }
        assert "rollout_live_part_seconds_count 3.0" in await metrics_text(service)


def check(counts: SessionCounts, served: int) -> None:
    """Check that every served turn is in exactly one place."""
    assert counts.served == served
    assert counts.served == counts.delivered + counts.waiting + sum(counts.dropped.values())


async def metrics_text(service: LiveService) -> str:
    """Return the metrics as they are read."""
    async with httpx.AsyncClient(base_url=service.client.base_url) as http:
        return (await http.get("/metrics")).text


async def metrics_of(service: LiveService) -> dict[str, float]:
    """Return the turns by state, or by the reason why they were dropped."""
    found = {}
    for line in (await metrics_text(service)).splitlines():
        if line.startswith("rollout_live_turns{"):
            labels, _, value = line.rpartition(" ")
            reason, state = labels.split('"')[1], labels.split('"')[3]
            found[reason or state] = float(value)
    return found


async def test_what_a_user_takes_back_is_nowhere(tmp_path):
    state = tmp_path / "state"
    async with live_service(state, judge=Praise()) as service:
        opened = await service.client.open_session(SessionRequest(train=True, user="alice-of-wonderland"))
        async with httpx.AsyncClient(timeout=30) as http:

            async def say(word: str, *, train: bool) -> None:
                body = {"model": "any", "messages": [{"role": "user", "content": f"Please say {word}"}]}
                headers = {"authorization": f"Bearer {opened.key}", "X-Train": "yes" if train else "no"}
                response = await http.post(f"{opened.url}/v1/chat/completions", json=body, headers=headers)
                assert response.json()["choices"][0]["message"]["content"] == f"You said {word}."

            await say("xylophone", train=True)
            await say("zeppelin", train=False)
        assert not files_with(state, "zeppelin")
        session = await service.client.session(opened.session.session_id)
        assert session.counts.dropped == {MaskReason.OPTED_OUT: 1}
        await service.client.feedback(session.session_id, 1.0, text="a quixotic remark")
        run = await service.train()
        await service.client.end_session(session.session_id)
        batch = await run.lease(timeout_seconds=30)
        deleted = await service.client.delete_sessions(user="alice-of-wonderland")
        assert (deleted.sessions, deleted.turns) == (1, 1)
        assert [part.batch_id for part in deleted.leased] == [batch.batch_id]
        async with aclosing(service.client.sessions()) as sessions:
            assert not [one async for one in sessions]
        for word in ("xylophone", "zeppelin", "quixotic", "alice-of-wonderland"):
            assert not files_with(state, word), word
    for word in ("xylophone", "zeppelin", "quixotic", "alice-of-wonderland"):
        assert not files_with(state, word), word


async def test_a_session_goes_on_after_its_end_only_as_another(service):
    first = await service.client.open_session(SessionRequest(train=True))
    await converse(first, openai_whole, ["one"])
    await service.client.end_session(first.session.session_id)
    second = await service.client.open_session(SessionRequest(train=True, continues=first.session.session_id))
    await converse(second, openai_whole, ["two"])
    assert second.session.continues == first.session.session_id
