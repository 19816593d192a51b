"""Turns every error into an RFC 9457 problem, with a code, the paths of invalid fields, and a hint."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from api_schemas.errors import FieldError, Problem, sentences
from rollout_service.base.errors import (
    InvalidFieldError,
    MalformedBodyError,
    ServiceError,
    TryLaterError,
    describe,
    did_you_mean,
)
from rollout_service.base.validation import known_fields, path_as_sent
from rollout_service.http.access_log import without_keys
from sandboxes.errors import SandboxError

log = structlog.get_logger(__name__)

MEDIA_TYPE = "application/problem+json"
MAX_ERRORS = 100
"""The most invalid fields that a problem names."""


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        problem.model_dump_json(exclude_defaults=False),
        status_code=problem.status,
        media_type=MEDIA_TYPE,
        headers=headers,
    )


def to_problem(error: BaseException) -> Problem:
    info = describe(error)
    status = error.status if isinstance(error, ServiceError) else HTTPStatus.INTERNAL_SERVER_ERROR
    if isinstance(error, SandboxError):
        status = HTTPStatus.SERVICE_UNAVAILABLE
    return Problem(
        title=info.code.replace("_", " ").capitalize(),
        status=status,
        detail=sentences(info.message, info.hint),
        code=info.code,
        retryable=info.retryable,
        errors=error.fields if isinstance(error, InvalidFieldError) else [],
        context=error.context if isinstance(error, ServiceError) else {},
    )


def install(app: FastAPI) -> None:
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(SandboxError, _service_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, _defect)


async def _service_error(_: Request, error: Exception) -> Response:
    problem = to_problem(error)
    if isinstance(error, TryLaterError):
        return problem_response(problem, {"Retry-After": str(error.retry_after)})
    return problem_response(problem, {"Retry-After": "1"} if problem.status == HTTPStatus.SERVICE_UNAVAILABLE else None)


async def _defect(request: Request, error: Exception) -> Response:
    path = without_keys(request.url.path)
    log.error("unhandled error in request", method=request.method, path=path, exc_info=error)
    return problem_response(to_problem(error))


async def _validation_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    known, errors = _known_fields(request), error.errors()[:MAX_ERRORS]
    fields = [FieldError(path=_path(item, error.body), message=_message(item, known)) for item in errors]
    malformed = any(item["type"] == "json_invalid" for item in errors)
    return problem_response(
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
    if isinstance(error.__cause__, ServiceError):  # FastAPI passes on only exceptions of its own
        return await _service_error(request, error.__cause__)
    if isinstance(error.__cause__, RequestValidationError):
        return await _validation_error(request, error.__cause__)
    title = HTTPStatus(error.status_code).phrase
    headers = error.headers
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED and (allowed := _allowed(request)):
        headers = {"Allow": ", ".join(sorted(allowed))}
    return problem_response(
        Problem(
            title=title,
            status=error.status_code,
            detail=_http_detail(request, error),
            code=title.lower().replace(" ", "_"),
        ),
        headers,
    )


def _allowed(request: Request) -> set[str]:
    """Return the methods of all routes at a path; Starlette reports only those of the first."""
    routes: list[APIRoute] = request.app.state.routes
    here = [route for route in routes if route.path_regex.match(request.url.path)]
    # An id may contain slashes, so a longer path may also match as part of an id: the most literal route is meant.
    meant = max((route.path for route in here), key=_literal_length, default="")
    return {method for route in here if route.path == meant for method in route.methods or ()}


def _literal_length(path: str) -> int:
    return len(re.sub(r"\{[^}]*\}", "", path))


def _http_detail(request: Request, error: HTTPException) -> str:
    if error.status_code == HTTPStatus.NOT_FOUND:
        if request.url.path.startswith("/v1/v1/"):
            return f"there is no route {request.url.path}; leave /v1 out of the server's URL"
        close = difflib.get_close_matches(request.url.path, [route.path for route in request.app.state.routes], n=1)
        return f"there is no route {request.url.path}" + (
            f"; did you mean {close[0]}?" if close else "; /docs lists the routes"
        )
    return str(error.detail)


def _known_fields(request: Request) -> Callable[[Sequence[int | str]], set[str]]:
    field = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(field, "field_info", None), "annotation", None)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return lambda _: set()
    return lambda path: known_fields(model, path)


def _path(item: dict[str, Any], body: object) -> str:
    where, *inside = item["loc"]
    if where != "body":
        return ".".join(map(str, item["loc"]))
    if item["type"] == "json_invalid" or not inside:
        return "body"  # for invalid JSON, the message has the position
    return ".".join(["body", *map(str, path_as_sent(inside, body, missing=item["type"] == "missing"))])


def _message(item: dict[str, Any], known: Callable[[Sequence[int | str]], set[str]]) -> str:
    if item["type"] == "extra_forbidden":
        *parents, name = item["loc"][1:]
        return f"unknown field{did_you_mean(str(name), known(parents))}"
    if item["type"] == "json_invalid":
        return f"not valid JSON: {item.get('ctx', {}).get('error', item['msg'])}"
    if item["loc"] == ("body",) and item["type"] == "missing":
        return "missing; send a JSON object, which may be {} if no field is required"
    if item["loc"] == ("body",) and isinstance(item.get("input"), bytes):
        return "not sent as JSON; send it with `Content-Type: application/json`"
    return str(item["msg"]).removeprefix("Value error, ")
