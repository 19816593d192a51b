"""Declarations of a route's responses, for the OpenAPI document.

A route names the errors that it raises, as in `responses=raises(NotFoundError, ConflictError)`; their classes give the
status, and their docstrings the description. `openapi.document` adds the errors that any route can answer with, such as
a missing key.
"""

from __future__ import annotations

import inspect
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel

from rollout_service.base.errors import ServiceError
from rollout_service.http.problems import MEDIA_TYPE

PROBLEM_SCHEMA = "#/components/schemas/Problem"
BINARY = {"type": "string", "format": "binary"}

Responses = dict[int | str, dict[str, Any]]


def raises(*errors: type[ServiceError]) -> Responses:
    """Return the `responses` of a route that raises these errors."""
    declared: Responses = {}
    for error in errors:
        add_error(declared.setdefault(int(error.status), {}), error)
    return declared


def extra_response(status: HTTPStatus, model: type[BaseModel] | None, description: str) -> Responses:
    """Return the `responses` of a route for a further status; without a model the response has no body."""
    body = {} if model is None else {"model": model}
    return {int(status): {"description": description, **body}}


def media_response(
    media_type: str,
    description: str,
    *,
    status: HTTPStatus = HTTPStatus.OK,
    schema: dict[str, Any] | None = None,
) -> Responses:
    """Return the `responses` of a route for a media type other than JSON; without a schema it is binary."""
    content = {media_type: {"schema": BINARY if schema is None else schema}}
    return {int(status): {"description": description, "content": content}}


def add_error(answer: dict[str, Any], error: type[ServiceError]) -> None:
    summary = (inspect.getdoc(error) or "").partition("\n")[0]
    reason = f"`{error.code}`: {summary}"
    description = answer.get("description", "")
    if reason not in description:
        answer["description"] = f"{description}\n\n{reason}".strip()
    answer["content"] = {MEDIA_TYPE: {"schema": {"$ref": PROBLEM_SCHEMA}}}
