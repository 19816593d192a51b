"""The ASGI app of E2B's API, and its listener.

A request for sandboxes needs a key of the service with at least the role `submit`, and one to a sandbox needs that
sandbox's own token; both are compared in constant time. Anyone else learns of a sandbox at most that its id is in use.
No more of a body is read than is allowed, nor of all bodies together.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.filesystem.filesystem_connect import FilesystemASGIApplication
from e2b.envd.process.process_connect import ProcessASGIApplication
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_service.base import errors
from rollout_service.cluster.node import Node
from rollout_service.gateway.server.listener import address_of, bind, serving
from rollout_service.http.access_log import AccessLogMiddleware
from rollout_service.http.allowed_hosts import AllowedHosts, HostMiddleware
from rollout_service.http.connections import ConnectionLimits, descriptor_limit, find_slot
from rollout_service.http.keyring import Keyring, Role
from rollout_service.http.protocol import Observe, RequestLimits
from rollout_service.http.requests import BodiesInFlight, HeldBytes
from rollout_service.server.e2b import code_interpreter
from rollout_service.server.e2b.boxes import CURRENT_BOX, Box, Boxes
from rollout_service.server.e2b.commands import ProcessCalls
from rollout_service.server.e2b.control import ControlApi
from rollout_service.server.e2b.files import FilesystemCalls
from rollout_service.server.e2b.refusals import refusal_of
from rollout_service.server.e2b.transfer import answer_transfer
from rollout_service.settings import Settings
from sandboxes import errors as sandbox_errors
from sandboxes.config import LimitDefaults

PORT = "49983"
"""The port of E2B's daemon, which requests name."""
MESSAGE_BYTES = 4 * 1024 * 1024
"""The most bytes of a message to a sandbox, or of a request for one."""
BODIES_BYTES = 64 * 1024 * 1024
"""The most bytes of such bodies together."""
PROCESSES, FILES = "/process.Process/", "/filesystem.Filesystem/"
STREAMS = ("/files", "/process.Process/StreamInput")
"""Paths whose bodies are read in pieces, as fast as the sandbox takes them."""
USERS = frozenset({"", "Basic dXNlcjo=", "Basic cm9vdDo=", "user", "root"})
"""How requests name a user; all mean the sandbox's own."""
DESCRIPTOR_SHARE = 8
"""Connections take at most the service's descriptors divided by this."""
log = structlog.get_logger(__name__)


