"""The ASGI app of E2B's API, and its listener.

Guarantees: a request for sandboxes needs a key of the service with at least the role `submit`, and one to a sandbox
that sandbox's own token; both are compared in constant time. Whoever has neither learns of a sandbox at most that its
id is in use. No more of a body is read than is allowed, nor of all bodies together.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import structlog
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.filesystem.filesystem_connect import FilesystemASGIApplication
from e2b.envd.process.process_connect import ProcessASGIApplication
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_schemas.errors import sentences
from rollout_service.base.errors import (
    ConfigurationError,
    ForbiddenError,
    InvalidFieldError,
    NotFoundError,
    RequestError,
    ServiceError,
    TooLargeError,
    TryLaterError,
    UnauthorizedError,
    UnavailableError,
)
from rollout_service.cluster.node import Node
from rollout_service.gateway.server.listener import HEAD_SECONDS, address_of, bind, serving
from rollout_service.http.access_log import AccessLogMiddleware
from rollout_service.http.allowed_hosts import AllowedHosts, HostMiddleware
from rollout_service.http.connections import ConnectionLimits, descriptor_limit, find_slot
from rollout_service.http.keyring import Keyring, Role
from rollout_service.http.problems import to_problem
from rollout_service.http.protocol import Observe, RequestLimits
from rollout_service.http.requests import BodiesInFlight, HeldBytes
from rollout_service.server.e2b.boxes import Box, Boxes
from rollout_service.server.e2b.commands import ProcessCalls
from rollout_service.server.e2b.control import ControlApi
from rollout_service.server.e2b.files import FilesystemCalls
from rollout_service.server.e2b.transfer import read_file, write_files
from rollout_service.settings import Settings
from sandboxes import (
    DiskFullError,
    FileMissingError,
    FileStalledError,
    FileTooLargeError,
    ImageError,
    ImageNotFoundError,
    SandboxClosedError,
    SandboxConfigError,
    SandboxError,
    SandboxFileError,
)
from sandboxes.config import LimitDefaults

PORT = "49983"
"""The port of E2B's daemon, the only one that is served."""
MESSAGE_BYTES = 4 * 1024 * 1024
"""The most of a message to a sandbox, and of a request for one."""
STREAM = "/process.Process/StreamInput"
DAEMON = ("/process.Process/", "/filesystem.Filesystem/")
USERS = frozenset({"", "user", "root"})
"""The users that programs may name: all are the sandbox's own."""
DESCRIPTOR_SHARE = 8
"""The connections take at most this part of the descriptors that the service may open."""
STATUS: tuple[tuple[type[SandboxError], int], ...] = (
    (ImageNotFoundError, 404),
    (ImageError, 400),
    (SandboxConfigError, 400),
    (SandboxClosedError, 502),
    (DiskFullError, 507),
    (FileMissingError, 404),
    (FileTooLargeError, 413),
    (FileStalledError, 504),
    (SandboxFileError, 400),
)
log = structlog.get_logger(__name__)


