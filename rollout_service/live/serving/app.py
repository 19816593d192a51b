"""The ASGI app of live sessions: the same model APIs as the gateway's, for users' own agents.

A request reaches the session of its key, or, below `/v1/sessions/{id}`, that session alone. Every answer says in
`X-Rollout-Recorded` whether its turn is to be recorded, and if not, why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import unquote

import orjson
import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from api_schemas.errors import FieldError
from rollout_service.base.errors import InvalidFieldError, ServiceError, without_message
from rollout_service.gateway.contract import ModelCall
from rollout_service.gateway.dialects import DialectCodec
from rollout_service.gateway.dialects.fields import parse_json
from rollout_service.gateway.metrics import GatewayMetrics
from rollout_service.gateway.server.app import GatewayApp
from rollout_service.gateway.server.delivery import AnswerResponse
from rollout_service.gateway.server.paths import Action, GatewayRequest
from rollout_service.gateway.sessions.answer import LiveAnswer
from rollout_service.gateway.sessions.keys import GatewaySessions
from rollout_service.gateway.sessions.session import GatewaySession
from rollout_service.http.requests import BodiesInFlight
from rollout_service.live.serving.resolver import SessionResolver
from rollout_service.settings.http import GatewaySettings

log = structlog.get_logger(__name__)

PREFIX = "/v1/sessions/"
OWN_ROUTES = frozenset({"end", "feedback"})
"""Below a session, but not a model API."""
SESSION_ID, MAY_USE_ALL = "live_session_id", "may_use_all_sessions"
"""In the state of a request: the id in its path, and whether its key is one of the service."""
_HEAD_MARGIN = 5.0
_CALLS = frozenset({Action.ANSWER, Action.COUNT, Action.LIST_MODELS, Action.SHOW_MODEL})
_MODEL_API = re.compile(r"/v\d\w*/(?:chat/|responses|messages|models|tokenize)")
"""Matches paths that may be a model API. It is quick, since it sees every request."""


@dataclass(frozen=True, slots=True)
class CallsRoute:
    """The route under which metrics count the calls of sessions."""

    path: str


CALLS = CallsRoute("/v1/sessions/{session_id}/{call}")


class LiveApp(GatewayApp):
    def __init__(
        self,
        served: SessionResolver,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        hold_seconds: float,
        bodies: BodiesInFlight,
    ) -> None:
        super().__init__(GatewaySessions(), settings, metrics, bodies)
        self._served = served
        self._hold_seconds = hold_seconds

    def knows(self, key: str) -> bool:
        return self._served.knows(key)

    async def _find(self, request: GatewayRequest, scope: Scope) -> GatewaySession:
        state = scope.get("state", {})
        session_id: str | None = state.get(SESSION_ID)
        if session_id is None:
            return await self._served.serve_key(request.key, request.headers.get(SESSION_HEADER, ""))
        return await self._served.serve_id(session_id, None if state.get(MAY_USE_ALL) else request.key)

    def _parse(self, request: GatewayRequest, codec: DialectCodec, body: bytes) -> ModelCall:
        options, body = read_turn_options(request.headers, body)
        return options.apply(super()._parse(request, codec, body))

    def _note(self, request: GatewayRequest, error: Exception) -> None:  # noqa: ARG002
        if not isinstance(error, ServiceError):
            log.error("unhandled error in a live session", **without_message(error))

    def _response(self, codec: DialectCodec, call: ModelCall, answers: Sequence[LiveAnswer]) -> ASGIApp:
        return AnswerResponse(
            codec,
            call,
            answers,
            self._settings.keep_alive_seconds,
            head_seconds=self._hold_seconds + _HEAD_MARGIN,  # so that a refusal has a status of its own
            headers=[(b"x-rollout-recorded", _recorded(answers))],
        )


def _recorded(answers: Sequence[LiveAnswer]) -> bytes:
    observer = answers[0].observer
    because = observer.unrecorded_because if observer is not None else ""
    return f"no; reason={because}".encode() if because else b"yes"


class SessionCalls:
    """Middleware of the API that passes calls of model APIs to the live sessions' own app.

    They are below `/v1/sessions/{id}`, or where clients with only a key expect them, such as `/v1/chat/completions`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_session_call(scope):
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if (split := split_session_path(scope)) is not None:
            session_id, path = split
            scope.setdefault("state", {})[SESSION_ID] = session_id
        scope["route"] = CALLS
        live: ASGIApp = scope["app"].state.service.live.app
        await live({**scope, "path": path}, receive, send)


