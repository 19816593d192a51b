"""Middleware of every route: authentication, limits on bodies, and request metrics.

With keys configured, only the probes, the API's description and the dashboard's files answer without one, and only the
model APIs of a live session to the session's own key. Keys are compared in constant time. All are plain ASGI,
so streamed responses are never buffered.
"""

from __future__ import annotations

from functools import partial
from http import HTTPStatus

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_service.base.errors import (
    ForbiddenError,
    MediaTypeError,
    TooLargeError,
    TooManyBytesError,
    UnauthorizedError,
    UnavailableError,
)
from rollout_service.gateway.server.paths import GatewayRequest
from rollout_service.http.connections import find_slot
from rollout_service.http.keyring import ApiKey, Keyring, Role, needed_role
from rollout_service.http.problems import problem_response, to_problem
from rollout_service.http.requests import BodiesInFlight, HeldBytes
from rollout_service.live.serving.app import MAY_USE_ALL, is_session_call
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.server.api.routes.support.route import BODY_IS_PARSED

OWN_HEADER = "x-rollout-key"
PROBES = frozenset({"/health", "/ready"})
PAGES = frozenset({"/openapi.json", "/docs", "/", "/dashboard"})
"""Open paths: the same for every user of this release, and a browser needs them before a key can be typed in."""
FILES = ("/docs/", "/dashboard/")
LARGE_BODIES = ("/v1/rollouts", "/v1/runs", "/v1/rescore", "/v1/weights", "/process")
"""The paths, with all below them, whose bodies hold tasks, rollouts, or the names of all tensors of a model."""
SMALL_BODY_BYTES = 1024 * 1024
"""The largest body of all other paths: parsing one may hold up everything else for a tenth of a second."""


class BearerAuthMiddleware:
    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            self._admit(scope)
        except UnauthorizedError as error:
            await problem_response(to_problem(error), {"WWW-Authenticate": "Bearer"})(scope, receive, send)
        except ForbiddenError as error:
            await problem_response(to_problem(error))(scope, receive, send)
        except UnavailableError as error:
            headers = {"Retry-After": "1", "Connection": "close"}
            await problem_response(to_problem(error), headers)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        if is_session_call(scope):
            self._note_role(scope)
            return  # its connection is admitted once the session is found
        if self._keyring.is_needed:
            key = self._key(Headers(scope=scope))
            needed = needed_role(scope["method"], scope["path"])
            if not key.role.allows(needed):
                raise ForbiddenError(
                    f"the key {key.name!r} has the role {key.role}; this request needs {needed}",
                    hint=f"Use a key with the role {needed}.",
                    context={"role": key.role, "needed": needed},
                )
            scope.setdefault("state", {}).update(role=key.role, is_allowed=partial(self._keyring.has, key))
        slot = find_slot(scope)
        if slot is not None and not slot.admit():
            raise UnavailableError(
                "all connections are busy",
                hint="Try again later, or raise the setting `http.max_connections`.",
            )

    def _note_role(self, scope: Scope) -> None:
        """Note whether a call of a session has a key of the service; else it needs the session's own."""
        key = self._keyring.find(GatewayRequest.of(scope).key)
        may = not self._keyring.is_needed or (key is not None and key.role.allows(Role.SUBMIT))
        scope.setdefault("state", {})[MAY_USE_ALL] = may

    def _key(self, headers: Headers) -> ApiKey:
        # Portals in front of the service may use `Authorization` themselves, so our own header wins.
        scheme, given = "bearer", headers.get(OWN_HEADER)
        if given is None:
            scheme, _, given = headers.get("authorization", "").partition(" ")
        key = self._keyring.find(given.strip())
        if key is None or scheme.lower() != "bearer":
            raise UnauthorizedError(
                "the bearer key is missing or wrong",
                hint="Send the header `Authorization: Bearer KEY` with one of the configured keys.",
            )
        return key


def _is_open(path: str) -> bool:
    return path in PROBES or path in PAGES or path.startswith(FILES)


class JsonBodyMiddleware:
    """Refuses bodies of other media types, which a web page could send without a CORS preflight."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_json(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = MediaTypeError(
            "the body's content type is not JSON", hint="Send it with `Content-Type: application/json`."
        )
        await problem_response(to_problem(error))(scope, receive, send)


def _is_json(headers: Headers) -> bool:
    """Return whether the body is JSON, or none."""
    if "transfer-encoding" not in headers and headers.get("content-length", "0") == "0":
        return True
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


class BodyLimitMiddleware:
    """Refuses bodies over a limit: at once if their length is announced, otherwise while they are read.

    Bodies that are received or parsed at once also share a limit, and wait for each other.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_bytes_in_flight: int) -> None:
        """`max_bytes` is for `LARGE_BODIES`; all others have `SMALL_BODY_BYTES`, if that is less."""
        self._app = app
        self._max_bytes = max_bytes
        self._bodies = BodiesInFlight(max_bytes_in_flight, max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        announced = headers.get("content-length", "")
        if announced in ("", "0") and "transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        most = self._max_bytes if scope["path"].startswith(LARGE_BODIES) else min(self._max_bytes, SMALL_BODY_BYTES)
        if announced.isdecimal() and int(announced) > most:
            await problem_response(to_problem(_too_large(most)))(scope, receive, send)
            return
        with self._bodies.reading(headers.get(OWN_HEADER) or headers.get("authorization")) as held:
            scope.setdefault("state", {})[BODY_IS_PARSED] = held.release
            await self._app(scope, _bounded(receive, held, most), send)


def _bounded(receive: Receive, held: HeldBytes, most: int) -> Receive:
    read = 0

    async def receive_bounded() -> Message:
        nonlocal read
        message = await receive()
        if message["type"] != "http.request":
            return message
        read += len(message.get("body", b""))
        # FastAPI turns anything but its own exception into "there was an error parsing the body".
        if read > most:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(_too_large(most)))
        try:
            await held.grow_to(read)
        except TooManyBytesError as error:
            raise HTTPException(error.status) from error
        return message

    return receive_bounded


def _too_large(most: int) -> TooLargeError:
    raised = "" if most == SMALL_BODY_BYTES else ", or raise the setting `max_body_bytes`"
    return TooLargeError(f"the body is larger than {most} bytes; send less at once{raised}")


class RequestMetricsMiddleware:
    """Counts requests by route template: raw paths have ids, each of which would create a time series."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "unknown")
                self._metrics.count_request(scope["method"], route, message["status"])
            await send(message)

        await self._app(scope, receive, count)


class PathPrefixMiddleware:
    """Removes a path prefix that a proxy leaves on requests, such as `/node/HOST/8080` of Open OnDemand.

    Keys, roles and routes see the path without it; redirections get it back. Paths without the prefix are served as
    they are, for direct callers and for proxies that remove it. A prefix spelled differently, with escapes or twice, is
    not one.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        """`prefix` begins with a slash and does not end with one; an empty one means none."""
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
        """Check the path both decoded and as sent."""
        path, raw = scope["path"] + "/", _raw(scope) + b"/"
        return path.startswith(f"{self._prefix}/") and raw.startswith(f"{self._prefix}/".encode())

    def _redirect(self, headers: MutableHeaders) -> None:
        """Add the prefix to a redirection within this server, which becomes relative to the host."""
        location = headers.get("location")
        if location is None:
            return
        path = location.partition("://")[2].partition("/")[2] if "://" in location else location[1:]
        headers["location"] = f"{self._prefix}/{path}"


def _raw(scope: Scope) -> bytes:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.partition(b"?")[0]
