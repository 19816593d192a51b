"""The ASGI app of the gateway: the routes of four model APIs, with the calls that their clients make at their start.

A request reaches the session of its key, and nothing else. Every error is answered in the form of the API that was
called. The settings limit what is read of a body and of all bodies together; a request that takes long to read or to
render is dropped once its client has gone.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import structlog
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_service.base.errors import NotFoundError, ServiceError, TooLargeError
from rollout_service.gateway.bounds import check_call, in_thread
from rollout_service.gateway.contract import ModelCall, with_schema_told
from rollout_service.gateway.dialects import CODECS, DialectCodec, ListedModel, client_name
from rollout_service.gateway.errors import UnknownModelError
from rollout_service.gateway.metrics import GatewayMetrics
from rollout_service.gateway.server.delivery import JSON, AnswerResponse, send_error
from rollout_service.gateway.server.paths import Action, GatewayRequest
from rollout_service.gateway.sessions.answer import LiveAnswer
from rollout_service.gateway.sessions.keys import GatewaySessions
from rollout_service.gateway.sessions.session import GatewaySession
from rollout_service.http.access_log import without_keys
from rollout_service.http.connections import find_slot
from rollout_service.http.requests import BodiesInFlight, HeldBytes, cancel_on_disconnect
from rollout_service.settings.http import GatewaySettings

log = structlog.get_logger(__name__)

INLINE_BYTES = 64 * 1024
"""Larger bodies are read into calls in a thread."""
MAX_LOGGED_ROUTES = 1_000


class GatewayApp:
    def __init__(
        self,
        sessions: GatewaySessions,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        bodies: BodiesInFlight,
    ) -> None:
        """`bodies` are shared with other applications."""
        self._sessions = sessions
        self._settings = settings
        self._metrics = metrics
        self._bodies = bodies
        self._logged: set[tuple[str, str]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = GatewayRequest.of(scope)
        codec = CODECS[request.dialect]
        try:
            response = await self._respond(request, codec, scope, receive)
        except Exception as error:  # noqa: BLE001 - told in the form of the API
            self._note(request, error)
            if not request.is_counted:
                self._metrics.count_refused(request.dialect, client_name(request.headers))
            refusal = codec.error(error)
            # Its frames hold the body and what was read of it, and a future of theirs holds the error.
            traceback.clear_frames(error.__traceback__)
            await send_error(refusal, send)
        else:
            await response(scope, receive, send)

    async def _respond(self, request: GatewayRequest, codec: DialectCodec, scope: Scope, receive: Receive) -> ASGIApp:
        if request.action is Action.ALIVE:
            return Response()
        session = await self._find(request, scope)
        _admit(scope)
        match request.action:
            case Action.ANSWER | Action.COUNT:
                with session.called():
                    return await self._call(request, codec, session, receive)
            case Action.LIST_MODELS:
                return Response(codec.models([session.model]), media_type=JSON)
            case Action.SHOW_MODEL:
                return Response(codec.model(self._shown(request, session)), media_type=JSON)
            case _:
                self._log_unknown(request)
                raise NotFoundError(f"there is no route {request.method} {request.path}")

    async def _find(self, request: GatewayRequest, scope: Scope) -> GatewaySession:
        _ = scope
        return self._sessions.find(request.key)

    async def _call(
        self, request: GatewayRequest, codec: DialectCodec, session: GatewaySession, receive: Receive
    ) -> ASGIApp:
        with self._bodies.reading(request.key) as held:
            body = await self._body(request, receive, held)
            work = partial(self._work, request, codec, session, body)
            if len(body) <= INLINE_BYTES:
                return await work()
            return await cancel_on_disconnect(receive, work) or _send_nothing

    async def _work(
        self, request: GatewayRequest, codec: DialectCodec, session: GatewaySession, body: bytes
    ) -> ASGIApp:
        parse = partial(self._parse, request, codec, body)
        call = parse() if len(body) <= INLINE_BYTES else await in_thread(parse)
        if request.action is Action.COUNT:
            return Response(codec.token_count(await session.count_tokens(call)), media_type=JSON)
        self._check_model(call.model, session)
        if call.n > 1:
            session.charge(call.n - 1)
        request.is_counted = True
        return self._response(codec, call, await self._answers(call, session))

    async def _answers(self, call: ModelCall, session: GatewaySession) -> list[LiveAnswer]:
        """Return once all answers have begun."""
        if call.n == 1:
            return [await session.answer(call)]
        answers: list[LiveAnswer] = []
        try:
            for number in range(call.n):
                own = call.fingerprint + number.to_bytes(4) if call.fingerprint else b""
                answers.append(await session.answer(replace(call, sibling=number, fingerprint=own)))
        except BaseException:
            for answer in answers:  # nobody will read them, unless the request is repeated
                with answer.reading():
                    pass
            raise
        return answers

    def _response(self, codec: DialectCodec, call: ModelCall, answers: Sequence[LiveAnswer]) -> ASGIApp:
        return AnswerResponse(codec, call, answers, self._settings.keep_alive_seconds)

    def _parse(self, request: GatewayRequest, codec: DialectCodec, body: bytes) -> ModelCall:
        call = codec.read(body, request.headers, request.target)
        check_call(call, codec.bounded, self._settings)
        return with_schema_told(call)

    async def _body(self, request: GatewayRequest, receive: Receive, held: HeldBytes) -> bytes:
        announced = request.headers.get("content-length", "")
        await self._make_room(held, int(announced) if announced.isdecimal() else 0)
        parts: list[bytes] = []
        read, is_more = 0, True
        while is_more:
            message = await receive()
            parts.append(message.get("body", b""))
            read += len(parts[-1])
            await self._make_room(held, read)
            is_more = message.get("more_body", False)
        return b"".join(parts)

    async def _make_room(self, held: HeldBytes, size: int) -> None:
        if size > self._settings.max_body_bytes:
            raise TooLargeError(
                f"the body is larger than {self._settings.max_body_bytes} bytes",
                hint="Shorten the conversation, or raise `max_body_bytes` in `[gateway]`.",
            )
        await held.grow_to(size)

    def _check_model(self, model: str, session: GatewaySession) -> None:
        if self._settings.unknown_model == "refuse" and model != session.model.name:
            raise UnknownModelError(model, session.model.name)

    def _shown(self, request: GatewayRequest, session: GatewaySession) -> ListedModel:
        name = request.path.removeprefix("/models/")
        self._check_model(name, session)
        return replace(session.model, name=name)

    def _log_unknown(self, request: GatewayRequest) -> None:
        """Log once for each client."""
        route = f"{request.method} {without_keys(request.path)}"[:200]
        seen = (client_name(request.headers), route)
        if seen not in self._logged and len(self._logged) < MAX_LOGGED_ROUTES:
            self._logged.add(seen)
            log.warning("a client asks for a route that the gateway lacks", client=seen[0], route=seen[1])

    def _note(self, request: GatewayRequest, error: Exception) -> None:
        if not isinstance(error, ServiceError):
            log.error("unhandled error in the gateway", path=without_keys(request.path), exc_info=error)


async def _send_nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a client that has gone."""


def _admit(scope: Scope) -> None:
    """Note that the connection has sent a valid key."""
    if (slot := find_slot(scope)) is not None:
        slot.admit()