def is_session_call(scope: Scope) -> bool:
    """Return whether a request is one to a model API, which takes other keys than the service's."""
    path: str = scope["path"]
    if path.startswith(PREFIX):
        return split_session_path(scope) is not None
    return _MODEL_API.match(path) is not None and GatewayRequest.of(scope).action in _CALLS


def split_session_path(scope: Scope) -> tuple[str, str] | None:
    """Return a session's id and the path below it, or None if that is not a model API."""
    raw = scope.get("raw_path") or scope["path"].encode()
    path = raw.split(b"?")[0].decode("latin-1")
    if not path.startswith(PREFIX):
        return None
    session_id, slash, rest = path.removeprefix(PREFIX).partition("/")
    if not slash or not session_id or rest.strip("/") in OWN_ROUTES:
        return None
    return unquote(session_id), "/" + unquote(rest)


KIND_HEADER, TRAIN_HEADER, SESSION_HEADER = "x-turn-type", "x-train", "x-session-id"
_FIELDS = ("turn_type", "train", "session_id")
_MARKS = tuple(f'"{name}"'.encode() for name in _FIELDS)
_YES, _NO = frozenset({"yes", "true", "1", "on"}), frozenset({"no", "false", "0", "off"})


class TurnTypeError(InvalidFieldError):
    """A header or field of a live session has no known value."""

    status = 400


@dataclass(frozen=True, slots=True)
class TurnOptions:
    kind: Literal["", "main", "side"] = ""
    train: bool | None = None

    def apply(self, call: ModelCall) -> ModelCall:
        """Return the call with these options; a repeated request must wish the same."""
        if not self.kind and self.train is None:
            return call
        said = f"{self.kind}/{self.train}".encode()
        fingerprint = call.fingerprint + said if call.fingerprint else b""
        return replace(call, kind=self.kind, train=self.train, fingerprint=fingerprint)


def read_turn_options(headers: Mapping[str, str], body: bytes) -> tuple[TurnOptions, bytes]:
    """Read options, and remove them from the body before its dialect reads it. Headers go before fields.

    Raises:
        TurnTypeError: A value is not known.
    """
    fields: dict[str, Any] = {}
    if any(mark in body for mark in _MARKS):
        fields, body = _take(body)
    kind = headers.get(KIND_HEADER, "") or fields.get("turn_type")
    train = headers.get(TRAIN_HEADER, "") or fields.get("train")
    return TurnOptions(_kind(kind), _consent(train)), body


def _take(body: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        value = parse_json(body)
    except ValueError:  # the dialect says so in its own form
        return {}, body
    if not isinstance(value, dict):
        return {}, body
    taken = {name: value.pop(name) for name in _FIELDS if name in value}
    return taken, orjson.dumps(value) if taken else body


def _kind(value: object) -> Literal["", "main", "side"]:
    said = value.strip().lower() if isinstance(value, str) else value
    if said in (None, ""):
        return ""
    if said == "main":
        return "main"
    if said == "side":
        return "side"
    raise _unknown("turn_type", "must be main or side")


def _consent(value: object) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    said = value.strip().lower() if isinstance(value, str) else ""
    if said in _YES or said in _NO:
        return said in _YES
    raise _unknown("train", "must be yes or no")


def _unknown(name: str, message: str) -> TurnTypeError:
    return TurnTypeError([FieldError(path=name, message=message)])
