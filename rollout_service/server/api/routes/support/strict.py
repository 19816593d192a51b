"""Strict reading of requests: values that cannot be stored and unknown parameters are refused before a route runs.

Guarantees: a body is JSON that can be written again (no lone surrogates, no NaN, bounded nesting) and does not take
many times its size; the route knows every query parameter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import anyio.to_thread
from fastapi import HTTPException, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel, JsonValue

from api_schemas.errors import FieldError
from rollout_service.base import strict_json
from rollout_service.base.errors import InvalidFieldError, TooLargeError, did_you_mean

INLINE_BYTES = 64 * 1024
"""Larger bodies are parsed in a thread."""
MAX_CONTAINERS = 250_000
"""The most lists and objects of a body; each takes up to a hundred times its two brackets."""


class StrictRequest(Request):
    """A request whose body is parsed strictly."""

    async def json(self) -> JsonValue:
        body = await self.body()
        if strict_json.has_more(body, b"{[", MAX_CONTAINERS):
            error = TooLargeError(
                f"the body has more than {MAX_CONTAINERS} lists and objects", hint="Send less at once."
            )
            raise HTTPException(error.status) from error
        try:
            if len(body) <= INLINE_BYTES:
                return strict_json.parse(body)
            return await anyio.to_thread.run_sync(strict_json.parse, body)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error


class StrictRoute(APIRoute):
    """A route that refuses unknown query parameters, and bodies that could not be stored."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = _query_names(self.dependant)

        async def strict(request: Request) -> Response:
            _refuse_unknown(request, known)
            return await handle(StrictRequest(request.scope, request.receive))

        return strict


def _query_names(dependant: Dependant) -> set[str]:
    own = {
        name for field in dependant.query_params for name in _names(field.alias, field.field_info.annotation)
    }
    return own.union(*map(_query_names, dependant.dependencies))


def _names(alias: str, annotation: object) -> Iterable[str]:
    """Return the names of the parameters that a query parameter, or a model of several, stands for."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [info.alias or name for name, info in annotation.model_fields.items()]
    return [alias]


def _refuse_unknown(request: Request, known: set[str]) -> None:
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        raise InvalidFieldError(
            [
                FieldError(
                    path=f"query.{name}", message=f"unknown query parameter{did_you_mean(name, known)}"
                )
                for name in unknown
            ]
        )
