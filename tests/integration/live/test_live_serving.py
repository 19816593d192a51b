"""A user's own agent is served through its session, and what it did is recorded as its consent allows."""

from collections.abc import AsyncIterator
from urllib.parse import quote

import anyio
import httpx
import pytest
from structlog.testing import capture_logs

from api_schemas.rollouts.sessions import MaskReason
from api_schemas.sessions import OpenedSession
from rollout_service.gateway.capture import PlannedTurn, TurnCapture
from rollout_service.gateway.contract import ModelCall
from rollout_service.live.replay import rebuild
from rollout_service.live.serving.resolver import ActiveSessions
from rollout_service.testing.engine_turn import Fault
from rollout_service.tokens import ChatRenderer, check_invariants
from tests.support.gateway.service import END, POLICY, scripted
from tests.support.live.service import delivered, live_service
from tests.support.waiting import collect, until

BARE = "a-configured-key-of-an-operator"
KEYS = {"keys": [{"name": "chat", "key": BARE, "train": True}]}


async def test_an_answer_is_recorded_as_it_was_sent_and_followed_by_what_came_next(tmp_path):
    async with scripted("Hello.", "Better?") as engine, live_service(tmp_path, [engine]) as service:
        opened = await service.open(user="alice", metadata={"a": 1})
        first = await service.ask(opened.key, "Hi")
        assert first.headers["x-rollout-recorded"] == "yes"
        assert first.json()["choices"][0]["message"]["content"] == "Hello."
        second = await service.ask(opened.key, "Hi", "Hello.", "Not so short!")
        assert second.status_code == 200
        turns = await delivered(service, opened.session.session_id, 2)
        assert [turn.answer for turn in turns] == ["Hello.", "Better?"]
        followed = await until(lambda: service.store.turn(opened.session.session_id, 0))
        assert "Not so short!" in followed.next_state.text
        trajectory = rebuild(ChatRenderer.load(POLICY), turns).trajectory()
        check_invariants(trajectory)
        [segment] = trajectory.segments
        sampled = [token for token, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask]
        assert sampled == ChatRenderer.load(POLICY).encode(f"Hello.{END}Better?{END}")
        shown = await service.show(opened.session.session_id)
        assert shown.counts.served == shown.counts.waiting == 2
        assert shown.user != "alice"


SIDE = {"X-Turn-Type": "side"}
COMPACTION = {"User-Agent": "codex_cli_rs/1", "X-Codex-Turn-Metadata": '{"request_kind": "compaction"}'}


@pytest.mark.parametrize(("headers", "mask"), [(SIDE, MaskReason.SIDE), (COMPACTION, None)])
async def test_a_clients_own_request_between_two_of_its_user_changes_nothing(tmp_path, headers, mask):
    engine = scripted("Hello.", "A title", "Better?")
    async with engine as running, live_service(tmp_path, [running]) as service:
        opened = await service.open()
        await service.ask(opened.key, "Hi")
        await service.ask(opened.key, "Hi", "Hello.", "Make a title of this.", headers=headers)
        await service.ask(opened.key, "Hi", "Hello.", "Not so short!")
        turns = await delivered(service, opened.session.session_id, 3)
        assert [turn.mask for turn in turns] == [None, mask, None]

        async def followed():
            turns = await service.turns(opened.session.session_id)
            return turns if turns[0].next_state is not None else None

        first, title, last = await until(followed)
        assert "Not so short!" in first.next_state.text
        assert "title" not in first.next_state.text
        assert (title.next_state, last.next_state) == (None, None)


async def test_all_results_of_a_turns_tools_are_what_followed_it(tmp_path):
    calls = "".join(f'<tool_call>\n{{"name": "look", "arguments": {{"at": {at}}}}}\n</tool_call>' for at in range(3))
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    async with scripted(calls, "Done.") as engine, live_service(tmp_path, [engine]) as service:
        opened = await service.open()
        headers = {"authorization": f"Bearer {opened.key}"}
        messages = [{"role": "user", "content": "Look."}]
        async with httpx.AsyncClient(base_url=service.gateway_url, headers=headers, timeout=30) as http:
            body = {"model": "policy", "messages": messages, "tools": tools}
            answer = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": f"seen {number}"}
                for number, call in enumerate(answer["tool_calls"])
            ]
            body["messages"] = [*messages, answer, *results]
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200

        async def followed():
            turn = await service.store.turn(opened.session.session_id, 0)
            return turn.next_state if turn is not None else None

        state = await until(followed)
        assert state.role == "tool"
        assert all(f"seen {number}" in state.text for number in range(3))


