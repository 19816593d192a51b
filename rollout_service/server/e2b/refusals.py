"""Errors as E2B's client expects them."""

from __future__ import annotations

import structlog
from pydantic import JsonValue, ValidationError
from starlette.responses import JSONResponse

from api_schemas.errors import sentences
from rollout_service.base.errors import ServiceError, TryLaterError
from rollout_service.http.problems import to_problem
from sandboxes import errors as sandbox_errors

STATUS: tuple[tuple[type[Exception], int], ...] = (
    (sandbox_errors.ImageNotFoundError, 404),
    (sandbox_errors.FileMissingError, 404),
    (sandbox_errors.SandboxClosedError, 502),
    (sandbox_errors.SandboxUnsavedError, 409),
    (sandbox_errors.SandboxPauseError, 503),
    (sandbox_errors.DiskFullError, 507),
    (sandbox_errors.FileTooLargeError, 413),
    (sandbox_errors.FileStalledError, 504),
    (sandbox_errors.SandboxFileError, 400),
    (sandbox_errors.SandboxConfigError, 400),
    (sandbox_errors.ImageError, 400),
)
log = structlog.get_logger(__name__)


def refusal_of(error: Exception) -> JSONResponse:
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, TryLaterError) else {}
    status, body = body_of(error)
    return JSONResponse(body, status, headers)


def body_of(error: Exception) -> tuple[int, dict[str, JsonValue]]:
    problem = to_problem(error)
    status, message = problem.status, problem.detail
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        status, message = 400, f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}"
    elif isinstance(error, sandbox_errors.SandboxError):
        status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
        message = sentences(str(error), error.hint)
    elif not isinstance(error, ServiceError):
        log.error("unhandled error in E2B's API", exc_info=error)
    return status, {"code": status, "message": message}
