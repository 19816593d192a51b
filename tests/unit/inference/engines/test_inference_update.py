"""If an aborted request still held its KV while weights loaded, only the flush is repeated, not the load."""

import pytest
from aiohttp import web

from rollout_service.engines.errors import BackendRejected
from tests.support.engines.pools import answering

pytestmark = pytest.mark.anyio

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
