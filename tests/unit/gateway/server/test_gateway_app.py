"""The gateway over real connections: keys, paths, bad requests, and clients that hang up at any byte."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
import orjson
import pytest
from anyio.abc import ByteStream
from prometheus_client import CollectorRegistry

from api_schemas.rollouts import RolloutRequest
from api_schemas.tasks import Task
from rollout_service.engines.serving.policies import PoolModel
from rollout_service.episodes import EpisodeLimits
from rollout_service.gateway.contract import Dialect
from rollout_service.gateway.gateway import ONE_PROGRAM, Gateway, GatewayParts
from rollout_service.gateway.metrics import GatewayMetrics
from rollout_service.gateway.server.listener import bind, serving
from rollout_service.gateway.sessions.session import GatewaySession
from rollout_service.http.protocol import RequestLimits
from rollout_service.settings.http import GatewaySettings
from rollout_service.tokens import ChatRenderer
from sandboxes.errors import SandboxClosedError
from tests.support.gateway.asgi import PATHS, gateway_bench
from tests.support.gateway.manual_pool import CharacterCapture, ManualPool
from tests.support.waiting import collect

SCHEMA = {"type": "object", "properties": {"total": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "name": "s", "schema": SCHEMA}
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
HI = [{"role": "user", "content": "hi"}]
SCHEMAS = {
    Dialect.CHAT: ({"messages": HI, "response_format": FORMAT | {"json_schema": FORMAT}}, [{"function": FUNCTION}]),
    Dialect.RESPONSES: ({"input": "hi", "text": {"format": FORMAT}}, [{"type": "function", **FUNCTION}]),
    Dialect.ANTHROPIC: (
        {"messages": HI, "output_format": FORMAT},
        [{"name": "add", "input_schema": {"type": "object"}}],
    ),
    Dialect.GOOGLE: (
        {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"responseJsonSchema": SCHEMA}},
        [{"functionDeclarations": [FUNCTION]}],
    ),
}
"""A request that asks for a schema in each dialect, and tools for it."""
REQUEST = RolloutRequest(rollout_id="r", task=Task(environment="calc"))
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BODY = {"model": "policy", "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Bench:
    gateway: Gateway
    session: GatewaySession
    pool: ManualPool
    capture: CharacterCapture
    http: httpx.AsyncClient

    async def post(self, path: str = CHAT, body: Any = BODY, **headers: str) -> httpx.Response:
        """Send a request with the session's key, unless the headers have another."""
        key = {"authorization": f"Bearer {self.session.key}"}
        return await self.http.post(path, content=orjson.dumps(body), headers=key | headers)

    async def answered(self, text: str, send: Callable[[], Any]) -> httpx.Response:
        """Send a request, and let the engine answer it."""
        answer: list[httpx.Response] = []
        number = len(self.pool.calls)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, answer, send)
            (await self.pool.call(number)).finish(text)
        return answer[0]


@asynccontextmanager
async def bench(renderer: ChatRenderer, **settings: Any) -> AsyncIterator[Bench]:
    pool, capture = ManualPool(), CharacterCapture()

    class Policies:
        def connect(self, pool_name: str) -> tuple[PoolModel, ManualPool]:
            return PoolModel(renderer, 1_000), pool

    parts = GatewayParts(
        settings=GatewaySettings(**settings),
        policies=Policies(),
        make_capture=lambda _: capture,
        metrics=GatewayMetrics(CollectorRegistry()),
        observe=lambda _: None,
    )
    gateway = Gateway(parts)
    with anyio.fail_after(60):
        async with gateway.running():
            session = gateway.open(REQUEST, EpisodeLimits())
            async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as http:
                yield Bench(gateway, session, pool, capture, http)
            gateway.close(session)
            await session.end()


async def test_the_key_may_be_wherever_a_client_puts_it(renderer):
    async with bench(renderer) as b:
        key = b.session.key
        wrong = {"authorization": "Bearer x" * 9}
        for path, headers in [
            (CHAT, {"authorization": f"bearer {key}"}),
            (CHAT, {"x-api-key": key}),
            (CHAT, {"x-goog-api-key": key}),
            (f"{CHAT}?key={key}", {}),
            (f"/s/{key}{CHAT}", wrong),
            (f"/s/{key}/chat/completions", {}),
            (f"/s/{key}/v1/v1/messages", {}),
        ]:
            answer = await b.answered("ok", lambda p=path, h=headers: b.http.post(p, json=BODY, headers=h))
            assert answer.status_code == 200, path
        assert [text for text, _ in b.capture.recorded] == ["ok"] * 7