async def test_the_same_apis_answer_below_the_sessions_url(tmp_path):
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    async with scripted("One.", "Two.", "Three.") as engine, live_service(tmp_path, [engine]) as service:
        odd = "a/b ü"
        opened = await service.open(session_id=odd)
        assert opened.url == f"http://localhost/v1/sessions/{quote(odd, safe='')}"
        chat = await service.http.post(f"{opened.url}/v1/chat/completions", json=body)
        assert chat.json()["choices"][0]["message"]["content"] == "One."
        claude = await service.http.post(
            f"{opened.url}/v1/messages", json=body | {"max_tokens": 100}, headers={"anthropic-version": "1"}
        )
        assert claude.json()["content"][0]["text"] == "One."
        bare = await service.http.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {opened.key}"}
        )
        assert bare.json()["choices"][0]["message"]["content"] == "One."
        assert (await service.http.get(f"{opened.url}/models")).json()["data"][0]["id"] == "policy"
        assert len(await delivered(service, odd, 3)) == 3
        assert (await service.http.get(f"/v1/sessions/{quote(odd, safe='')}")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_keeps_the_cached_prefixes_of_tenants_apart(tmp_path, stream):
    async with scripted(*["Hi."] * 3) as engine, live_service(tmp_path, [engine]) as service:
        for tenant in ("one", "two", "one"):
            opened = await service.open(tenant=tenant)
            assert (await service.ask(opened.key, "a", stream=stream)).status_code == 200
        first, second, third = engine.cache_keys[-3:]
        assert first == third != second
        assert "one" not in first


async def test_a_service_with_keys_takes_the_sessions_key_or_its_own_for_a_session(tmp_path):
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    admin, reader = "an-admin-key-for-tests", "a-reader-key-for-tests"
    keys = [{"name": "a", "key": admin}, {"name": "r", "key": reader, "role": "read"}]
    async with scripted(*["Hi."] * 9) as engine, live_service(tmp_path, [], keys=keys) as service:
        admin_headers = {"authorization": f"Bearer {admin}"}
        added = await service.http.post("/v1/backends", json={"url": engine.url}, headers=admin_headers)
        assert added.is_success
        assert (await service.http.post("/v1/sessions", json={})).status_code == 401
        one, two = [(await service.http.post("/v1/sessions", json={}, headers=admin_headers)).json() for _ in range(2)]
        for key, status in ((one["key"], 200), (admin, 200), (reader, 401), (two["key"], 401), ("", 401)):
            answer = await service.http.post(
                f"{one['url']}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
            )
            assert answer.status_code == status, key
            by_anthropic = await service.http.post(
                f"{one['url']}/v1/messages", json=body | {"max_tokens": 9}, headers={"x-api-key": key}
            )
            assert by_anthropic.status_code == status, key
        assert (
            await service.http.get("/v1/sessions", headers={"authorization": f"Bearer {one['key']}"})
        ).status_code == 401


class QuotingError(RuntimeError):
    """A defect whose message quotes what it choked on."""


async def test_no_error_puts_a_users_words_into_the_log(tmp_path, monkeypatch):
    def choke(_: TurnCapture, call: ModelCall, __: int | None) -> PlannedTurn:
        raise QuotingError(f"cannot take {call.messages[-1].text!r}")

    monkeypatch.setattr(TurnCapture, "plan", choke)
    async with scripted("One.") as engine, live_service(tmp_path, [engine]) as service:
        opened = await service.open()
        with capture_logs() as lines:
            assert (await service.ask(opened.key, "sesame words")).status_code == 500
    told = [line for line in lines if line.get("error") == "QuotingError"]
    assert {line["event"] for line in told} == {
        "a call to the gateway failed",
        "unhandled error in a live session",
    }
    assert all("in choke" in line["stack"] for line in told), "a defect can still be found"
    assert "sesame" not in repr(lines)


@pytest.mark.parametrize(("field", "value"), [("X-Turn-Type", "Other"), ("X-Train", "perhaps")])
async def test_an_unknown_wish_is_refused_in_the_form_of_the_api(tmp_path, field, value):
    async with scripted("One.") as engine, live_service(tmp_path, [engine]) as service:
        opened = await service.open()
        answer = await service.ask(opened.key, "a", headers={field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert not await service.turns(opened.session.session_id)


async def test_a_configured_key_needs_a_session_id_to_be_recorded(tmp_path):
    async with scripted(*"abcd") as engine, live_service(tmp_path, [engine], live=KEYS) as service:
        alone = await service.ask(BARE, "Hi")
        assert alone.headers["x-rollout-recorded"] == "no; reason=no-session"
        for text in ("u1", "u2"):
            answer = await service.ask(BARE, "Hi", headers={"X-Session-Id": text})
            assert answer.headers["x-rollout-recorded"] == "yes"
        page = (await service.http.get("/v1/sessions")).json()
        assert sorted(session["session_id"] for session in page["sessions"]) == ["chat:u1", "chat:u2"]
        assert len({session["user"] for session in page["sessions"]}) == 2
        too_long = await service.ask(BARE, "Hi", headers={"X-Session-Id": "x" * 257})
        assert too_long.status_code == 400


async def test_an_ended_session_takes_no_requests(tmp_path):
    async with scripted("One.") as engine, live_service(tmp_path, [engine]) as service:
        opened = await service.open()
        ended = await service.http.post(f"/v1/sessions/{opened.session.session_id}/end")
        assert ended.json()["closed_because"] == "explicit"
        assert (await service.ask(opened.key, "a")).status_code == 410
        assert (await service.http.post(f"{opened.url}/v1/chat/completions", json={})).status_code == 410
        assert (await service.http.post("/v1/sessions/none/end")).status_code == 404
        assert (await service.ask("sk-live-none", "a")).status_code == 401


async def test_a_request_that_loads_a_session_as_it_ends_is_cut_off(tmp_path, monkeypatch):
    async with scripted("One.", faults=[None, Fault.HANG]) as engine, live_service(tmp_path, [engine]) as service:
        opened = await service.open()
        loads, ends, statuses = anyio.Event(), anyio.Event(), []
        read, held = service.store.opt_outs, ActiveSessions.held

        async def read_slowly(*arguments):
            loads.set()
            await ends.wait()
            return await read(*arguments)

        def hold(*arguments):
            ends.set()  # the end waits for the request from here on
            return held(*arguments)

        async def ask() -> None:
            statuses.append((await service.ask(opened.key, "a")).status_code)

        monkeypatch.setattr(service.store, "opt_outs", read_slowly)
        monkeypatch.setattr(ActiveSessions, "held", hold)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await loads.wait()
                await service.http.post(f"/v1/sessions/{opened.session.session_id}/end")
                ends.set()
        assert statuses == [410]


async def test_a_session_is_not_idle_while_a_request_is_read(tmp_path):
    live = KEYS | {"idle_seconds": 0.2}
    async with scripted("One.", "Two.") as engine, live_service(tmp_path, [engine], live=live) as service:
        headers = {"authorization": f"Bearer {BARE}", "X-Session-Id": "u"}
        body = b'{"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}'

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:10]
            await anyio.sleep(1)  # in which the session would be closed several times over
            yield body[10:]

        async with httpx.AsyncClient(base_url=service.gateway_url, headers=headers, timeout=30) as http:
            answer = await http.post(
                "/v1/chat/completions", content=slowly(), headers={"content-length": str(len(body))}
            )
        assert answer.status_code == 200, answer.text
        assert (await service.show("chat:u")).counts.served == 1


async def test_a_request_that_comes_while_its_session_is_closed_goes_to_the_next_one(tmp_path, monkeypatch):
    live = KEYS | {"idle_seconds": 0.2}
    async with scripted("One.", "Two.") as engine, live_service(tmp_path, [engine], live=live) as service:
        store, closing, found, may_close = service.store, anyio.Event(), anyio.Event(), anyio.Event()
        close, find = store.close_session, store.latest_of_client

        async def close_slowly(*given: object) -> bool:
            closing.set()
            await may_close.wait()
            return await close(*given)

        async def find_and_say_so(*given: object) -> object:
            found.set()
            return await find(*given)

        await service.ask(BARE, "Hi", headers={"X-Session-Id": "u"})
        monkeypatch.setattr(store, "close_session", close_slowly)
        await closing.wait()
        monkeypatch.setattr(store, "latest_of_client", find_and_say_so)
        answers = []

        async def ask() -> None:
            answers.append(await service.ask(BARE, "Hi", "One.", "more", headers={"X-Session-Id": "u"}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await found.wait()
            await anyio.sleep(0.2)  # in which the session that it found would answer
            may_close.set()
        assert answers[0].status_code == 200, answers[0].text
        assert (await service.show("chat:u")).closed_because == "idle"
        assert (await service.show("chat:u~2")).continues == "chat:u"


async def test_feedback_wins_is_idempotent_and_does_not_change(tmp_path):
    async with scripted("One.") as engine, live_service(tmp_path, [engine]) as service:
        opened = await service.open()
        path = f"/v1/sessions/{opened.session.session_id}/feedback"
        assert (await service.http.post(path, json={"value": 1})).status_code == 404
        await service.ask(opened.key, "a")
        await delivered(service, opened.session.session_id, 1)
        first = await service.http.post(path, json={"value": 0.5, "text": "fine"})
        assert first.json() == {"turn": 0, "value": 0.5, "revised": False}
        assert (await service.http.post(path, json={"value": 0.5, "turn": 0})).status_code == 200
        assert (await service.http.post(path, json={"value": -1})).status_code == 409
        for wrong in ({"value": 2}, {"value": 1, "turn": 2**63}):
            assert (await service.http.post(path, json=wrong)).status_code == 422
        [mark] = (await service.show(opened.session.session_id)).turns
        assert (mark.value, mark.source, mark.usable) == (0.5, "explicit", True)


async def test_a_session_goes_on_after_a_restart_with_exact_ids(tmp_path):
    async with scripted("One.", "Two.") as engine:
        async with live_service(tmp_path, [engine]) as service:
            opened = await service.open()
            await service.ask(opened.key, "a")
        async with live_service(tmp_path, [engine]) as service:
            answer = await service.ask(opened.key, "a", "One.", "b")
            assert answer.status_code == 200
            turns = await delivered(service, opened.session.session_id, 2)
        [segment] = rebuild(ChatRenderer.load(POLICY), turns).trajectory().segments
        sampled = [token for token, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask]
        assert sampled == ChatRenderer.load(POLICY).encode(f"One.{END}Two.{END}")
        assert turns[0].next_state is not None


async def test_the_same_open_request_returns_the_session_without_its_key(tmp_path):
    async with scripted("One.") as engine, live_service(tmp_path, [engine]) as service:
        assert (await service.open(session_id="s", user="u")).key is not None
        assert (await service.open(session_id="s", user="u")).key is None
        for fields in ({"user": "v"}, {"user": "u", "train": False}, {"user": "u", "retention_seconds": 60}):
            other = await service.http.post("/v1/sessions", json={"session_id": "s"} | fields)
            assert other.status_code == 409, fields
        unknown = await service.http.post("/v1/sessions", json={"pool": "none"})
        assert unknown.status_code >= 400


async def test_too_many_sessions_or_requests_are_told_when_to_come_back(tmp_path):
    live = {"max_sessions": 1, "requests_per_minute": 1}
    async with scripted("One.") as engine, live_service(tmp_path, [engine], live=live) as service:
        answers: list[httpx.Response] = []
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(collect, answers, lambda: service.http.post("/v1/sessions", json={"user": "u"}))
        admitted, *refused = sorted(answers, key=lambda answer: answer.status_code)
        assert [(answer.status_code, int(answer.headers["retry-after"]) > 0) for answer in refused] == [(429, True)] * 4
        opened = OpenedSession.model_validate(admitted.json())
        assert (await service.ask(opened.key, "a")).status_code == 200
        limited = await service.ask(opened.key, "b")
        assert limited.status_code == 429
        assert limited.json()["error"]["code"] == "rate_limit_exceeded"
        assert 0 < int(limited.headers["retry-after"]) <= 60
        await service.http.post(f"/v1/sessions/{opened.session.session_id}/end")
        await service.open(user="v")


async def test_a_request_counts_as_the_answers_that_it_asks_for(tmp_path):
    live = {"requests_per_minute": 5}
    async with scripted(*["One."] * 5) as engine, live_service(tmp_path, [engine], live=live) as service:
        opened = await service.open(user="u")
        answered = await service.ask(opened.key, "a", n=3)
        assert len(answered.json()["choices"]) == 3
        refused = await service.ask(opened.key, "b", n=3)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 1
        assert (await service.ask(opened.key, "c")).status_code == 200
        assert "fewer" in refused.json()["error"]["message"]
