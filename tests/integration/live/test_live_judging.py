"""Live turns are judged; tenants and secrets stay apart."""

import zlib
from typing import Any

import anyio
import httpx
import pytest
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from api_schemas.rollouts.sessions import MarkReason, MaskReason
from api_schemas.sessions import LiveSession
from rollout_service.base.errors import ConfigurationError, root_cause
from rollout_service.live.contract import SessionRecord
from rollout_service.live.replay import rebuild
from rollout_service.testing import ScriptedEngine
from rollout_service.tokens import ChatRenderer
from tests.support.gateway.service import POLICY, scripted
from tests.support.live.service import LiveService, delivered, live_service, stored
from tests.support.waiting import until

NO = r"A complaint. \boxed{-1}"


async def talk(service: LiveService, says: str = "No, end with =") -> str:
    """Serve two turns of a new session, and return its id."""
    opened = await service.open()
    assert (await service.ask(opened.key, "Hi")).status_code == 200
    assert (await service.ask(opened.key, "Hi", "Hello.", says)).status_code == 200
    return opened.session.session_id


async def add_judge(service: LiveService, engine: ScriptedEngine) -> None:
    spec = BackendSpec(url=HttpUrl(engine.url), pool="judge")
    assert (await service.http.post("/v1/backends", json=spec.model_dump(mode="json"))).is_success


async def judged(service: LiveService, session_id: str) -> LiveSession:
    with anyio.fail_after(20):
        while (shown := await service.show(session_id)).counts.judged + _without_value(shown) < 1:
            await anyio.sleep(0.01)
        return shown


def _without_value(session: LiveSession) -> int:
    return sum(turn.reason is not None and turn.value is None for turn in session.turns)


async def test_an_answer_gets_its_value_from_what_the_user_said_next(tmp_path):
    async with (
        scripted("Hello.", "Hello =") as policy,
        scripted(NO) as judge,
        live_service(tmp_path, [policy]) as service,
    ):
        await add_judge(service, judge)
        session_id = await talk(service)
        shown = await judged(service, session_id)
        metrics = (await service.http.get("/metrics")).text
    first, second = shown.turns
    assert (first.value, first.reason, first.source) == (-1.0, MarkReason.MAJORITY, "judge")
    assert (second.value, second.reason) == (None, None)
    assert 'rollout_live_values_total{source="judge",value="minus"} 1.0' in metrics
    assert 'rollout_judge_votes_total{outcome="valid",rubric="live-turn"}' in metrics


async def test_turns_wait_for_a_judge_through_a_restart_and_serving_does_not(tmp_path):
    async with scripted(*["Hello."] * 9) as policy, scripted(NO) as judge:
        async with live_service(tmp_path, [policy]) as service:
            session_id = await talk(service)
            assert (await service.show(session_id)).counts.judged == 0
        async with live_service(tmp_path, [policy]) as service:
            await add_judge(service, judge)
            assert (await judged(service, session_id)).turns[0].value == -1.0


async def test_what_a_user_says_with_a_rating_becomes_a_hint_and_the_rating_stays(tmp_path):
    settings = {"live": {"judge": {"hints": True, "votes": 1}}}
    said = r"[HINT_START]End each answer with an equals sign.[HINT_END] \boxed{1}"
    async with (
        scripted("Hello.") as policy,
        scripted(said) as judge,
        live_service(tmp_path, [policy], **settings) as service,
    ):
        await add_judge(service, judge)
        opened = await service.open()
        assert (await service.ask(opened.key, "Hi")).status_code == 200
        url = f"/v1/sessions/{opened.session.session_id}/feedback"
        rating = {"value": -1, "text": "it must end with ="}
        assert (await service.http.post(url, json={"turn": 0} | rating)).is_success
        with anyio.fail_after(20):
            while (turn := (await service.show(opened.session.session_id)).turns[0]).hint is None:
                await anyio.sleep(0.01)
    assert (turn.value, turn.reason) == (-1.0, MarkReason.EXPLICIT)
    assert turn.hint.text == "End each answer with an equals sign."


@pytest.mark.parametrize("judge", [{"overrides": ["tool_eror"]}, {"prompt": "missing.jinja"}])
async def test_a_judge_that_cannot_work_keeps_the_service_from_starting(tmp_path, judge):
    with pytest.raises(ExceptionGroup) as caught:
        async with live_service(tmp_path, [], live={"judge": judge}):
            pass
    error = root_cause(caught.value)
    assert isinstance(error, ConfigurationError)
    assert "did you mean tool_error" in str(error) or "cannot be read" in str(error)


SECRET = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
ESCAPED = SECRET.replace("_", "\\u005f")
USER = {"role": "user", "content": "Hi"}


