"""The errors of the service, each named for the boundary that it crossed.

Inference and token errors (`engines/errors.py`, `tokens/errors.py`) are ServiceErrors too. Those of `sandboxes` are
not, since that package does not know this one; `describe` takes both. `hint` says what to do next.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any, ClassVar, Self

from api_schemas.errors import Boundary, ErrorInfo, FieldError, sentences
from sandboxes.errors import SandboxError

MAX_FRAMES = 5
"""Enough to see who called whom."""
MAX_FRAME_CHARS = 200
"""Only generated names are longer."""
ENVIRONMENT_PACKAGES: set[str] = set()
"""Packages that define environments, besides this one; each subclass of `Environment` adds its own."""


class ServiceError(Exception):
    code: ClassVar[str] = "service_error"
    boundary: ClassVar[Boundary] = Boundary.SERVICE
    status: ClassVar[int] = 500
    retryable: bool = False

    def __init__(self, message: str, *, hint: str = "", context: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.context = context or {}


class RequestError(ServiceError):
    """The request cannot be carried out as it is."""

    code = "bad_request"
    boundary = Boundary.REQUEST
    status = 400


class MalformedBodyError(RequestError):
    """The body is not valid JSON."""

    code = "malformed_json"


class InvalidFieldError(RequestError):
    """A field of the request is invalid; `fields` says which."""

    code = "invalid_field"
    status = 422

    def __init__(self, fields: Sequence[FieldError], *, hint: str = "", context: dict[str, Any] | None = None) -> None:
        super().__init__("; ".join(f"{f.path}: {f.message}" for f in fields), hint=hint, context=context)
        self.fields = list(fields)

    @classmethod
    def at(cls, path: str, message: str, *, hint: str = "", context: dict[str, Any] | None = None) -> Self:
        """Return the error of one field."""
        return cls([FieldError(path=path, message=message)], hint=hint, context=context)

    def under(self, path: str) -> Self:
        fields = [field.model_copy(update={"path": f"{path}.{field.path}"}) for field in self.fields]
        return type(self)(fields, hint=self.hint, context=self.context)


class NotFoundError(RequestError):
    """The resource does not exist."""

    code = "not_found"
    status = 404


class ConflictError(RequestError):
    """The request contradicts something that already exists."""

    code = "conflict"
    status = 409


class TooLargeError(RequestError):
    """The body is larger than the service accepts."""

    code = "request_entity_too_large"
    status = 413


class UnauthorizedError(RequestError):
    """The bearer key is missing or wrong."""

    code = "unauthorized"
    status = 401


class ForbiddenError(RequestError):
    """The key's role does not allow this, or a web page of another site sent it."""

    code = "forbidden"
    status = 403


class MediaTypeError(RequestError):
    """The body's content type is not JSON."""

    code = "unsupported_media_type"
    status = 415


class MisdirectedError(RequestError):
    """The request names a host that this server does not answer for."""

    code = "misdirected_request"
    status = 421


class MalformedRequestError(RequestError):
    """The request is not valid HTTP/1.1, or is ambiguous."""

    code = "malformed_request"


class HeadTooLargeError(RequestError):
    """The request line and headers are larger than the service accepts."""

    code = "request_header_fields_too_large"
    status = 431


class RequestTimeoutError(RequestError):
    """The request did not arrive in time."""

    code = "request_timeout"
    status = 408
    retryable = True


class EnvironmentFailedError(ServiceError):
    """An environment's own code or its grader failed; another attempt would fail the same way."""

    code = "environment_failed"
    boundary = Boundary.ENVIRONMENT


class SecretMissingError(EnvironmentFailedError):
    """A secret of an environment is missing on this host, or not allowed; the value is never named."""

    code = "secret_missing"


class SecretTooShortError(SecretMissingError):
    """The value of a secret is so short that it cannot be masked."""

    code = "secret_too_short"


class StoreError(ServiceError):
    """The durable store cannot be read or written."""

    code = "store_unavailable"
    boundary = Boundary.STORE
    status = 503
    retryable = True


class LeadershipLostError(StoreError):
    """The store refused a write of a service that no longer leads; another one goes on with its work."""

    code = "leadership_lost"


