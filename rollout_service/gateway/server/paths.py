"""A request's action and key, by its path: clients extend a base URL in different ways.

The path may begin with `/s/KEY`; versions such as `/v1` may be there once, twice or not at all, since some clients
expect them in the base URL and others add them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from rollout_service.gateway.contract import Dialect

_KEYED = re.compile(r"^/s/([^/]+)(/.*)?$")
_VERSIONS = re.compile(r"^(?:/v\d+(?:(?:alpha|beta)\d*)?)+(?=/|$)")
"""Each digit has one place to be, so that a long path takes no longer than its length: it is read before its key."""
_KEY_HEADERS = ("x-api-key", "x-goog-api-key", "api-key")


class Action(Enum):
    ALIVE = auto()
    ANSWER = auto()
    COUNT = auto()
    LIST_MODELS = auto()
    SHOW_MODEL = auto()
    UNKNOWN = auto()


_ROUTES = (
    ("POST", r"/chat/completions", Dialect.CHAT, Action.ANSWER),
    ("POST", r"/responses", Dialect.RESPONSES, Action.ANSWER),
    ("POST", r"/responses/input_tokens", Dialect.RESPONSES, Action.COUNT),
    ("POST", r"/messages", Dialect.ANTHROPIC, Action.ANSWER),
    ("POST", r"/messages/count_tokens", Dialect.ANTHROPIC, Action.COUNT),
    ("POST", r"/models/.+:(?:generateContent|streamGenerateContent)", Dialect.GOOGLE, Action.ANSWER),
    ("POST", r"/models/.+:countTokens", Dialect.GOOGLE, Action.COUNT),
    ("POST", r"/tokenize", Dialect.CHAT, Action.COUNT),
    ("GET", r"/models", None, Action.LIST_MODELS),
    ("GET", r"/models/.+", None, Action.SHOW_MODEL),
    ("GET", r"/", None, Action.ALIVE),
    ("HEAD", r"/.*", None, Action.ALIVE),
)
_COMPILED = [(method, re.compile(path), dialect, action) for method, path, dialect, action in _ROUTES]


@dataclass(slots=True)
class GatewayRequest:
    method: str
    path: str
    """Without the key and the versions."""
    query: str
    headers: Mapping[str, str]
    """By names in lower case."""
    key: str
    """Empty if there is none."""
    action: Action
    dialect: Dialect
    is_counted: bool = False
    """Its session counts its calls, whatever becomes of them."""

    @classmethod
    def of(cls, scope: Scope) -> GatewayRequest:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        method, path, query = scope["method"], scope["path"], scope["query_string"].decode("latin-1")
        path_key = ""
        if keyed := _KEYED.match(path):
            path_key, path = keyed[1], keyed[2] or "/"
        unversioned = _VERSIONS.sub("", path) or "/"
        action, dialect = _route(method, unversioned)
        return cls(
            method=method,
            path=unversioned,
            query=query,
            headers=headers,
            key=path_key or _key(headers, query),
            action=action,
            dialect=dialect or _spoken(path, headers),
        )

    @property
    def target(self) -> str:
        """The path with the query, as dialects read it."""
        return f"{self.path}?{self.query}" if self.query else self.path


def _route(method: str, path: str) -> tuple[Action, Dialect | None]:
    for allowed, pattern, dialect, action in _COMPILED:
        if method == allowed and pattern.fullmatch(path):
            return action, dialect
    return Action.UNKNOWN, None


def _spoken(path: str, headers: Mapping[str, str]) -> Dialect:
    """Guess the dialect for routes that several APIs have."""
    if "anthropic-version" in headers:
        return Dialect.ANTHROPIC
    if "x-goog-api-key" in headers or path.startswith("/v1beta"):
        return Dialect.GOOGLE
    return Dialect.CHAT


def _key(headers: Mapping[str, str], query: str) -> str:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and bearer.strip():
        return bearer.strip()
    for name in _KEY_HEADERS:
        if value := headers.get(name, "").strip():
            return value
    return parse_qs(query).get("key", [""])[0] if "key=" in query else ""


class KeyedApp(Protocol):
    def knows(self, key: str) -> bool:
        """Tell by the form of a key, without looking it up."""
        ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...
