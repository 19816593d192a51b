"""Sessions under pauses, clients that go away at any byte, and a service that is killed: nothing is lost or doubled."""

import json
from typing import Any

import anyio
import anyio.to_thread
import httpx
from anyio.abc import SocketStream

from api_schemas.rollouts.sessions import MaskReason
from rollout_service.base.errors import StoreError
from rollout_service.live.contract import TurnRecord
from rollout_service.live.replay import rebuild
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.tokens import ChatRenderer
from tests.support.gateway.service import END, POLICY, scripted
from tests.support.live.service import LiveService, delivered, live_service
from tests.support.waiting import until

TEXT = "seven words are said in this answer"
RENDERER = ChatRenderer.load(POLICY)
AT_ONCE = 16


async def pause(service: LiveService, order: str) -> None:
    answer = await service.http.post(f"/v1/{order}", json={"pool": "policy"})
    assert answer.status_code == 200


def sampled(turns: list[TurnRecord] | Any) -> dict[int, list[int]]:
    """Return the sampled ids of all stored turns by their ids."""
    capture = rebuild(RENDERER, turns)
    return {turn: recorded.turn.output_ids for turn, recorded in capture.turns.items()}


async def test_a_delivery_that_the_store_could_not_note_is_noted_when_the_answer_comes_back(tmp_path, monkeypatch):
    failed = []

    async def fail(_: SqliteLiveStore, session_id: str, turn: int) -> None:
        failed.append((session_id, turn))
        raise StoreError("the disk is full", hint="Free some space.")

    async with scripted("One.", "Two.") as engine, live_service(tmp_path, [engine]) as service:
        opened = await service.open()
        with monkeypatch.context() as full:
            full.setattr(SqliteLiveStore, "deliver", fail)
            await service.ask(opened.key, "a")
            await until(lambda: failed)
        await service.ask(opened.key, "a", "One.", "b")
        turns = await delivered(service, opened.session.session_id, 2)
        assert turns[0].next_state is not None


async def test_a_paused_pool_holds_a_request_and_then_refuses_it(tmp_path):
    live = {"hold_seconds": 0.3}
    async with scripted(TEXT) as engine, live_service(tmp_path, [engine], live=live) as service:
        opened = await service.open()
        await pause(service, "pause")
        refused = await service.ask(opened.key, "a")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "service_unavailable"
        stream = await service.ask(opened.key, "b", stream=True)
        assert stream.status_code == 200
        assert '"code":"service_unavailable"' in stream.text
        assert "[DONE]" not in stream.text
        assert not await service.turns(opened.session.session_id)
        await pause(service, "resume")
        assert (await service.ask(opened.key, "a")).status_code == 200
        assert (await service.show(opened.session.session_id)).counts.served == 1
        metrics = (await service.http.get("/metrics")).text
        assert 'rollout_live_held_seconds_count{outcome="refused",pool="policy"} 2.0' in metrics


def request_bytes(key: str) -> bytes:
    body = json.dumps({"model": "p", "stream": True, "messages": [{"role": "user", "content": "Go."}]}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def read(url: str, key: str, most: int | None, begun: int = 0) -> bytes:
    """Send a request, read up to so many bytes of its answer, or all, and close the connection.

    With `begun`, read until the answer has so many pieces of text.
    """
    address = httpx.URL(url)
    async with await anyio.connect_tcp(address.host, address.port or 0) as connection:
        await connection.send(request_bytes(key))
        data = b""
        while (most is None or len(data) < most) and not data.endswith(b"0\r\n\r\n"):
            if begun and data.count(b'"content":"') > begun:
                break
            data += await connection.receive(65_536 if most is None else most - len(data))
        _close_at_once(connection)
    return data


def _close_at_once(connection: SocketStream) -> None:
    from socket import SO_LINGER, SOL_SOCKET

    raw = connection.extra(anyio.abc.SocketAttribute.raw_socket)
    raw.setsockopt(SOL_SOCKET, SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


def said(stream: bytes) -> str:
    """Return the text of a whole streamed answer."""
    chunks = [line for line in stream.decode().splitlines() if line.startswith("data: {")]
    deltas = [json.loads(chunk.removeprefix("data: "))["choices"] for chunk in chunks]
    return "".join(choice["delta"].get("content") or "" for choices in deltas for choice in choices)


async def test_a_client_may_go_away_at_every_byte_and_ask_again(tmp_path):
    async with scripted(TEXT) as engine, live_service(tmp_path, [engine]) as service:
        whole = await read(service.gateway_url, (await service.open()).key or "", None)
        assert said(whole) == TEXT
        limit = anyio.CapacityLimiter(AT_ONCE)
        wrong: list[Any] = []

        async def cut(at: int) -> None:
            async with limit:
                opened = await service.open(session_id=f"s-{at}")
                await read(service.gateway_url, opened.key or "", at)
                again = await read(service.gateway_url, opened.key or "", None)
                turns = await service.turns(f"s-{at}")
                ids = sampled(turns)
                if said(again) != TEXT or any(each != RENDERER.encode(TEXT + END) for each in ids.values()):
                    wrong.append((at, said(again), ids))

        async with anyio.create_task_group() as tasks:
            for at in range(1, len(whole)):
                tasks.start_soon(cut, at)
        assert not wrong
        counts = (await service.http.get("/v1/sessions")).json()["counts"]
        assert counts["served"] == counts["waiting"] + sum(counts["dropped"].values())


async def test_an_answer_that_its_client_did_not_get_is_superseded(tmp_path):
    gateway = {"retry_seconds": 0.0}
    async with (
        scripted(TEXT, latency=0.5) as engine,
        live_service(tmp_path, [engine], gateway=gateway) as service,
    ):
        opened = await service.open()
        await read(service.gateway_url, opened.key or "", None, begun=1)
        assert said(await read(service.gateway_url, opened.key or "", None)) == TEXT

        async def settled() -> bool:
            turns = await service.turns(opened.session.session_id)
            return [(turn.mask, turn.delivered) for turn in turns] == [
                (MaskReason.SUPERSEDED, False),
                (None, True),
            ]

        await until(settled, 10)
        ids = sampled(await service.turns(opened.session.session_id))
        expected = RENDERER.encode(TEXT + END)
        assert ids[1] == expected
        assert ids[0] == expected[: len(ids[0])]
