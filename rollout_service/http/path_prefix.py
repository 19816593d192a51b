"""A path prefix that a proxy leaves on requests, such as `/node/HOST/8080` of Open OnDemand.

Guarantees: it is taken off before anything else looks at the path, so keys, roles and routes see the same path as
without a proxy. A path without the prefix is served as it is, for callers that reach the server directly and for
proxies that take the prefix off. A prefix that is spelled differently, with escapes or twice, is not one.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class PathPrefixMiddleware:
    """Takes the prefix off requests, and puts it before the paths of redirections."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        """`prefix` begins with a slash and does not end with one; it is empty for none."""
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._prefix or scope["type"] != "http" or not self._is_below(scope):
            await self._app(scope, receive, send)
            return
        if scope["path"] == self._prefix:  # the page's own links are relative to a folder
            await Response(status_code=307, headers={"Location": f"{self._prefix}/"})(scope, receive, send)
            return
        stripped = {
            **scope,
            "path": scope["path"][len(self._prefix) :],
            "raw_path": _raw(scope)[len(self._prefix) :],
        }

        async def redirected(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._redirect(MutableHeaders(scope=message))
            await send(message)

        await self._app(stripped, receive, redirected)

    def _is_below(self, scope: Scope) -> bool:
        """Return whether the path, decoded and as it was sent, begins with the prefix as a whole."""
        path, raw = scope["path"] + "/", _raw(scope) + b"/"
        return path.startswith(f"{self._prefix}/") and raw.startswith(f"{self._prefix}/".encode())

    def _redirect(self, headers: MutableHeaders) -> None:
        """Put the prefix before the path of a redirection within this server, which becomes relative to the host."""
        location = headers.get("location")
        if location is None:
            return
        path = location.partition("://")[2].partition("/")[2] if "://" in location else location[1:]
        headers["location"] = f"{self._prefix}/{path}"


def _raw(scope: Scope) -> bytes:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.partition(b"?")[0]
