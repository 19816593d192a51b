"""A reverse proxy that serves another server below a prefix, as portals of clusters and notebooks do."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.support.browser.fake_service import served

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


@contextmanager
def prefix_proxy(target: str, prefix: str) -> Iterator[str]:
    """Serve `target` below a prefix, which the proxy takes away; yield the address of the page.

    Nothing is served outside the prefix, so a page that asks for an absolute path fails.
    """

    async def forward(request: Request) -> Response:
        path = request.url.path.removeprefix(prefix)
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_BY_HOP]
        opened = httpx.AsyncClient(base_url=target, timeout=None)
        sent = opened.build_request(
            request.method,
            httpx.URL(path, query=request.url.query.encode()),
            headers=headers,
            content=await request.body(),
        )
        answer = await opened.send(sent, stream=True)

        async def body() -> AsyncIterator[bytes]:
            async for piece in answer.aiter_raw():
                yield piece

        async def close() -> None:
            await answer.aclose()
            await opened.aclose()

        kept = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP}
        return StreamingResponse(body(), answer.status_code, kept, background=BackgroundTask(close))

    with served(Starlette(routes=[Route(prefix + "/{path:path}", forward, methods=METHODS)])) as url:
        yield url.rstrip("/") + prefix + "/"
