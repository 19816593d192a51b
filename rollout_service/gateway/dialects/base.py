"""The contract of a dialect: it reads the requests of an API, and writes answers and errors as its clients expect them.

Guarantees of every dialect:

- `read` returns a call, or raises an error of the request that names the field; whatever the bytes, nothing else;
- the deltas of a stream are, put together, the parts of the whole answer;
- no error is answered with 429 or 503, nor with any status that makes clients give up on a busy service; except
  a `TryLaterError`, which says when to come back.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import ClassVar

import orjson

from api_schemas.errors import sentences
from rollout_service.base.errors import ServiceError, TryLaterError, describe
from rollout_service.gateway.bounds import BoundedFields
from rollout_service.gateway.contract import AnswerEvent, Dialect, Lane, ModelCall
from rollout_service.gateway.dialects.answers import WholeAnswer
from rollout_service.gateway.dialects.fields import Fields
from rollout_service.gateway.dialects.parameters import ParameterTable


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model for the lists that clients ask for."""

    name: str
    context_length: int | None = None


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error in the form of an API."""

    status: int
    body: bytes
    retry_after: int | None = None
    """After how many seconds the client should ask again."""


class AnswerStream(ABC):
    """One streamed answer. Every method returns the bytes to send next, which may be none."""

    media_type: str = "text/event-stream"

    @abstractmethod
    def write(self, event: AnswerEvent) -> bytes:
        """Return an event of the answer; the last one ends the stream."""

    @abstractmethod
    def keep_alive(self) -> bytes:
        """Return the bytes that make the clients of this API wait longer. Without effect on the answer."""

    @abstractmethod
    def fail(self, error: BaseException) -> bytes:
        """Return an error that ends the stream."""


class DialectCodec(ABC):
    """The reader and writer of one API."""

    dialect: ClassVar[Dialect]
    parameters: ClassVar[ParameterTable]
    bounded: ClassVar[BoundedFields]

    @abstractmethod
    def read(self, body: bytes, headers: Mapping[str, str], path: str) -> ModelCall:
        """Return the call that a request makes.

        `headers` have names in lower case; `path` is that of the request, with its query.

        Raises:
            MalformedBodyError: The body is not JSON.
            InvalidFieldError: A field is wrong, refused, or holds content that the policy cannot read.
        """

    @abstractmethod
    def open_stream(self, call: ModelCall) -> AnswerStream:
        """Begin to write a streamed answer."""

    @abstractmethod
    def whole(self, call: ModelCall, answers: Sequence[WholeAnswer]) -> bytes:
        """Return the body of an answer that is not streamed; more than one only for `n` over 1."""

    @abstractmethod
    def error(self, error: BaseException) -> ErrorAnswer:
        """Return an exception in the form of the API."""

    @abstractmethod
    def token_count(self, tokens: int) -> bytes:
        """Return the body that says how many tokens a prompt has."""

    @abstractmethod
    def models(self, models: Sequence[ListedModel]) -> bytes:
        """Return the list of models."""

    @abstractmethod
    def model(self, model: ListedModel) -> bytes:
        """Return the description of one model."""


_NOT_IN_FINGERPRINT = frozenset({"stream", "stream_options"})


def fingerprint(dialect: Dialect, body: Fields, lane: Lane, *other: str, limits: frozenset[str]) -> bytes:
    """Return a hash that two requests share if one repeats the other; `limits` are the names of limits of tokens."""
    left_out = _NOT_IN_FINGERPRINT | limits
    kept = {name: value for name, value in body.values.items() if name not in left_out}
    digest = hashlib.blake2b(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS), digest_size=16)
    digest.update(orjson.dumps([dialect, lane.session, lane.agent, *other]))
    return digest.digest()


def sse(data: object, event: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = b"event: " + event.encode() + b"\n" if event else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


COMMENT = b": keep-alive\n\n"
"""A comment of a stream of server-sent events."""


def retry_after(error: BaseException) -> int | None:
    """Return after how many seconds a client should ask again, if the error says so."""
    return error.retry_after if isinstance(error, TryLaterError) else None


def describe_failure(error: BaseException) -> tuple[int, str]:
    """Return the status and the message for an exception.

    A failure of the service is a plain 500 without its details, which are not for programs in a sandbox; the log has
    them. A status that makes clients give up on a busy service is never used.
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
