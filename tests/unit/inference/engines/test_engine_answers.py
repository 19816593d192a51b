"""The service bounds what it reads and repeats from an engine, or from another program at its address."""

import threading

import pytest
from aiohttp import web
from pydantic import ValidationError

from api_schemas.inference import BackendSpec
from rollout_service.engines.contract import RequestedExtras
from rollout_service.engines.errors import BackendProtocolError, BackendRejected, InferenceError, PromptTooLong
from rollout_service.engines.kinds.http_backend import INLINE_BYTES
from rollout_service.engines.kinds.token_stream import CEILING_BYTES, TokenStream, generation_bytes
from rollout_service.engines.pool.pools import Pools
from tests.support.engines.pools import answering, request

pytestmark = pytest.mark.anyio

SECRET = "the-secret-of-another-service"


@pytest.mark.parametrize("status", [200, 302, 404, 500])
@pytest.mark.parametrize("kind", ["text/plain", "application/json"])
async def test_another_services_message_is_not_repeated(status: int, kind: str) -> None:
    async def secret(_: web.Request) -> web.Response:
        text = SECRET if kind == "text/plain" else f'{{"detail": "{SECRET}"}}'
        return web.Response(status=status, text=text, content_type=kind)

    async with answering(secret) as engine, Pools() as pools:
        with pytest.raises(InferenceError) as caught:
            await pools.register(engine.url)
        assert SECRET not in f"{caught.value} {caught.value.hint} {caught.value.context}"


async def test_an_engines_error_message_is_repeated_in_part() -> None:
    async def refuse(_: web.Request) -> web.Response:
        message = "no room \x1b]0;title\x07" + "x" * 100_000
        return web.json_response({"error": {"message": message}}, status=400)

    async with answering(refuse) as backend:
        with pytest.raises(BackendRejected, match="no room") as caught:
            await backend.generate(request())
    assert len(str(caught.value)) < 1_000
    assert str(caught.value).isprintable()


async def test_a_request_that_sglang_refuses_in_a_stream_is_refused() -> None:
    async def refuse(_: web.Request) -> web.Response:
        text = 'data: {"error": {"message": "longer than the model\'s context length"}}\n\ndata: [DONE]\n\n'
        return web.Response(text=text, content_type="text/event-stream")

    async with answering(refuse) as backend:
        with pytest.raises(PromptTooLong):
            await backend.generate(request(), on_tokens=print)


class ThreadNoting(TokenStream):
    """Notes the thread that reads the answer, in place of the answer."""

    def take(self, chunk): ...

    def whole(self, engine_seconds):
        return threading.get_ident()

    def end(self, generation): ...


@pytest.mark.parametrize("size", [INLINE_BYTES, INLINE_BYTES + 1])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_large_answer_is_read_outside_the_event_loop(is_streamed, size):
    async def fill(_: web.Request) -> web.Response:
        done = b"[DONE]"
        events = b"data: " + b"{}".ljust(size - len(done)) + b"\n\ndata: " + done + b"\n\n"
        return web.Response(body=events if is_streamed else b"{}".ljust(size))

    asked = request(1_000)
    stream = ThreadNoting(asked, None, "b", print) if is_streamed else None
    async with answering(fill) as backend:
        thread = await backend._ask("/generate", {}, asked, stream, lambda *_: threading.get_ident())
    assert (thread == threading.get_ident()) == (size == INLINE_BYTES)


async def test_an_answer_without_end_is_an_error_before_it_fills_the_memory() -> None:
    sent = 0

    async def flood(http: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(http)
        try:
            while sent < 1 << 30:
                await answer.write(b" " * 65_536)
                sent += 65_536
        except OSError:
            pass
        return answer

    async with answering(flood) as backend:
        with pytest.raises(BackendProtocolError, match="/generate answered with more than"):
            await backend.generate(request())
        with pytest.raises(BackendProtocolError, match="/model_info answered with more than"):
            await backend.model_info()
    assert sent < 64 << 20


def test_the_size_of_an_answer_follows_what_was_asked_for() -> None:
    plain = generation_bytes(request(1_000), None)
    assert plain >= 1_000 * 1_024
    assert generation_bytes(request(1_000, extras=RequestedExtras(top_logprobs=5)), None) > plain
    assert generation_bytes(request(1_000, extras=RequestedExtras(prompt_logprobs_from=0)), None) > plain
    routed = RequestedExtras(routed_experts_from=0)
    assert generation_bytes(request(10**6, extras=routed), None) == CEILING_BYTES


@pytest.mark.parametrize("tail", ["?key=1", "#part", "?"])
@pytest.mark.parametrize("user", ["", "me@", "me:secret@"])
def test_an_address_is_scheme_host_port_and_path(user: str, tail: str) -> None:
    with pytest.raises(ValidationError, match="no user, query or fragment"):
        BackendSpec.model_validate({"url": f"http://{user}127.0.0.1:30000/{tail}"})


BUSY = "Weights were updated, but the cache was not flushed because requests are still running or queued."


class Engine:
    """Refuses updates with a message, and records each request."""

    def __init__(self, refusal: str) -> None:
        self.asked: list[str] = []
        self._refusal = refusal

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.path == "/update_weights_from_disk":
            return web.json_response({"success": False, "message": self._refusal}, status=400)
        if request.path == "/flush_cache":
            assert float(request.query["timeout"]) > 0
            return web.Response(text="Cache flushed.")
        assert await request.json() == {"new_version": "3", "abort_all_requests": False}
        return web.json_response({"success": True})


async def test_a_flush_that_came_too_early_is_asked_for_again() -> None:
    engine = Engine(BUSY)
    async with answering(engine.answer) as backend:
        await backend.update_weights("/weights", 3)
    assert engine.asked == ["/update_weights_from_disk", "/flush_cache", "/update_weight_version"]


@pytest.mark.parametrize(("refusal", "flush"), [("no such folder", True), (BUSY, False)])
async def test_other_refusals_are_rejections(refusal: str, flush: bool) -> None:
    engine = Engine(refusal)
    async with answering(engine.answer) as backend:
        with pytest.raises(BackendRejected):
            await backend.update_weights("/weights", 3, flush_cache=flush)
    assert engine.asked == ["/update_weights_from_disk"]
