"""The contract of a dialect: it reads the requests of an API, and writes answers and errors as its clients expect them.

In every dialect, the deltas of a stream are, put together, the parts of the whole answer; and no error but a
`TryLaterError`, which says when to come back, is answered with a status such as 429 or 503 that makes clients give up.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal

import orjson

from api_schemas.errors import sentences
from rollout_service.base.errors import InvalidFieldError, ServiceError, TryLaterError, describe
from rollout_service.gateway.bounds import BoundedFields
from rollout_service.gateway.contract import (
    AnswerEvent,
    ClientMessage,
    ClientToolCall,
    Dialect,
    Lane,
    ModelCall,
    Purpose,
)
from rollout_service.gateway.dialects.answers import WholeAnswer
from rollout_service.gateway.dialects.fields import BETWEEN_PARTS, Fields, ParameterTable, invalid, kind, parse_object
from rollout_service.gateway.errors import ContextOverflowError


@dataclass(frozen=True, slots=True)
class ListedModel:
    name: str
    context_length: int | None = None


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    status: int
    body: bytes
    retry_after: int | None = None
    """Seconds."""


class AnswerStream(ABC):
    """Every method returns the bytes to send next, which may be none."""

    media_type: str = "text/event-stream"

    @abstractmethod
    def write(self, event: AnswerEvent) -> bytes:
        """Write an event; the last one ends the stream."""

    @abstractmethod
    def keep_alive(self) -> bytes:
        """Make the clients of this API wait longer, without effect on the answer."""

    @abstractmethod
    def fail(self, error: BaseException) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectCodec:
    dialect: Dialect
    parameters: ParameterTable
    bounded: BoundedFields
    read: Callable[[bytes, Mapping[str, str], str], ModelCall]
    """The reader of a body, with its headers, whose names are in lower case, and its path with the query.

    It raises MalformedBodyError if the body is not JSON, and InvalidFieldError if a field is wrong, refused, or holds
    content that the policy cannot read."""
    open_stream: Callable[[ModelCall], AnswerStream]
    whole: Callable[[ModelCall, Sequence[WholeAnswer]], bytes]
    """The body of answers that are not streamed; there is more than one only for `n` over 1."""
    error_body: Callable[[BaseException], dict[str, Any]]
    counted: Callable[[int], dict[str, Any]]
    """The body that tells a number of tokens."""
    describe_model: Callable[[ListedModel], dict[str, Any]]
    list_models: Callable[[list[dict[str, Any]]], dict[str, Any]]
    """The body that lists described models."""

    def error(self, error: BaseException) -> ErrorAnswer:
        status, _ = describe_failure(error)
        retry_after = error.retry_after if isinstance(error, TryLaterError) else None
        return ErrorAnswer(status, orjson.dumps(self.error_body(error)), retry_after)

    def token_count(self, tokens: int) -> bytes:
        return orjson.dumps(self.counted(tokens))

    def model(self, model: ListedModel) -> bytes:
        return orjson.dumps(self.describe_model(model))

    def models(self, models: Sequence[ListedModel]) -> bytes:
        return orjson.dumps(self.list_models([self.describe_model(model) for model in models]))


@dataclass(slots=True)
class FoldedAnswer:
    """An answer that comes back in several items or contents."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ClientToolCall] = field(default_factory=list)
    references: set[Literal["reasoning", "text", "calls"]] = field(default_factory=set)
    turn_key: str | None = None

    def message(self) -> ClientMessage:
        return ClientMessage(
            "assistant",
            "".join(self.texts),
            "".join(self.thoughts) or None,
            tuple(self.calls),
            turn_key=self.turn_key,
            references=frozenset(self.references),
        )


def user_messages(parts: Iterable[str | ClientMessage | None]) -> Iterator[ClientMessage]:
    """Yield results of tools as they are, and the texts between two of them as one message of the user."""
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif part is not None:
            if texts:
                yield ClientMessage("user", BETWEEN_PARTS.join(texts))
                texts = []
            yield part
    if texts:
        yield ClientMessage("user", BETWEEN_PARTS.join(texts))


_NOT_IN_FINGERPRINT = frozenset({"stream", "stream_options"})


def fingerprint(dialect: Dialect, body: Fields, lane: Lane, *other: str, limits: Collection[str] = ()) -> bytes:
    """Hash a request without its limits of tokens: two share the hash if one repeats the other."""
    left_out = {*_NOT_IN_FINGERPRINT, *limits}
    kept = {name: value for name, value in body.values.items() if name not in left_out}
    digest = hashlib.blake2b(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS), digest_size=16)
    digest.update(orjson.dumps([dialect, lane.session, lane.agent, *other]))
    return digest.digest()


def sse(data: object, event: str | None = None) -> bytes:
    head = b"event: " + event.encode() + b"\n" if event else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


COMMENT = b": keep-alive\n\n"


def describe_failure(error: BaseException) -> tuple[int, str]:
    """Return the status and the message for an exception.

    A failure of the service is a plain 500 without its details, which are not for programs in a sandbox; the log has
    them.
    """
    info = describe(error)
    if isinstance(error, TryLaterError):
        return int(error.status), sentences(info.message, info.hint)
    status = error.status if isinstance(error, ServiceError) else HTTPStatus.INTERNAL_SERVER_ERROR
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
        return int(HTTPStatus.INTERNAL_SERVER_ERROR), f"the service could not answer ({info.code})"
    if status == HTTPStatus.UNPROCESSABLE_ENTITY:
        status = HTTPStatus.BAD_REQUEST
    return int(status), sentences(info.message, info.hint)