class RecordLostError(ServiceError):
    """One record of the store is gone or cannot be read; all others are intact."""

    code = "record_lost"
    boundary = Boundary.STORE


class UnavailableError(ServiceError):
    """The service cannot do this now; it may later."""

    code = "unavailable"
    status = 503
    retryable = True


class TryLaterError(UnavailableError):
    """The service cannot do this now; `retry_after` says when to ask again."""

    code = "try_later"

    def __init__(self, message: str, *, hint: str = "", seconds: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = max(1, ceil(seconds))


class TooManyBytesError(TryLaterError):
    """There was no room for a request's body in time, since too many others are being read."""

    code = "too_many_bytes"
    status = 429


class TooManySandboxesError(TryLaterError):
    """There is no place for another sandbox of a program now."""

    code = "too_many_sandboxes"
    status = 429


class StageTimeoutError(ServiceError):
    """A stage's deadline passed; it is retried only if a sandbox was slow to start."""

    code = "stage_timeout"

    def __init__(self, message: str, *, hint: str = "", retryable: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.retryable = retryable


class AttemptsExhaustedError(ServiceError):
    """The service crashed in every attempt that the rollout was allowed."""

    code = "attempts_exhausted"


class ConfigurationError(ServiceError):
    """The service, or one of its environments, cannot run as it is configured."""

    code = "bad_configuration"
    status = 503


class DefectError(ServiceError):
    """A bug in the service or in a plug-in; the log has the traceback."""

    code = "internal_error"


@contextmanager
def prefix_field_paths(path: str) -> Iterator[None]:
    try:
        yield
    except InvalidFieldError as error:
        raise error.under(path) from error


def find_known_error(error: BaseException) -> ServiceError | SandboxError | None:
    """Return the known error, also out of an exception group; None for a defect."""
    if isinstance(error, BaseExceptionGroup):
        return next((cause for inner in error.exceptions if (cause := find_known_error(inner))), None)
    return error if isinstance(error, ServiceError | SandboxError) else None


def root_cause(error: BaseException) -> BaseException:
    """Return the exception inside nested groups, preferring a known error to a defect."""
    if (known := find_known_error(error)) is not None:
        return known
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe(error: BaseException, *, stage: str | None = None, attempt: int | None = None) -> ErrorInfo:
    frames: list[str] = []
    if isinstance(error, ServiceError):
        code, boundary, retryable, hint = error.code, error.boundary, error.retryable, error.hint
    elif isinstance(error, SandboxError):
        code, boundary, retryable, hint = error.code, Boundary.SANDBOX, error.retryable, error.hint
    else:
        code, boundary, retryable = DefectError.code, Boundary.SERVICE, False
        frames = environment_frames(error)
        hint = (
            f"This is a bug in the environment's code, at {frames[-1]}."
            if frames
            else "This is a bug in the service or in a plug-in. The log has the traceback."
        )
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
        frames=frames,
    )


def environment_frames(error: BaseException) -> list[str]:
    """Return a traceback's last frames in packages that define environments.

    Tenants read them over the API, so they name modules, lines and functions, and no paths, source or values.
    """
    frames = [
        f"{name}, line {line}, in {frame.f_code.co_name}"[:MAX_FRAME_CHARS]
        for frame, line in traceback.walk_tb(root_cause(error).__traceback__)
        if (name := str(frame.f_globals.get("__name__"))).partition(".")[0] in ENVIRONMENT_PACKAGES
    ]
    return frames[-MAX_FRAMES:]


def format_failure(info: ErrorInfo) -> str:
    """Return an error's code, message and hint, with the environment's frames below them."""
    frames = "".join(f"\n  at {frame}" for frame in info.frames)
    return f"{info.code}: {sentences(info.message, info.hint)}{frames}"


def without_message(error: BaseException) -> dict[str, str]:
    """Return the log fields of an error whose message may quote a user; a defect has its stack."""
    told = {"code": describe(error).code, "error": type(error).__name__}
    if told["code"] == DefectError.code:
        told["stack"] = "".join(traceback.format_tb(error.__traceback__))
    return told


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the closest known name, or nothing if none is close."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
