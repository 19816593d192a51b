"""Every error that reaches the API becomes an RFC 9457 problem with a code, a field's path, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from api_schemas.errors import FieldError, Problem
from rollout_service.errors import InvalidFieldError, MalformedBodyError, ServiceError, describe
from sandboxes.errors import SandboxError

log = structlog.get_logger(__name__)

MEDIA_TYPE = "application/problem+json"


def respond(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """A response that carries a problem."""
    return Response(
        problem.model_dump_json(exclude_defaults=False),
        status_code=problem.status,
        media_type=MEDIA_TYPE,
        headers=headers,
    )


def problem_of(error: BaseException) -> Problem:
    """The problem that an exception is shown as."""
    info = describe(error)
    status = error.status if isinstance(error, ServiceError) else HTTPStatus.INTERNAL_SERVER_ERROR
    if isinstance(error, SandboxError):
        status = HTTPStatus.SERVICE_UNAVAILABLE
    return Problem(
        title=info.code.replace("_", " ").capitalize(),
        status=status,
        detail=_sentences(info.message, info.hint),
        code=info.code,
        retryable=info.retryable,
        errors=error.fields if isinstance(error, InvalidFieldError) else [],
        context=error.context if isinstance(error, ServiceError) else {},
    )


def _sentences(message: str, hint: str) -> str:
    """What happened, and what to do next, as one text."""
    return f"{message.rstrip('.')}. {hint}" if hint else message


def install(app: FastAPI) -> None:
    """Answer every exception with a problem."""
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(SandboxError, _service_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, _defect)


async def _service_error(_: Request, error: Exception) -> Response:
    problem = problem_of(error)
    return respond(
        problem, {"Retry-After": "1"} if problem.status == HTTPStatus.SERVICE_UNAVAILABLE else None
    )


async def _defect(request: Request, error: Exception) -> Response:
    log.error("a request met a defect", method=request.method, path=request.url.path, exc_info=error)
    return respond(problem_of(error))


async def _validation_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    fields = [FieldError(path=_path(item["loc"]), message=_message(item)) for item in error.errors()]
    malformed = any(item["type"] == "json_invalid" for item in error.errors())
    return respond(
        Problem(
            title="The body is not valid JSON" if malformed else "The request has invalid fields",
            status=HTTPStatus.BAD_REQUEST if malformed else HTTPStatus.UNPROCESSABLE_ENTITY,
            detail="; ".join(f"{field.path}: {field.message}" for field in fields),
            code=MalformedBodyError.code if malformed else InvalidFieldError.code,
            errors=fields,
        )
    )


async def _http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    title = HTTPStatus(error.status_code).phrase
    return respond(
        Problem(
            title=title,
            status=error.status_code,
            detail=_http_detail(request, error),
            code=title.lower().replace(" ", "_"),
        ),
        error.headers,
    )


def _http_detail(request: Request, error: HTTPException) -> str:
    if error.status_code == HTTPStatus.NOT_FOUND:
        close = difflib.get_close_matches(request.url.path, request.app.state.paths, n=1)
        return f"there is no {request.url.path} here" + (
            f"; did you mean {close[0]}?" if close else "; see /docs"
        )
    return str(error.detail)


def _path(loc: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in loc)


def _message(item: dict[str, Any]) -> str:
    if item["type"] == "extra_forbidden":
        return "unknown field"
    if item["type"] == "json_invalid":
        return f"not valid JSON: {item.get('ctx', {}).get('error', item['msg'])}"
    if item["loc"] == ("body",) and isinstance(item.get("input"), bytes):
        return "is not read as JSON: send it with `Content-Type: application/json`"
    return str(item["msg"]).removeprefix("Value error, ")
