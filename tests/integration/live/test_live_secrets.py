"""Whatever a detector finds is stored in no form, wherever in a request it stands."""

import zlib
from typing import Any

import httpx
import pytest

from api_schemas.rollouts.sessions import MaskReason
from rollout_service.live.replay import rebuild
from rollout_service.tokens import ChatRenderer
from tests.support.gateway.service import POLICY, scripted
from tests.support.live.service import delivered, live_service, stored, until

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
        assert opened.key is not None
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
        assert opened.key is not None
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
