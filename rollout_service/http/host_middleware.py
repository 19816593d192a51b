"""The check of a request's host and origin: the first check of every server here, the embedded engine included.

Guarantees: a web page of another site cannot change anything here, and cannot read anything through a host name that it
points at this server (DNS rebinding). Plain ASGI, so streamed responses are never buffered.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_service.base.errors import ForbiddenError, MisdirectedError, RequestError
from rollout_service.http.allowed_hosts import SAFE_METHODS, AllowedHosts
from rollout_service.http.problems import problem_response, to_problem


class HostMiddleware:
    """Refuses requests for other hosts, and unsafe requests from web pages of other sites."""

    def __init__(
        self, app: ASGIApp, hosts: AllowedHosts, *, unsafe_get_paths: frozenset[str] = frozenset()
    ) -> None:
        """`unsafe_get_paths` are the paths that change something even by GET."""
        self._app = app
        self._hosts = hosts
        self._unsafe_get_paths = unsafe_get_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refuses(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        await problem_response(to_problem(error))(scope, receive, send)

    def _refuses(self, scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        host = headers.get("host")
        if not self._hosts.allows_host(host):
            return MisdirectedError(
                "the request's Host header names a host that this server does not answer for",
                hint="Use the server's address or `localhost`, or add the name to the setting `allowed_hosts`.",
            )
        if scope["method"] in SAFE_METHODS and scope["path"] not in self._unsafe_get_paths:
            return None
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if self._hosts.allows_origin(host=host, origin=origin, site=site):
            return None
        return ForbiddenError(
            "web pages of other sites may not send this request",
            hint="Add the site's host name to the setting `allowed_hosts`.",
        )
