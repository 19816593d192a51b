"""The errors of the client, and how an answer of the server becomes one.

ClientError
 |- UnreachableError       no answer within the patience of this client
 |- ProtocolError          an answer that the API does not promise
 `- ProblemError           the server said no; `.problem` is what it said
     |- InvalidRequestError    400, 413, 422
     |- UnauthorizedError      401, 403
     |- NotFoundError          404
     |- ConflictError          409
     |- GoneError              410
     |- OrderError             engines did not carry out an order; `.outcome` has what each answered
     |   `- WeightsError           ... to load weights
     `- UnavailableError       408, 429, 502, 503, 504
"""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from api_schemas.errors import Problem
from api_schemas.inference import PoolOutcome
from api_schemas.nodes import Readiness

T = TypeVar("T")

QUOTED_BYTES = 300


class ClientError(Exception):
    """The base of the family."""


class UnreachableError(ClientError):
    """No server answered within the patience of this client."""


class ProtocolError(ClientError):
    """The answer is not one that the API promises: another program, a proxy, or another version."""


class ProblemError(ClientError):
    """The server said no."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.title}: {problem.detail}")
        self.problem = problem


class InvalidRequestError(ProblemError):
    """The request is wrong as it is; `problem.errors` names the fields."""


class UnauthorizedError(ProblemError):
    """The key is missing or wrong."""


class NotFoundError(ProblemError):
    """There is no such thing."""


class ConflictError(ProblemError):
    """The request contradicts what is there already."""


class GoneError(ProblemError):
    """What was asked of is over: a run that has nothing more to give."""


class OrderError(ProblemError):
    """Engines did not carry out an order that went to all of their pool; `outcome` has what each answered."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.outcome = PoolOutcome.model_validate(problem.context["outcome"])


class WeightsError(OrderError):
    """Not every engine has the weights that it was to load.

    `outcome.changed` tells whether some have them: the pool then serves the new version with those, and the others are
    out of service until they have it. Where it is false the pool serves what it did before.
    """


class UnavailableError(ProblemError):
    """The server cannot take this now; later it can."""

    retry_after = 0.0
    """For how many seconds the server asks to be left alone."""


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
}
"""Problems that hold the answers of engines, by their code."""
PASSING = frozenset({408, 429, 502, 503, 504})
"""Statuses that a proxy, or a server that is not ready, also sends without a problem's body."""


def error_from(response: httpx.Response) -> ClientError:
    """The error that an answer without success stands for."""
    status, content = response.status_code, response.content
    try:
        problem = Problem.model_validate_json(content)
    except ValidationError:
        start = content[:QUOTED_BYTES].decode(errors="replace").strip() or "an empty body"
        detail = f"{response.url} answered {status}: {start}"
        if status not in PASSING:
            return ProtocolError(detail)
        problem = Problem(
            title="Unavailable", status=status, detail=detail, code="unavailable", retryable=True
        )
    if "outcome" in problem.context and problem.code in ORDERS:
        return ORDERS[problem.code](problem)
    error = PROBLEMS.get(status, ProblemError)(problem)
    if isinstance(error, UnavailableError):
        error.retry_after = _seconds(response.headers.get("retry-after", ""))
    return error


def readiness_from(response: httpx.Response) -> Readiness:
    """Return what an answer to the question of readiness says; raises the error that it stands for otherwise.

    A refusal that passes by itself, as of a service that shuts down or a proxy before it, is a reason not to be ready.
    """
    if response.is_success:
        return parse(TypeAdapter(Readiness), response.content)
    with suppress(ValidationError):
        return Readiness.model_validate_json(response.content)
    error = error_from(response)
    if not isinstance(error, UnavailableError):
        raise error
    return Readiness(ready=False, reasons=[error.problem.detail])


def _seconds(retry_after: str) -> float:
    """Return the seconds that a header gives; 0 for a date, which proxies may send."""
    return float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0


def parse(adapter: TypeAdapter[T], content: bytes) -> T:
    """Content of this type; raises ProtocolError."""
    try:
        return adapter.validate_json(content)
    except ValidationError as error:
        raise ProtocolError(f"an answer that this client does not understand: {error}") from error
