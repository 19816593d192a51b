"""If an aborted request still held its KV while weights loaded, only the flush is repeated, not the load."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from rollout_service.engines.errors import BackendRejected
from rollout_service.engines.kinds.sglang.backend import SGLangBackend

pytestmark = pytest.mark.anyio

BUSY = "Weights were updated, but the cache was not flushed because requests are still running or queued."


class Engine:
    """Refuses updates with a message, and records each request."""

    def __init__(self, refusal: str) -> None:
        self.asked: list[str] = []
        self._refusal = refusal

    async def update(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        return web.json_response({"success": False, "message": self._refusal}, status=400)

    async def flush(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        assert float(request.query["timeout"]) > 0
        return web.Response(text="Cache flushed.")

    async def set_version(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        assert await request.json() == {"new_version": "3", "abort_all_requests": False}
        return web.json_response({"success": True})


async def serving(engine: Engine) -> AsyncIterator[SGLangBackend]:
    app = web.Application()
    app.router.add_post("/update_weights_from_disk", engine.update)
    app.router.add_post("/flush_cache", engine.flush)
    app.router.add_post("/update_weight_version", engine.set_version)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    backend = SGLangBackend(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield backend
    finally:
        await backend.close()
        await runner.cleanup()


async def test_a_flush_that_came_too_early_is_asked_for_again() -> None:
    engine = Engine(BUSY)
    async for backend in serving(engine):
        await backend.update_weights("/weights", 3)
    assert engine.asked == ["/update_weights_from_disk", "/flush_cache", "/update_weight_version"]


@pytest.mark.parametrize(("refusal", "flush"), [("no such folder", True), (BUSY, False)])
async def test_other_refusals_are_rejections(refusal: str, flush: bool) -> None:
    engine = Engine(refusal)
    async for backend in serving(engine):
        with pytest.raises(BackendRejected):
            await backend.update_weights("/weights", 3, flush_cache=flush)
    assert engine.asked == ["/update_weights_from_disk"]