async def test_wrong_and_ended_keys_are_told_in_the_form_of_each_api(renderer):
    async with bench(renderer) as b:
        for status, close in [(401, False), (410, True)]:
            headers = {"authorization": "Bearer wrong"} if not close else {}
            if close:
                b.gateway.close(b.session)
            chat = await b.post(CHAT, **headers)
            messages = await b.post(MESSAGES, **headers)
            assert (chat.status_code, messages.status_code) == (status, status)
            assert "message" in chat.json()["error"]
            assert messages.json()["type"] == "error"
        assert (await b.http.post(CHAT, json=BODY)).status_code == 401
        assert not b.pool.calls


async def test_bad_requests_are_refused(renderer):
    async with bench(renderer) as b:
        for path, body, status in [
            (CHAT, [], 400),
            (CHAT, {"model": "policy"}, 400),
            ("/v1/embeddings", {"input": "x"}, 404),
            ("/v1/chat/completions/more", BODY, 404),
        ]:
            answer = await b.post(path, body)
            assert (answer.status_code, bool(answer.json()["error"]["message"])) == (status, True), path
        assert (await b.http.post(CHAT, content=b"{", headers={"x-api-key": b.session.key})).status_code == 400
        assert not b.pool.calls


async def test_a_body_over_the_limit_is_refused_before_it_is_read(renderer):
    async with bench(renderer, max_body_bytes=10_000) as b:
        host, port = b.gateway.url.removeprefix("http://").split(":")
        for length in (b"content-length: 100000000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"):
            async with await anyio.connect_tcp(host, int(port)) as stream:
                await stream.send(_head(CHAT, b.session.key) + length)
                if b"chunked" in length:
                    await stream.send(b"2711\r\n" + b"x" * 10_001 + b"\r\n")
                assert (await stream.receive()).startswith(b"HTTP/1.1 413")
        assert (await b.answered("ok", b.post)).status_code == 200


async def test_start_up_calls_of_clients_are_answered(renderer):
    async with bench(renderer) as b:
        assert (await b.http.head("/")).status_code == 200
        key = {"authorization": f"Bearer {b.session.key}"}
        assert (await b.http.get("/v1/models")).status_code == 401
        models = (await b.http.get("/v1/models", headers=key)).json()
        assert [model["id"] for model in models["data"]] == ["policy"]
        anthropic = (await b.http.get("/v1/models", headers=key | {"anthropic-version": "x"})).json()
        assert [model["id"] for model in anthropic["data"]] == ["policy"]
        assert (await b.http.get("/v1/models/any", headers=key)).json()["id"] == "any"
        counted = await b.post("/v1/responses/input_tokens", {"model": "policy", "input": "hi"})
        assert counted.json() == {"object": "response.input_tokens", "input_tokens": 2}
        counted = await b.post(f"{MESSAGES}/count_tokens", BODY)
        assert counted.json() == {"input_tokens": 2}
        assert not b.capture.recorded


async def test_another_model_is_served_or_refused_as_the_settings_say(renderer):
    async with bench(renderer, unknown_model="refuse") as b:
        assert (await b.post(CHAT, BODY | {"model": "gpt"})).status_code == 404
        assert (await b.answered("ok", b.post)).status_code == 200
    async with bench(renderer) as b:
        assert (await b.answered("ok", lambda: b.post(CHAT, BODY | {"model": "gpt"}))).status_code == 200


async def test_a_session_is_served_alone_on_a_socket_of_its_own(renderer):
    async with bench(renderer) as b:
        other = b.gateway.open(REQUEST, EpisodeLimits())
        listener = bind("127.0.0.1", 0, "gateway")
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with other.serve(listener), httpx.AsyncClient(base_url=url) as http:
            assert (await http.get("/v1/models", headers={"x-api-key": b.session.key})).status_code == 401
            assert (await http.get("/v1/models", headers={"x-api-key": other.key})).status_code == 200
        assert listener.fileno() == -1
        b.gateway.close(other)


