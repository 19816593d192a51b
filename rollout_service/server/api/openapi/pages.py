"""Serves the OpenAPI document at `/openapi.json`, and Swagger UI at `/docs`.

Guarantees: the browser loads nothing from another host, so the page works offline. The page itself needs no key,
since it shows only what is the same for every user of this release; it sends the key that is typed into it with each
request.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from rollout_service.server.api.openapi.document import build

ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # Swagger UI sets styles of single elements
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Rollout service</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="icon" href="docs/favicon.png">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
START = """\
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
});
"""


def install(app: FastAPI, *, keyed: bool, prefix: str = "") -> None:
    """Add the document and its page to an app that has all its routes."""

    @cache
    def document() -> bytes:
        return json.dumps(build(app, keyed=keyed, prefix=prefix), ensure_ascii=False).encode()

    def openapi(_: Request) -> Response:  # not a coroutine: building takes a while, so it runs in a thread
        return Response(document(), media_type="application/json")

    app.add_route("/openapi.json", openapi, include_in_schema=False)
    app.add_route("/docs", _page, include_in_schema=False)
    app.add_route("/docs/start.js", _fixed(START.encode(), "text/javascript"), include_in_schema=False)
    for name, media_type in ASSETS.items():
        app.add_route(f"/docs/{name}", _asset(name, media_type), include_in_schema=False)


def _page(_: Request) -> Response:
    return HTMLResponse(PAGE, headers={"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"})


def _fixed(content: bytes, media_type: str) -> Callable[[Request], Response]:
    return lambda _: Response(content, media_type=media_type, headers={"X-Content-Type-Options": "nosniff"})


def _asset(name: str, media_type: str) -> Callable[[Request], Response]:
    @cache
    def content() -> bytes:
        return (files("fastapi_offline") / "static" / name).read_bytes()

    return lambda request: _fixed(content(), media_type)(request)