class E2BApp:
    def __init__(self, boxes: Boxes, keyring: Keyring, control: ControlApi) -> None:
        self._boxes = boxes
        self._keyring = keyring
        self._control = Router(control.routes(), redirect_slashes=False)
        self._code = Router(code_interpreter.routes(), redirect_slashes=False)
        self._bodies = BodiesInFlight(BODIES_BYTES, MESSAGE_BYTES)
        self._processes = ProcessASGIApplication(ProcessCalls(), read_max_bytes=MESSAGE_BYTES)
        self._files = FilesystemASGIApplication(FilesystemCalls(), read_max_bytes=MESSAGE_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            await refusal_of(error)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, path = Request(scope, receive), scope["path"]
        app: ASGIApp
        of_box = path in ("/health", "/files") or path.startswith((PROCESSES, FILES))
        if of_box or request.headers.get("e2b-sandbox-port") == code_interpreter.PORT:
            box = self._box(request)
            owner, app = box.owner, self._within(box)
        else:
            owner, app = self._owner(request.headers), self._control
            scope.setdefault("state", {})["owner"] = owner
        if (slot := find_slot(scope)) is not None and not slot.admit():
            raise errors.UnavailableError("all connections are busy", hint="Try again later.")
        if path in STREAMS:
            await app(scope, receive, send)
            return
        with self._bodies.reading(owner) as held:
            await app(scope, _bounded(receive, held, is_call=path.startswith((PROCESSES, FILES))), send)

    def _owner(self, headers: Headers) -> str:
        given = headers.get("x-api-key", "")
        key = self._keyring.find(given)
        if not given or (key is None and self._keyring.is_needed):
            raise errors.UnauthorizedError(
                "the API key is missing or wrong", hint="Set E2B_API_KEY to one of the service."
            )
        if key is not None and not key.role.allows(Role.SUBMIT):
            raise errors.ForbiddenError(f"the key has the role {key.role}; sandboxes need {Role.SUBMIT}")
        return "" if key is None else key.name

    def _box(self, request: Request) -> Box:
        headers = request.headers
        box = self._boxes.find(headers.get("e2b-sandbox-id", ""))
        if box is None:
            raise sandbox_errors.SandboxClosedError("The sandbox was not found")
        shown = headers.get("x-access-token") or headers.get("e2b-traffic-access-token", "")
        if not hmac.compare_digest(shown.encode(), box.token.encode()):
            raise errors.UnauthorizedError("the access token is not that of the sandbox")
        if headers.get("e2b-sandbox-port", PORT) not in (PORT, code_interpreter.PORT):
            raise errors.NotFoundError("ports of sandboxes are not served", hint="Run the client inside.")
        if not {headers.get("authorization", ""), request.query_params.get("username", "")} <= USERS:
            raise errors.RequestError("a sandbox has one user", hint="Name `user`, `root`, or none.")
        return box

    def _within(self, box: Box) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            CURRENT_BOX.set(box)
            async with box.saving:  # nothing may begin meanwhile
                if box.paused:
                    raise sandbox_errors.SandboxClosedError("The sandbox is paused", hint="Connect to it first.")
            request, path = Request(scope, receive), scope["path"]
            app: ASGIApp = self._processes if path.startswith(PROCESSES) else self._files
            if request.headers.get("e2b-sandbox-port") == code_interpreter.PORT:
                app = self._code
            elif path == "/health":
                app = Response(status_code=204)
            elif path == "/files":
                app = await answer_transfer(request, box, self._boxes.settings.max_file_bytes)
            await app(scope, receive, send)

        return answer


def _bounded(receive: Receive, held: HeldBytes, *, is_call: bool) -> Receive:
    read = 0

    async def receive_bounded() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        try:
            if read > MESSAGE_BYTES:
                raise errors.TooLargeError(f"the body is larger than {MESSAGE_BYTES} bytes")
            await held.grow_to(read)
        except errors.ServiceError as error:
            raise ConnectError(Code.RESOURCE_EXHAUSTED, str(error)) if is_call else error from error
        if not message.get("more_body", False):
            held.release()
        return message

    return receive_bounded


@asynccontextmanager
async def serving_e2b(
    settings: Settings, node: Node, keyring: Keyring, is_stopping: Callable[[], bool], observe: Observe
) -> AsyncIterator[None]:
    """Serve E2B's API in the block; then end all sandboxes of programs."""
    own = settings.e2b
    if not node.pool.isolates:
        raise errors.ConfigurationError(
            f"E2B's API needs sandboxes that isolate, and those of `{node.pool.name}` do not",
            hint="Choose another `sandbox.provider`, or take `e2b.enabled` out.",
        )
    boxes = Boxes(own, node.pool, node.admission, is_stopping)
    limits = getattr(settings.sandbox, "limits", LimitDefaults())
    app = E2BApp(boxes, keyring, ControlApi(boxes, limits, os.cpu_count() or 1))
    hosts = AllowedHosts(settings.allowed_hosts, bound=own.host, keyed=settings.is_keyed)
    http = settings.http
    requests = RequestLimits(
        head_seconds=http.head_seconds, body_seconds=http.body_seconds, write_seconds=http.write_seconds
    )
    listener = bind(own.host, own.port, "e2b")
    connections = ConnectionLimits.within(descriptor_limit() // DESCRIPTOR_SHARE)
    outer = AccessLogMiddleware(HostMiddleware(app, hosts))
    async with boxes.running(), serving(outer, listener, connections, requests, observe):
        log.info("serving E2B's API", address=address_of(listener, own.host), images=own.images)
        yield