class E2BApp:
    """Answers programs that use the package `e2b`; an ASGI application."""

    def __init__(self, boxes: Boxes, keyring: Keyring, control: ControlApi) -> None:
        self._boxes = boxes
        self._keyring = keyring
        self._control = Router(control.routes(), redirect_slashes=False)
        self._bodies = BodiesInFlight(boxes.settings.max_bytes_in_flight, MESSAGE_BYTES)
        self._processes = ProcessASGIApplication(ProcessCalls(self._box_of), read_max_bytes=MESSAGE_BYTES)
        self._files = FilesystemASGIApplication(FilesystemCalls(self._box_of), read_max_bytes=MESSAGE_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; see ASGI."""
        if scope["type"] != "http":
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._answer(scope, receive, watched)
        except ClientDisconnect:
            pass
        except Exception as error:
            if begun:
                raise
            await _refusal(error)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        if path != "/health" and path != "/files" and not path.startswith(DAEMON):
            owner = self._owner(headers)
            scope.setdefault("state", {})["owner"] = owner
            app: ASGIApp = self._control
        else:
            box = self._box(headers)
            owner, app = box.owner, self._app(box, scope)
        if (slot := find_slot(scope)) is not None and not slot.admit():
            raise UnavailableError("all connections are busy", hint="Try again later.")
        if path in ("/files", STREAM):  # read in pieces, as fast as the sandbox takes them
            await app(scope, receive, send)
            return
        with self._bodies.reading(owner) as held:
            await app(scope, _bounded(receive, held, is_call=path.startswith(DAEMON)), send)

    def _owner(self, headers: Headers) -> str:
        """Return the name of the key that a request has.

        Raises:
            UnauthorizedError, ForbiddenError: It has none that may have sandboxes.
        """
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        key = self._keyring.find(given)
        if (key is None and self._keyring.is_needed) or not given:
            raise UnauthorizedError(
                "the API key is missing or wrong", hint="Set E2B_API_KEY to a key of the service."
            )
        if key is not None and not key.role.allows(Role.SUBMIT):
            raise ForbiddenError(
                f"the key {key.name!r} has the role {key.role}; sandboxes need {Role.SUBMIT}"
            )
        return "" if key is None else key.name

    def _box(self, headers: Mapping[str, str]) -> Box:
        """Return the sandbox that a request is for.

        Raises:
            SandboxClosedError: There is no such sandbox.
            UnauthorizedError: The request does not have its token.
        """
        box = self._boxes.find(headers.get("e2b-sandbox-id", ""))
        if box is None:
            raise SandboxClosedError("it has ended, or never was")
        if not hmac.compare_digest(headers.get("x-access-token", "").encode(), box.token.encode()):
            raise UnauthorizedError("the access token is not that of the sandbox")
        return box

    def _box_of(self, ctx: Any) -> Box:
        """Return the sandbox of a call whose token has been checked; it may have ended since."""
        box = self._boxes.find(ctx.request_headers.get("e2b-sandbox-id", ""))
        if box is None:
            raise ConnectError(Code.UNAVAILABLE, "The sandbox was not found")
        return box

    def _app(self, box: Box, scope: Scope) -> ASGIApp:
        """Return what answers a request to a sandbox.

        Raises:
            RequestError: It names a port or a user that there is not.
        """
        headers, path = Headers(scope=scope), scope["path"]
        if headers.get("e2b-sandbox-port", PORT) != PORT:
            raise NotFoundError(
                "the ports of sandboxes are not served", hint="Run the client in the sandbox."
            )
        request = Request(scope)
        user = request.query_params.get("username") or _user(headers.get("authorization", ""))
        if user not in USERS:
            raise RequestError(
                f"there is no user {user[:64]!r}: a sandbox has one, whose name need not be given"
            )
        if path == "/health":
            return Response(status_code=204)
        if path == "/files":
            return self._transfer(box)
        return self._processes if path.startswith(DAEMON[0]) else self._files

    def _transfer(self, box: Box) -> ASGIApp:
        async def transfer(scope: Scope, receive: Receive, send: Send) -> None:
            work = write_files if scope["method"] == "POST" else read_file
            response = await work(Request(scope, receive), box, self._boxes.settings.max_file_bytes)
            await response(scope, receive, send)

        return transfer


def _user(authorization: str) -> str:
    """Return the user of a header `Authorization: Basic ...`; "" without one."""
    scheme, _, given = authorization.partition(" ")
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[0] if scheme == "Basic" else ""
    except (binascii.Error, UnicodeDecodeError):
        raise RequestError("the header Authorization cannot be read") from None


def _bounded(receive: Receive, held: HeldBytes, *, is_call: bool) -> Receive:
    """Return a function that receives no more of a body than one message may have."""
    read = 0

    async def receive_bounded() -> Message:
        nonlocal read
        message = await receive()
        if message["type"] == "http.request":
            read += len(message.get("body", b""))
            try:
                if read > MESSAGE_BYTES:
                    raise TooLargeError(f"the body is larger than {MESSAGE_BYTES} bytes")
                await held.grow_to(read)
            except ServiceError as error:
                raise ConnectError(Code.RESOURCE_EXHAUSTED, str(error)) if is_call else error from error
            if not message.get("more_body", False):
                held.release()
        return message

    return receive_bounded


def _refusal(error: Exception) -> Response:
    """Return an error as E2B's client expects it."""
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, TryLaterError) else {}
    if isinstance(error, ValidationError):
        item = error.errors(include_url=False, include_input=False)[0]
        return _json(400, f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}")
    if isinstance(error, HTTPException):
        return _json(error.status_code, str(error.detail))
    if isinstance(error, ValueError | InvalidFieldError):
        return _json(400, str(error))
    if isinstance(error, SandboxClosedError):
        return _json(502, f"The sandbox was not found: {error}")
    if isinstance(error, SandboxError):
        status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
        return _json(status, sentences(str(error), error.hint), {"Should-Retry": "false"})
    if not isinstance(error, ServiceError):
        log.error("unhandled error in E2B's API", exc_info=error)
    problem = to_problem(error)
    return _json(problem.status, problem.detail, headers)


def _json(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"code": status, "message": message or HTTPStatus(status).phrase}, status, headers)


@asynccontextmanager
async def serving_e2b(
    settings: Settings, node: Node, keyring: Keyring, is_stopping: Callable[[], bool], observe: Observe
) -> AsyncIterator[None]:
    """Serve E2B's API until the block is left; then end all sandboxes of programs.

    Raises:
        ConfigurationError: The address cannot be bound, or the sandboxes isolate nothing.
    """
    if not node.pool.isolates:
        raise ConfigurationError(
            f"E2B's API is not served with the sandboxes of `{node.pool.name}`, which isolate nothing",
            hint='Set `sandbox.provider` to "apptainer", or take `e2b.enabled` out.',
        )
    own = settings.e2b
    boxes = Boxes(own, node.pool, node.admission, is_stopping)
    limits = getattr(settings.sandbox, "limits", LimitDefaults())
    app = E2BApp(boxes, keyring, ControlApi(boxes, limits, os.cpu_count() or 1))
    hosts = AllowedHosts(settings.allowed_hosts, bound=own.host, keyed=settings.is_keyed)
    requests = RequestLimits(
        head_seconds=HEAD_SECONDS, body_seconds=own.body_seconds, write_seconds=own.write_seconds
    )
    listener = bind(own.host, own.port, "e2b")
    connections = ConnectionLimits.within(descriptor_limit() // DESCRIPTOR_SHARE)
    async with boxes.running():
        outer = AccessLogMiddleware(HostMiddleware(app, hosts))
        async with serving(outer, listener, connections, requests, observe):
            log.info("serving E2B's API", address=address_of(listener, own.host), images=own.images)
            yield
