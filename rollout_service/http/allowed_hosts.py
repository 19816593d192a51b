"""The hosts that a server answers for, and the web sites whose pages may change something.

A page of another site, shown by a browser on this machine, cannot change anything here, and cannot read anything
through a host name that it points at this server (DNS rebinding). Other programs notice nothing if they name the server
by an address, a loopback name, or an allowed name.

A name is allowed when it is listed. Without a list, a server with keys answers to any name: a browser does not send a
key by itself, so a page gains nothing from the name, and trainers on other nodes use names that this process cannot
know. A server without keys listens on loopback and answers to the names of this machine. Addresses are always allowed,
since no web site can choose one as its name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_service.base.errors import ForbiddenError, MisdirectedError, RequestError
from rollout_service.http.problems import problem_response, to_problem

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OTHER_SITES = frozenset({"cross-site", "same-site"})
"""Sec-Fetch-Site of other sites' pages; `same-site` means another port or a sibling domain."""
REMEMBERED = 64
"""Clients name the same few hosts with every request."""


class AllowedHosts:
    def __init__(self, listed: Iterable[str], *, bound: str, keyed: bool) -> None:
        """`listed` has names and `*.NAME`; `bound` is the server's address, `keyed` whether it asks for keys."""
        self._listed = frozenset(name.lower().rstrip(".") for name in listed)
        self._own = frozenset({"localhost", bound.lower(), socket.gethostname().lower()})
        self._any = keyed and not self._listed
        self._remembered = lru_cache(REMEMBERED)(self._allows)

    def allows_host(self, host: str | None) -> bool:
        """Return whether a request may name this host, with or without a port; HTTP/1.0 may name none."""
        return host is None or self._any or self._remembered(host)

    def _allows(self, host: str) -> bool:
        name = _hostname(f"//{host}")
        if name is None:
            return False
        return name in self._own or name.endswith(".localhost") or _is_address(name) or self._has(name)

    def allows_origin(self, *, host: str | None, origin: str | None, site: str | None) -> bool:
        """Return whether a page of this origin may send a request that changes something.

        `origin` and `site` are the headers Origin and Sec-Fetch-Site, which only browsers send.
        """
        if origin is None:
            return site not in OTHER_SITES
        name = _hostname(origin)
        if name is not None and self._has(name):
            return True
        return site not in OTHER_SITES and _is_same(origin, host)

    def _has(self, name: str) -> bool:
        return name in self._listed or any(
            name.endswith(listed.removeprefix("*")) for listed in self._listed if listed.startswith("*.")
        )


def _is_same(origin: str, host: str | None) -> bool:
    """Compare an origin with the requested host, without schemes, which differ behind a TLS proxy."""
    parts = _split(origin)
    return parts is not None and bool(host) and parts.netloc.lower() == str(host).lower()


def _hostname(url: str) -> str | None:
    parts = _split(url)
    name = None if parts is None or "@" in parts.netloc else parts.hostname
    return name.rstrip(".") if name else None


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises ValueError where it is not a number
    except ValueError:
        return None
    return parts


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class HostMiddleware:
    """Refuses requests for other hosts, and unsafe requests from web pages of other sites.

    The first check of every server here, the embedded engine included. Plain ASGI, so streamed responses are never
    buffered.
    """

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, *, unsafe_get_paths: frozenset[str] = frozenset()) -> None:
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
