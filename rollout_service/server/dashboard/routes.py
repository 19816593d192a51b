"""Serves the dashboard's page at `/`, and its files below `/dashboard/`.

Only the files of this folder are served, by names listed when the service started, so no path leads anywhere else. They
are the same for every user of a release and need no key; the data comes from the API, which does. The browser loads
nothing from other hosts, and runs no script but these files.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'self'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # revalidated each time, mostly with a 304
}
MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
"""The types of files that are served; others, such as licenses, are not."""
INDEX = "index.html"

Answer = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class StaticFile:
    content: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        headers = HEADERS | {"ETag": self.etag}
        known = request.headers.get("if-none-match", "")
        if self.etag in {tag.strip().removeprefix("W/") for tag in known.split(",")}:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


@cache
def static_files() -> dict[str, StaticFile]:
    return dict(_walk(files("rollout_service.server.dashboard") / "static", ""))


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, StaticFile]]:
    found = []
    for entry in folder.iterdir():
        media_type = MEDIA_TYPES.get("." + entry.name.rpartition(".")[2])
        if entry.is_dir():
            found += _walk(entry, f"{prefix}{entry.name}/")
        elif media_type:
            content = entry.read_bytes()
            etag = f'"{sha256(content).hexdigest()[:32]}"'
            found.append((prefix + entry.name, StaticFile(content, media_type, etag)))
    return found


def install(app: FastAPI) -> None:
    known = static_files()

    async def page(request: Request) -> Response:
        return known[INDEX].answer(request)

    async def file(request: Request) -> Response:
        found = known.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return found.answer(request)

    async def to_page(_: Request) -> Response:
        # Relative, so it also works behind a proxy that strips a prefix.
        return Response(status_code=307, headers=HEADERS | {"Location": "./"})

    routes: dict[str, Answer] = {"/": page, "/dashboard": to_page, "/dashboard/{name:path}": file}
    for path, answer in routes.items():
        app.add_route(path, answer, include_in_schema=False)
