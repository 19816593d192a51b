"""Responses as values, or as the errors that they stand for.

A response that is not one of this API is a `ProtocolError`, unless its status says that the server cannot take requests
now.
"""

from __future__ import annotations

from contextlib import suppress
from http import HTTPStatus
from typing import TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from api_schemas.errors import Problem
from api_schemas.nodes import Readiness
from rollout_client.errors import (
    ClientError,
    ConflictError,
    GoneError,
    InvalidRequestError,
    NotFoundError,
    OrderError,
    ProblemError,
    ProtocolError,
    UnauthorizedError,
    UnavailableError,
    WeightsError,
)

T = TypeVar("T")

QUOTED_BYTES = 300
PROBLEMS: dict[int, type[ProblemError]] = {
    400: InvalidRequestError,
    401: UnauthorizedError,
    403: UnauthorizedError,
    404: NotFoundError,
    408: UnavailableError,
    409: ConflictError,
    410: GoneError,
    413: InvalidRequestError,
    422: InvalidRequestError,
    429: UnavailableError,
    502: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
}
ORDERS: dict[str, type[OrderError]] = {
    "order_failed": OrderError,
    "weights_refused": WeightsError,
    "weights_not_loaded": WeightsError,
    "weights_partly_loaded": WeightsError,
    "weights_unusable": WeightsError,
}
PASSING = frozenset({408, 429, 502, 503, 504})
"""Statuses that a proxy, or a server that is not ready, also sends without a problem document."""


def error_from(response: httpx.Response) -> ClientError:
    status, content = response.status_code, response.content
    try:
        problem = Problem.model_validate_json(content)
    except ValidationError:
        start = content[:QUOTED_BYTES].decode(errors="replace").strip() or "an empty body"
        detail = f"{response.url} answered {status}: {start}"
        if status not in PASSING:
            return ProtocolError(detail)
        problem = Problem(title="Unavailable", status=status, detail=detail, code="unavailable", retryable=True)
    if "outcome" in problem.context and problem.code in ORDERS:
        return ORDERS[problem.code](problem)
    # An engine's refusal and a wrong setting stay the same, however often they are asked for.
    is_said = status == HTTPStatus.SERVICE_UNAVAILABLE and "retryable" in problem.model_fields_set
    is_final = not problem.retryable and (is_said or status == HTTPStatus.BAD_GATEWAY)
    error = (ProblemError if is_final else PROBLEMS.get(status, ProblemError))(problem)
    if isinstance(error, UnavailableError):
        error.retry_after = _seconds(response.headers.get("retry-after", ""))
    return error


def readiness_from(response: httpx.Response) -> Readiness:
    """Return the readiness in a response of `/ready`.

    A passing refusal, by a proxy or by a service that is shutting down, is a reason not to be ready.

    Raises:
        ClientError: The response says nothing about readiness.
    """
    if response.is_success:
        return parse(Readiness, response.content)
    with suppress(ValidationError):
        return Readiness.model_validate_json(response.content)
    error = error_from(response)
    if not isinstance(error, UnavailableError):
        raise error
    return Readiness(ready=False, reasons=[error.problem.detail])


def _seconds(retry_after: str) -> float:
    """Return the seconds in a `retry-after` header; 0 for a date, which proxies may send."""
    return float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0


def parse(model: type[T], content: bytes) -> T:
    """Parse the content of a response.

    Raises:
        ProtocolError: The content is of another type.
    """
    try:
        return TypeAdapter(model).validate_json(content)
    except ValidationError as error:
        raise ProtocolError(f"the response cannot be read: {error}. Is the server of another version?") from error
