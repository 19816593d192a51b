"""One family of errors, each named for the boundary that it crossed.

ServiceError
 |- RequestError                  a caller asked for something impossible               4xx
 |   |- MalformedBodyError        400
 |   |- InvalidFieldError         422, with the path of the field
 |   |- NotFoundError             404
 |   |- ConflictError             409, as in the same id with another body
 |   |- TooLargeError             413
 |   |- UnauthorizedError         401
 |   |- ForbiddenError            403, the key's role or the page's origin
 |   |- MediaTypeError            415
 |   |- MisdirectedError          421, for a host that is not this server
 |   |- MalformedRequestError     400, not HTTP, or ambiguous
 |   |- HeadTooLargeError         431
 |   `- RequestTimeoutError       408
 |- EnvironmentFailedError        an environment's own code, or its grader, failed
 |- StoreError                    the durable store cannot be read or written           503
 |- RecordLostError               a single record of the store is gone or damaged       500
 |- UnavailableError              the service cannot take this now                      503
 |- StageTimeoutError             a stage's deadline passed
 |- AttemptsExhaustedError        the service died under this rollout too often
 |- ConfigurationError            the service cannot start like this
 `- DefectError                   anything that is not of this family                   500
Inference and token errors (`inference/errors.py`, `tokens/errors.py`) are ServiceErrors too; those of the
package `sandboxes` are not, since it knows nothing of this one: `describe` takes both.

Every error says what happened, and in `hint` what to do next. `describe` turns any exception into what the
API, the log and the metrics show.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

from api_schemas.errors import Boundary, ErrorInfo, FieldError
from sandboxes.errors import SandboxError


class ServiceError(Exception):
    """The base of the family."""

    code: ClassVar[str] = "service_error"
    boundary: ClassVar[Boundary] = Boundary.SERVICE
    status: ClassVar[int] = 500
    retryable: bool = False

    def __init__(self, message: str, *, hint: str = "", context: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.context = context or {}


class RequestError(ServiceError):
    """The caller asked for something that cannot be done as it is."""

    code = "bad_request"
    boundary = Boundary.REQUEST
    status = 400


class MalformedBodyError(RequestError):
    """The body is not valid JSON."""

    code = "malformed_json"


class InvalidFieldError(RequestError):
    """A field of the request is wrong; `fields` says which."""

    code = "invalid_field"
    status = 422

    def __init__(
        self, fields: Sequence[FieldError], *, hint: str = "", context: dict[str, Any] | None = None
    ) -> None:
        super().__init__("; ".join(f"{f.path}: {f.message}" for f in fields), hint=hint, context=context)
        self.fields = list(fields)

    def under(self, path: str) -> Self:
        """Return the same error with its fields below this path."""
        fields = [field.model_copy(update={"path": f"{path}.{field.path}"}) for field in self.fields]
        return type(self)(fields, hint=self.hint, context=self.context)


class NotFoundError(RequestError):
    """There is no such thing."""

    code = "not_found"
    status = 404


class ConflictError(RequestError):
    """The request contradicts what is there already."""

    code = "conflict"
    status = 409


class TooLargeError(RequestError):
    """The body is larger than the service takes."""

    code = "request_entity_too_large"
    status = 413


class UnauthorizedError(RequestError):
    """The bearer key is missing or wrong."""

    code = "unauthorized"
    status = 401


class ForbiddenError(RequestError):
    """The key's role does not allow this, or a web page of another site asks for it."""

    code = "forbidden"
    status = 403


class MediaTypeError(RequestError):
    """The body is not JSON by its content type."""

    code = "unsupported_media_type"
    status = 415


class MisdirectedError(RequestError):
    """The request is for a host that this server does not answer for."""

    code = "misdirected_request"
    status = 421


class MalformedRequestError(RequestError):
    """The request is not valid HTTP/1.1, or two readers could understand it differently."""

    code = "malformed_request"


class HeadTooLargeError(RequestError):
    """The request line and the headers are larger than the service takes."""

    code = "request_header_fields_too_large"
    status = 431


class RequestTimeoutError(RequestError):
    """The request was not complete in time."""

    code = "request_timeout"
    status = 408
    retryable = True


class EnvironmentFailedError(ServiceError):
    """An environment's own code or its grader failed; trying again gives the same."""

    code = "environment_failed"
    boundary = Boundary.ENVIRONMENT


class StoreError(ServiceError):
    """The durable store cannot be read or written."""

    code = "store_unavailable"
    boundary = Boundary.STORE
    status = 503
    retryable = True


class RecordLostError(ServiceError):
    """A single record of the store is gone or cannot be read; all others can."""

    code = "record_lost"
    boundary = Boundary.STORE


class UnavailableError(ServiceError):
    """The service cannot take this now; later it can."""

    code = "unavailable"
    status = 503
    retryable = True


class StageTimeoutError(ServiceError):
    """A stage's deadline passed; only a slow start of a sandbox is worth another attempt."""

    code = "stage_timeout"

    def __init__(self, message: str, *, hint: str = "", retryable: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.retryable = retryable


class AttemptsExhaustedError(ServiceError):
    """The service died under this rollout as often as it may be tried."""

    code = "attempts_exhausted"


class ConfigurationError(ServiceError):
    """The service, or an environment of it, cannot be used as it is configured."""

    code = "bad_configuration"
    status = 503


class DefectError(ServiceError):
    """A defect of the service or of a plug-in; the log holds the traceback."""

    code = "internal_error"


@contextmanager
def prefix_field_paths(path: str) -> Iterator[None]:
    """Put the fields of an InvalidFieldError that is raised inside below a path."""
    try:
        yield
    except InvalidFieldError as error:
        raise error.under(path) from error


def find_known_error(error: BaseException) -> ServiceError | SandboxError | None:
    """The error of ours that an exception is, or that a group of exceptions holds; None for a defect."""
    if isinstance(error, BaseExceptionGroup):
        return next((cause for inner in error.exceptions if (cause := find_known_error(inner))), None)
    return error if isinstance(error, ServiceError | SandboxError) else None


def root_cause(error: BaseException) -> BaseException:
    """Return the exception inside of nested exception groups; an error of ours goes before a defect."""
    if (known := find_known_error(error)) is not None:
        return known
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe(error: BaseException, *, stage: str | None = None, attempt: int | None = None) -> ErrorInfo:
    """What a person and a program need to know of an exception, with the boundary that it crossed."""
    if isinstance(error, ServiceError):
        code, boundary, retryable, hint = error.code, error.boundary, error.retryable, error.hint
    elif isinstance(error, SandboxError):
        code, boundary, retryable, hint = error.code, Boundary.SANDBOX, error.retryable, error.hint
    else:
        code, boundary, retryable = DefectError.code, Boundary.SERVICE, False
        hint = "This is a defect of the service or of a plug-in; the log holds the traceback."
    message = str(error) or type(error).__name__
    if code == DefectError.code:
        message = f"{type(error).__name__}: {message}"
    return ErrorInfo(
        code=code,
        boundary=boundary,
        message=message,
        hint=hint,
        retryable=retryable,
        stage=stage,
        attempt=attempt,
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known name, or nothing."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