async def test_a_silent_answer_is_kept_alive(renderer):
    async with bench(renderer, keep_alive_seconds=0.05) as b:
        for path in (CHAT, MESSAGES):
            body, number = BODY | {"stream": True}, len(b.pool.calls)
            headers = {"x-api-key": b.session.key}
            async with b.http.stream("POST", path, json=body, headers=headers) as answer:
                received = answer.aiter_bytes()
                before = [await anext(received) for _ in range(4)]
                assert all(before)
                (await b.pool.call(number)).finish("done")
                rest = b"".join([chunk async for chunk in received])
            assert b"done" in rest


async def test_a_whole_answer_that_is_late_has_its_head_at_once_and_white_space_before(renderer):
    async with bench(renderer, keep_alive_seconds=0.05) as b:
        headers = {"x-api-key": b.session.key}
        async with b.http.stream("POST", CHAT, json=BODY, headers=headers) as answer:
            received = answer.aiter_bytes()
            assert (await anext(received)).strip() == b""
            (await b.pool.call(0)).finish("late")
            rest = b"".join([chunk async for chunk in received])
        assert orjson.loads(rest)["choices"][0]["message"]["content"] == "late"


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 1, 20, 60, 130, 200, 350, 600])
async def test_a_client_that_hangs_up_at_any_byte_gets_the_same_answer_again(renderer, cut):
    async with bench(renderer) as b:
        host, port = b.gateway.url.removeprefix("http://").split(":")
        body = orjson.dumps(BODY | {"stream": True})
        request = _head(CHAT, b.session.key) + b"content-length: %d\r\n\r\n" % len(body) + body
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(request)
            engine = await b.pool.call(0)
            engine.say("abc")
            await _read(stream, cut)
        engine.say("def")
        async with b.http.stream(
            "POST", CHAT, content=body, headers={"authorization": f"Bearer {b.session.key}"}
        ) as again:
            engine.finish("ghi")
            text = b"".join([chunk async for chunk in again.aiter_bytes()])
        assert _content(text) == "abcdefghi"
        assert len(b.pool.calls) == 1
        assert b.capture.recorded == [("abcdefghi", True)]


def _content(stream: bytes) -> str:
    chunks = [orjson.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def _head(path: str, key: str) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\nauthorization: Bearer {key}\r\n"
    ).encode()


async def _read(stream: ByteStream, count: int) -> None:
    """Read at least this many bytes, unless the answer so far has fewer."""
    read = 0
    with anyio.move_on_after(0.2):
        while read < count:
            read += len(await stream.receive(count - read))


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


async def test_an_error_of_the_block_reaches_its_caller_as_it_is():
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(trust_env=False) as client:

        async def serve_and_fail():
            async with serving(app, listener, ONE_PROGRAM, RequestLimits(), lambda _: None):
                assert (await client.get(url)).text == "here"
                raise SandboxClosedError("the disk is full")

        with pytest.raises(SandboxClosedError):
            await serve_and_fail()
        with pytest.raises(httpx.ConnectError):
            await client.get(url)


@pytest.mark.parametrize("dialect", SCHEMAS)
async def test_a_schema_is_forced_without_tools_and_told_beside_them(renderer, dialect):
    body, tools = SCHEMAS[dialect]
    async with gateway_bench(renderer) as b:
        assert (await b.post(PATHS[dialect], body)).status_code == 200
        assert (await b.post(PATHS[dialect], body | {"tools": tools})).status_code == 200
        forced, told = b.engine.requests
        assert orjson.loads(forced.sampling.json_schema) == SCHEMA
        assert told.sampling.json_schema is None
        prompts = [renderer.decode(list(request.input_ids)) for request in (forced, told)]
        assert [orjson.dumps(SCHEMA).decode() in prompt for prompt in prompts] == [False, True]
        (segment,) = b.session.trajectory().segments
        assert segment.token_ids[: len(told.input_ids)] == list(told.input_ids), "only the free turn is trained on"
