"""Errors in the form of Anthropic's API."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson

from rollout_service.gateway.dialects.base import ErrorAnswer, describe_failure, retry_after
from rollout_service.gateway.errors import ContextOverflowError

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def error_object(error: BaseException) -> dict[str, Any]:
    """Return what stands under `error`."""
    status, message = describe_failure(error)
    if isinstance(error, ContextOverflowError):
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.context_length} maximum"
    return {"type": _TYPES.get(HTTPStatus(status), "invalid_request_error"), "message": message}


def error_answer(error: BaseException) -> ErrorAnswer:
    """Return an exception as the answer to a request."""
    status, _ = describe_failure(error)
    body = orjson.dumps({"type": "error", "error": error_object(error)})
    return ErrorAnswer(status, body, retry_after(error))
