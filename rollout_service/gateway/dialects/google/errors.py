"""Errors in the form of Google's API."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson

from rollout_service.base.errors import InvalidFieldError
from rollout_service.gateway.dialects.base import ErrorAnswer, describe_failure, retry_after
from rollout_service.gateway.errors import ContextOverflowError

_STATUSES = {
    HTTPStatus.UNAUTHORIZED: "UNAUTHENTICATED",
    HTTPStatus.FORBIDDEN: "PERMISSION_DENIED",
    HTTPStatus.NOT_FOUND: "NOT_FOUND",
    HTTPStatus.GONE: "NOT_FOUND",
    HTTPStatus.INTERNAL_SERVER_ERROR: "INTERNAL",
    HTTPStatus.TOO_MANY_REQUESTS: "RESOURCE_EXHAUSTED",
    HTTPStatus.SERVICE_UNAVAILABLE: "UNAVAILABLE",
}


def error_object(error: BaseException) -> dict[str, Any]:
    """Return what stands under `error`."""
    status, message = describe_failure(error)
    if isinstance(error, ContextOverflowError):
        message = (
            f"The input token count ({error.prompt_tokens}) exceeds the maximum number of tokens allowed "
            f"({error.context_length})."
        )
    told: dict[str, Any] = {
        "code": status,
        "message": message,
        "status": _STATUSES.get(HTTPStatus(status), "INVALID_ARGUMENT"),
    }
    if isinstance(error, InvalidFieldError):
        violations = [{"field": field.path, "description": field.message} for field in error.fields]
        detail = {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": violations}
        told["details"] = [detail]
    return told


def error_answer(error: BaseException) -> ErrorAnswer:
    """Return an exception as the answer to a request."""
    status, _ = describe_failure(error)
    return ErrorAnswer(status, orjson.dumps({"error": error_object(error)}), retry_after(error))