def calling(name: str, arguments: str, call_id: str = "c1") -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "x"},
    ]


def offering(**function: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": [{"type": "function", "function": {"name": "look"} | function}]}


@pytest.mark.parametrize(
    "body",
    [
        offering(description=f"use {SECRET}"),
        offering(parameters={"type": "object", "properties": {SECRET: {"type": "string"}}}),
        offering(parameters={"type": "object", "properties": {"at": {"enum": ["a", SECRET]}}}),
        {"messages": calling(SECRET, "{}")},
        {"messages": calling("look", f'{{"at": "{ESCAPED}"}}')},
        {"messages": calling("look", "{}", call_id=SECRET)},
        {"messages": [USER], "stop": [SECRET]},
        {"messages": [USER], "model": SECRET},
        {"messages": [USER], "prompt_cache_key": SECRET},
    ],
    ids=["description", "property", "value", "call", "escaped", "call id", "stop", "model", "lane"],
)
async def test_a_secret_is_found_wherever_a_request_has_it(tmp_path, body):
    async with scripted("One.") as engine, live_service(tmp_path, [engine]) as service:
        opened = await service.open()
        headers = {"authorization": f"Bearer {opened.key}"}
        async with httpx.AsyncClient(base_url=service.gateway_url, headers=headers, timeout=30) as http:
            answer = await http.post("/v1/chat/completions", json={"model": "policy"} | body)
        assert answer.status_code == 200, answer.text
        [turn] = await until(lambda: service.turns(opened.session.session_id))
        assert (turn.mask, turn.body, turn.answer) == (MaskReason.REDACTED, b"", "")


async def test_a_schema_for_an_answer_is_not_stored(tmp_path):
    schema = {"name": "s", "schema": {"type": "object", "description": SECRET}}
    form = {"type": "json_schema", "json_schema": schema}
    async with scripted("{}") as engine, live_service(tmp_path, [engine]) as service:
        opened = await service.open()
        assert (await service.ask(opened.key, "Hi", response_format=form)).status_code == 200
        [turn] = await delivered(service, opened.session.session_id, 1)
        assert SECRET.encode() not in zlib.decompress(turn.body[1:])


async def test_the_schema_of_a_tool_that_was_found_later_is_searched(tmp_path):
    found = {"type": "tool_search_output", "call_id": "c1", "execution": "client", "status": "completed"}
    tools = [{"type": "function", "name": "look", "description": SECRET, "parameters": {"type": "object"}}]
    sought = {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "l"}}
    said = [{"role": "user", "content": "Hi"}, sought, found | {"tools": tools}]
    async with scripted("One.") as engine, live_service(tmp_path, [engine]) as service:
        opened = await service.open()
        headers = {"authorization": f"Bearer {opened.key}"}
        async with httpx.AsyncClient(base_url=service.gateway_url, headers=headers, timeout=30) as http:
            answer = await http.post("/v1/responses", json={"model": "policy", "input": said})
        assert answer.status_code == 200, answer.text
        [turn] = await until(lambda: service.turns(opened.session.session_id))
        assert turn.mask is MaskReason.REDACTED


async def test_a_secret_in_metadata_is_replaced(tmp_path):
    given = {"note": f"with {SECRET}", "list": ["kept", {"deep": SECRET}], SECRET: 1}
    redacted = {"note": "[redacted]", "list": ["kept", {"deep": "[redacted]"}], "[redacted]": 1}
    async with scripted("One.") as engine, live_service(tmp_path, [engine]) as service:
        opened = await service.open(session_id="s", metadata=given)
        assert opened.session.metadata == redacted
        assert (await service.open(session_id="s", metadata=given)).key is None
        metrics = (await service.http.get("/metrics")).text
        assert 'rollout_live_redactions_total{kind="github_token"} 6.0' in metrics
    assert SECRET.encode() not in stored(tmp_path)


async def test_a_secret_is_stored_in_no_form(tmp_path):
    async with scripted("One.", "Two.", "Three.") as engine, live_service(tmp_path, [engine]) as service:
        opened = await service.open()
        await service.ask(opened.key, "a")
        await service.ask(opened.key, "a", "One.", f"use {SECRET}")
        await service.ask(opened.key, "a", "One.", f"use {SECRET}", "Two.", "thanks")

        async def all_recorded():
            turns = await service.turns(opened.session.session_id)
            return turns if len(turns) == 3 else None

        turns = await until(all_recorded)
        assert [turn.mask for turn in turns][1:] == [MaskReason.REDACTED] * 2
        assert [bool(turn.body) for turn in turns] == [True, False, False]

        async def is_masked() -> bool:
            first = await service.store.turn(opened.session.session_id, 0)
            return first is not None and first.mask is MaskReason.REDACTED and first.next_state is None

        await until(is_masked)
        rebuilt = rebuild(ChatRenderer.load(POLICY), turns)
        assert (rebuilt.next_id, list(rebuilt.turns)) == (3, [0])


