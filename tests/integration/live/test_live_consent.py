"""What a user did not agree to is stored nowhere, whatever becomes of the session and however the text comes back."""

import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_schemas.rollouts.sessions import MaskReason, TurnKind
from rollout_service.base.errors import StoreError
from rollout_service.live.contract import OptOuts
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.testing import ScriptedEngine
from tests.support.gateway.service import scripted
from tests.support.live.service import LiveService, delivered, live_service, stored
from tests.support.waiting import until

CHAT = "a-key-of-the-client-chat"
LIVE = {"keys": [{"name": "chat", "key": CHAT, "train": True}]}
WORDS = "sesame words that nobody may keep"
NO = {"X-Train": "no"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def model(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


FIRST = [user("first words"), model("One.")]
REFUSED = [*FIRST, user(WORDS)]
COMES_BACK = {
    "whole": [*REFUSED, model("Two."), user("more")],
    "without the answer": [*REFUSED, user("more")],
    "without all answers": [user("first words"), user(WORDS), user("more")],
    "joined with the next": [*FIRST, user(f"{WORDS}\n\nmore")],
    "alone": [user(WORDS)],
    "as a tool's result": [*FIRST, user("more"), model("Three."), user(f"He said:\n\n{WORDS}")],
    "the answer alone": [*FIRST, model("Two."), user("more")],
}


@dataclass
class Client:
    """A client with a configured key and an id of its own."""

    service: LiveService
    client_id: str = "u"

    async def say(self, messages: Sequence[dict[str, str]], status: int = 200, **headers: str) -> str:
        """Send messages; return whether the turn was recorded."""
        headers = {"authorization": f"Bearer {CHAT}", "X-Session-Id": self.client_id} | headers
        async with httpx.AsyncClient(base_url=self.service.gateway_url, headers=headers, timeout=30) as http:
            answer = await http.post("/v1/chat/completions", json={"model": "policy", "messages": messages})
        assert answer.status_code == status, answer.text
        return answer.headers.get("x-rollout-recorded", "")

    async def refuse_second(self) -> None:
        """Have a turn that is stored, and one that is not to be."""
        assert await self.say(FIRST[:1]) == "yes"
        assert await self.say(REFUSED, **NO) == "no; reason=opted-out"

    async def expired(self, session_id: str) -> None:
        """Wait until a session was closed."""

        async def look() -> bool:
            session = await self.service.store.session(session_id)
            return session is not None and session.closed_at is not None

        await until(look)


def engine() -> ScriptedEngine:
    return scripted("One.", "Two.", *["Three."] * 4, context_length=1_000)


@asynccontextmanager
async def serving(folder: Path, running: ScriptedEngine, live: dict[str, Any] | None = None) -> AsyncIterator[Client]:
    async with live_service(folder, [running], live=LIVE | (live or {})) as service:
        yield Client(service)


async def nothing_is_kept(folder: Path) -> None:
    """Look into every file, and into what is compressed there."""
    assert WORDS.encode() not in stored(folder)
    async with SqliteLiveStore(folder / "live.sqlite3") as store:
        for session in await store.sessions():
            for turn in await store.turns(session.session_id):
                body = zlib.decompress(turn.body[1:]) if turn.body else b""
                assert WORDS.encode() not in body
                assert b"Two." not in body
                assert turn.next_state is None or WORDS not in turn.next_state.text


async def test_opting_out_in_the_middle_leaves_later_turns_nowhere(tmp_path):
    async with engine() as running, serving(tmp_path, running) as client:
        await client.refuse_second()
        for messages in COMES_BACK.values():
            assert await client.say(messages) == "no; reason=opted-out"
        assert await client.say([user("other words")]) == "yes"
        turns = await delivered(client.service, "chat:u", 2)
        assert turns[0].answer == "One."
        assert turns[0].next_state is None
        counts = (await client.service.show("chat:u")).counts
        assert (counts.served, counts.recorded) == (10, 2)
        assert counts.dropped == {MaskReason.OPTED_OUT: 8}
    await nothing_is_kept(tmp_path)


@pytest.mark.parametrize("form", COMES_BACK)
async def test_consent_outlives_a_session_that_expires(tmp_path, form):
    async with engine() as running, serving(tmp_path, running, {"idle_seconds": 0.3}) as client:
        await client.refuse_second()
        await client.expired("chat:u")
        assert await client.say(COMES_BACK[form]) == "no; reason=opted-out"
        assert await client.say([user("other words")]) == "yes"
        assert (await client.service.show("chat:u~2")).continues == "chat:u"
    await nothing_is_kept(tmp_path)


async def fail_for_want_of_an_engine(client: Client) -> None:
    await client.service.http.post("/v1/pause", json={"pool": "policy"})
    await client.say(REFUSED, 503, **NO)
    await client.service.http.post("/v1/resume", json={"pool": "policy"})


async def fail_for_want_of_room(client: Client) -> None:
    await client.say([*REFUSED[:2], user(f"{WORDS}\n\n{'much more ' * 2_000}")], 400, **NO)


@pytest.mark.parametrize("fail", [fail_for_want_of_an_engine, fail_for_want_of_room])
async def test_consent_outlives_a_restart_also_if_the_call_failed(tmp_path, fail):
    async with engine() as running:
        async with serving(tmp_path, running, {"hold_seconds": 0.2}) as client:
            assert await client.say(FIRST[:1]) == "yes"
            await fail(client)
        async with serving(tmp_path, running) as client:
            assert await client.say(COMES_BACK["without the answer"]) == "no; reason=opted-out"
            assert await client.say([user("other words")]) == "yes"
    await nothing_is_kept(tmp_path)


async def test_a_call_that_is_not_to_be_stored_fails_if_that_cannot_be_noted(tmp_path, monkeypatch):
    async def fail(*_: object) -> None:
        raise StoreError("the disk is full", hint="Free some space.")

    async with engine() as running, serving(tmp_path, running) as client:
        with monkeypatch.context() as patch:
            patch.setattr(SqliteLiveStore, "opt_out", fail)
            before = running.requests
            await client.say(FIRST[:1], 500, **NO)
            assert running.requests == before, "no engine was asked"
        assert await client.say(FIRST[:1], **NO) == "no; reason=opted-out"


async def test_what_is_refused_in_a_session_is_not_stored_by_those_that_had_continued_it_before(tmp_path):
    async with engine() as running, live_service(tmp_path, [running]) as service:
        opened = [await service.open(session_id="0")]
        opened += [await service.open(session_id=str(n), continues=str(n - 1)) for n in (1, 2)]
        first, *later = [each.key for each in opened]
        for key in (first, *later):
            assert (await service.ask(key, "first words")).headers["x-rollout-recorded"] == "yes"
        await service.ask(first, "first words", "One.", WORDS, headers=NO)
        for key in later:
            answer = await service.ask(key, "first words", "One.", WORDS, "Two.", "more")
            assert answer.headers["x-rollout-recorded"] == "no; reason=opted-out"
    await nothing_is_kept(tmp_path)


@pytest.mark.parametrize("is_removed", [False, True])
async def test_a_session_that_continues_another_keeps_to_what_was_agreed_there(tmp_path, is_removed):
    async with engine() as running, live_service(tmp_path, [running]) as service:
        one = await service.open(session_id="one")
        await service.ask(one.key, "first words")
        await service.ask(one.key, "first words", "One.", WORDS, headers=NO)
        if is_removed:
            await service.http.delete("/v1/sessions/one")
        two = await service.open(session_id="two", continues="one")
        three = await service.open(session_id="three", continues="two")
        for opened in (two, three):
            later = await service.ask(opened.key, "first words", "One.", WORDS, "Two.", "more")
            assert later.headers["x-rollout-recorded"] == "no; reason=opted-out"
            fresh = await service.ask(opened.key, "other words")
            assert fresh.headers["x-rollout-recorded"] == "yes"
    await nothing_is_kept(tmp_path)


async def test_a_session_whose_refusals_were_forgotten_stores_no_history(tmp_path):
    async with engine() as running, serving(tmp_path, running) as client:
        await client.refuse_second()
        session = await client.service.store.session("chat:u")
        assert session is not None
        await client.service.store.forget_opt_outs(9e9)  # only their count is left
        assert await client.service.store.opt_outs("any") == OptOuts()
        client.service.app.state.service.live.sessions._active._sessions.clear()
        assert await client.say(COMES_BACK["whole"]) == "no; reason=opted-out"
        assert await client.say(COMES_BACK["without the answer"]) == "no; reason=opted-out"
        assert await client.say([user("other words")]) == "yes"


async def test_nothing_is_recorded_without_consent(tmp_path):
    async with scripted("One.", "Two.") as running, live_service(tmp_path, [running]) as service:
        opened = await service.open(train=None)
        assert (await service.ask(opened.key, "a")).headers["x-rollout-recorded"] == "no; reason=opted-out"
        yes = await service.ask(opened.key, "b", train="yes", turn_type="side")
        assert yes.headers["x-rollout-recorded"] == "yes"
        [turn] = await delivered(service, opened.session.session_id, 1)
        assert (turn.kind, turn.mask) == (TurnKind.SIDE, MaskReason.SIDE)
