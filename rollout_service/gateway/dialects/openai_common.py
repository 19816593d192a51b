"""The common parts of OpenAI's two APIs: tool choices, errors, and lists of models."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import orjson

from rollout_service.base.errors import InvalidFieldError
from rollout_service.gateway.dialects.base import ErrorAnswer, ListedModel, describe_failure, retry_after
from rollout_service.gateway.dialects.fields import Fields, invalid, kind
from rollout_service.gateway.errors import ContextOverflowError

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
    """Refuse a choice of tools that has no known form, of Chat Completions or of Responses.

    Raises:
        InvalidFieldError: The choice is neither a known word nor an object with a type.
    """
    value = fields.values.get("tool_choice")
    if isinstance(value, dict):
        Fields(value, fields.at("tool_choice")).required_text("type")
    elif value not in (None, "auto", "none", "required"):
        shown = f"{value!r:.80}" if isinstance(value, str) else kind(value)
        invalid(fields.at("tool_choice"), f"must be auto, none, required, or an object, not {shown}")


def error_object(error: BaseException) -> dict[str, Any]:
    """Return the value of `error`."""
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


def error_answer(error: BaseException) -> ErrorAnswer:
    """Return an exception as the answer to a request."""
    status, _ = describe_failure(error)
    return ErrorAnswer(status, orjson.dumps({"error": error_object(error)}), retry_after(error))


def _overflow(error: ContextOverflowError) -> str:
    return (
        f"This model's maximum context length is {error.context_length} tokens. "
        f"However, your messages resulted in {error.prompt_tokens} tokens."
    )


def model_list(models: Sequence[ListedModel]) -> bytes:
    """Return the body of `GET /v1/models`."""
    return orjson.dumps({"object": "list", "data": [_model_object(model) for model in models]})


def model_body(model: ListedModel) -> bytes:
    """Return the body of `GET /v1/models/{model}`."""
    return orjson.dumps(_model_object(model))


def _model_object(model: ListedModel) -> dict[str, Any]:
    described: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "rollout-service",
    }
    return described | ({"max_model_len": model.context_length} if model.context_length else {})