CHAT, VIP = "a-key-of-the-client-chat", "a-key-of-the-client-vip"


def keys(**fields: Any) -> list[dict[str, Any]]:
    """Return keys of two tenants, with names that could be taken for each other's."""
    return [
        {"name": "chat", "key": CHAT, "tenant": "a", "train": False} | fields,
        {"name": "chat:vip", "key": VIP, "tenant": "b", "train": True} | fields,
    ]


async def sessions(service: LiveService) -> dict[str, SessionRecord]:
    return {one.session_id: one for one in await service.store.sessions()}


async def say(service: LiveService, key: str, client_id: str, text: str) -> str:
    """Send a message; return whether it was recorded."""
    answer = await service.ask(key, text, headers={"X-Session-Id": client_id})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-rollout-recorded"]


async def test_keys_whose_names_and_ids_join_alike_share_no_session(tmp_path):
    engine = scripted(*["Hi."] * 4)
    async with engine as running, live_service(tmp_path, [running], live={"keys": keys()}) as service:
        for _ in range(2):
            await say(service, CHAT, "vip:x1", "of the tenant a")
            await say(service, VIP, "x1", "of the tenant b")
        found = await sessions(service)
        assert {name: (one.tenant, one.train, one.served) for name, one in found.items()} == {
            "chat:vip:x1": ("a", False, 2),
            "chat:vip:x1~2": ("b", True, 2),
        }
        assert len({one.user for one in found.values()}) == 2


async def test_a_clients_id_that_looks_like_a_later_session_is_another_client(tmp_path):
    live = {"keys": keys(), "idle_seconds": 0.3}
    async with scripted(*["Hi."] * 3) as engine, live_service(tmp_path, [engine], live=live) as service:
        await say(service, VIP, "u", "first")

        async def expired() -> bool:
            return (await sessions(service))["chat:vip:u"].closed_at is not None

        await until(expired)
        await say(service, VIP, "u", "second")
        await say(service, VIP, "u~2", "another")
        found = await sessions(service)
        assert found["chat:vip:u~2"].continues == "chat:vip:u"
        assert found["chat:vip:u~2~2"].continues is None
        assert found["chat:vip:u~2"].user == found["chat:vip:u"].user != found["chat:vip:u~2~2"].user


async def test_nobody_opens_a_clients_session_before_it_does(tmp_path):
    async with (
        scripted(*["Hi."] * 2) as engine,
        live_service(tmp_path, [engine], live={"keys": keys()}) as service,
    ):
        await service.open(session_id="chat:victim", train=True, tenant="evil")
        assert await say(service, CHAT, "victim", "not to be stored") == "no; reason=opted-out"
        found = await sessions(service)
        assert found["chat:victim"].served == 0
        assert (found["chat:victim~2"].tenant, found["chat:victim~2"].train) == ("a", False)


async def test_users_of_two_tenants_are_deleted_one_by_one(tmp_path):
    async with scripted(*["Hi."] * 2) as engine, live_service(tmp_path, [engine]) as service:
        opened = {tenant: await service.open(user="alice", tenant=tenant) for tenant in ("a", "b")}
        for one in opened.values():
            await service.ask(one.key, "words")
            await delivered(service, one.session.session_id, 1)
        refused = await service.http.delete("/v1/sessions", params={"user": "alice"})
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["path"] == "query.tenant"
        answer = await service.http.delete("/v1/sessions", params={"user": "alice", "tenant": "a"})
        assert answer.json()["sessions"] == 1
        left = await sessions(service)
        assert list(left) == [opened["b"].session.session_id]
        again = await service.http.delete("/v1/sessions", params={"user": "alice"})
        assert again.json()["sessions"] == 1, "only one tenant has a user of this name"


async def test_users_of_two_tenants_have_limits_of_their_own(tmp_path):
    live = {"requests_per_minute": 1, "quarantine_sessions": 1}
    async with scripted(*["Hi."] * 2) as engine, live_service(tmp_path, [engine], live=live) as service:
        for tenant in ("a", "b"):
            opened = await service.open(user="alice", tenant=tenant)
            assert (await service.ask(opened.key, "words")).status_code == 200
            assert (await service.ask(opened.key, "words")).status_code == 429
        assert all(one.quarantined for one in (await sessions(service)).values())