_CLIENTS = (
    ("codex", "codex"),
    ("claude-cli", "claude_code"),
    ("qwencode", "qwen_code"),
    ("geminicli", "gemini_cli"),
    ("opencode", "opencode"),
    ("agents/python", "openai_agents"),
)
"""Beginnings of user agents in lower case, and the clients' names."""
_OPENHANDS = "openhands"
KNOWN_CLIENTS = frozenset({_OPENHANDS, *(name for _, name in _CLIENTS)})
_MAX_ID = 128


def client_name(headers: Mapping[str, str]) -> str:
    """Return a name such as `codex`; empty if the request does not say."""
    if headers.get("x-title", "").lower() == _OPENHANDS:
        return _OPENHANDS
    agent = headers.get("user-agent", "").lower()
    for beginning, name in _CLIENTS:
        if agent.startswith(beginning):
            return name
    product = re.split(r"[/ ]", agent.replace("/js", "_js").replace("/python", "_python"), maxsplit=1)[0]
    return re.sub(r"[^a-z0-9]+", "_", product).strip("_")[:32]


def read_lane(headers: Mapping[str, str], session: str = "") -> Lane:
    """Read the lane; `session` is the one in the body, used if the headers have none."""
    client = client_name(headers)
    if client == "codex":
        return _codex(headers)
    if claude := headers.get("x-claude-code-session-id", ""):
        agent = headers.get("x-claude-code-agent-id", "")
        parent = headers.get("x-claude-code-parent-agent-id", "")
        return _lane(client, claude, agent, parent, "subagent" if agent else "")
    if opencode := headers.get("x-session-id", ""):
        parent = headers.get("x-parent-session-id", "")
        return _lane(client, opencode, opencode if parent else "", parent, "subagent" if parent else "")
    known = headers.get("session_id") or headers.get("x-litellm-session-id") or session
    return _lane(client, known, "", "", "")


def _codex(headers: Mapping[str, str]) -> Lane:
    metadata = parse_object(headers.get("x-codex-turn-metadata", "")) or {}
    parent = headers.get("x-codex-parent-thread-id", "")
    is_subagent = bool(parent or headers.get("x-openai-subagent"))
    agent = headers.get("thread-id", "") if is_subagent else ""
    purpose = _codex_purpose(metadata.get("request_kind"), is_subagent)
    return _lane("codex", headers.get("session-id", ""), agent, parent, purpose)


def _codex_purpose(kind: Any, is_subagent: bool) -> Purpose:
    if kind == "compaction":
        return "compaction"
    if kind == "prewarm":
        return "side"
    return "subagent" if is_subagent else ""


def _lane(client: str, session: str, agent: str, parent: str, purpose: Purpose) -> Lane:
    return Lane(client, session[:_MAX_ID], agent[:_MAX_ID], parent[:_MAX_ID], purpose)


_CODES = {
    HTTPStatus.UNAUTHORIZED: "invalid_api_key",
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.GONE: "session_ended",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_exceeded",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable",
}


def check_tool_choice(fields: Fields) -> None:
    """Refuse a choice that has no known form, of Chat Completions or of Responses.

    Raises:
        InvalidFieldError: The choice is neither a known word nor an object with a type.
    """
    value = fields.values.get("tool_choice")
    if isinstance(value, dict):
        Fields(value, fields.at("tool_choice")).required_text("type")
    elif value not in (None, "auto", "none", "required"):
        shown = f"{value!r:.80}" if isinstance(value, str) else kind(value)
        invalid(fields.at("tool_choice"), f"must be auto, none, required, or an object, not {shown}")


def read_schema(form: Fields | None, inner: str = "") -> Mapping[str, Any] | None:
    """Return the schema of an answer's format; the field `inner` of the format has it, or the format itself."""
    if form is None:
        return None
    match form.required_text("type"):
        case "text":
            return None
        case "json_object":
            return _ANY_OBJECT
        case "json_schema":
            holder = form.object(inner) if inner else form
            schema = holder and holder.object("schema")
            return schema.values if schema else _ANY_OBJECT
    return invalid(form.at("type"), "must be text, json_object or json_schema")


_ANY_OBJECT = {"type": "object"}


def error_object(error: BaseException) -> dict[str, Any]:
    status, message = describe_failure(error)
    param = error.fields[0].path if isinstance(error, InvalidFieldError) else None
    code = _CODES.get(HTTPStatus(status), "invalid_value")
    if isinstance(error, ContextOverflowError):
        code, param, message = "context_length_exceeded", "messages", _overflow(error)
    is_defect = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = "server_error" if is_defect else "invalid_request_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    return {"message": message, "type": kind, "param": param, "code": code}


def _overflow(error: ContextOverflowError) -> str:
    """Say it in both ways of OpenAI's, since clients look for either."""
    return (
        f"This model's maximum context length is {error.context_length} tokens. "
        f"However, your messages resulted in {error.prompt_tokens} tokens. "
        f"Input tokens exceed the configured limit of {error.context_length} tokens."
    )


def openai_models(models: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": models}


def openai_model(model: ListedModel) -> dict[str, Any]:
    described: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "rollout-service",
    }
    return described | ({"max_model_len": model.context_length} if model.context_length else {})
