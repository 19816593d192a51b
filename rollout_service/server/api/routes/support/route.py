"""The class of all routes, the declarations of their responses, and helpers that routes share.

Values that cannot be stored and unknown parameters are refused before a route runs. A body is JSON that can be written
again (no lone surrogates, no NaN, bounded nesting) and does not take many times its size in memory.

A route names the errors that it raises, as in `responses=raises(NotFoundError, ConflictError)`; their classes give the
status, and their docstrings the description. `openapi` adds the errors of any route, such as a missing key.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine, Iterable
from http import HTTPStatus
from typing import Annotated, Any

import anyio.to_thread
from fastapi import Depends, HTTPException, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, JsonValue, ValidationError

from api_schemas.base import TraceContext
from api_schemas.errors import FieldError
from rollout_service.base import strict_json
from rollout_service.base.errors import InvalidFieldError, ServiceError, TooLargeError, did_you_mean
from rollout_service.http.keyring import Role
from rollout_service.http.problems import MAX_ERRORS, MEDIA_TYPE
from rollout_service.server.lifecycle import Service

INLINE_BYTES = 64 * 1024
MAX_CONTAINERS = 250_000
"""The most lists and objects in a body; each takes up to a hundred times its two brackets."""
MAX_MEMBERS = 50_000
"""The most members of an object in a body: of those that are unknown, each is an error."""
BODY_IS_PARSED = "body_is_parsed"
"""In the scope's state: called once a body takes no memory any more beside its values."""
PROBLEM_SCHEMA = "#/components/schemas/Problem"
TEXT = {"type": "string"}
BINARY = {"type": "string", "format": "binary"}

Responses = dict[int | str, dict[str, Any]]


def get_service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(get_service)]


def role_of(request: Request) -> Role:
    """Return the role of the request's key; without keys, everyone may do everything."""
    role: Role = request.scope.get("state", {}).get("role", Role.ADMIN)
    return role


def key_check(request: Request) -> Callable[[], bool]:
    """Return a function that tells whether the request's key is still allowed, for answers that do not end."""
    check: Callable[[], bool] = request.scope.get("state", {}).get("is_allowed", lambda: True)
    return check


def as_json(model: BaseModel, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Serialize without validation, which takes long for a long trajectory."""
    return Response(model.model_dump_json(), status_code=status, media_type="application/json")


def trace_of(request: Request) -> TraceContext | None:
    """Return the caller's span. Any proxy may have written the headers, so malformed ones count as missing."""
    traceparent = request.headers.get("traceparent")
    if traceparent is None:
        return None
    try:
        return TraceContext(traceparent=traceparent, tracestate=request.headers.get("tracestate", ""))
    except ValidationError:
        return None


class StrictRequest(Request):
    def __init__(self, request: Request, model: type[BaseModel]) -> None:
        """`model` is that of the route's body."""
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> JsonValue | BaseModel:
        """Return the body, a large one as the route's model: for tens of thousands of tasks, that takes seconds."""
        try:
            return await self._parsed()
        finally:
            self.scope.get("state", {}).get(BODY_IS_PARSED, lambda: None)()

    async def _parsed(self) -> JsonValue | BaseModel:
        body = await self.body()
        try:
            if len(body) <= INLINE_BYTES:
                return strict_json.parse(body)
            return await anyio.to_thread.run_sync(_parse_large, body, self._model)
        except TooLargeError as error:
            raise HTTPException(error.status) from error
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error


def _parse_large(body: bytes, model: type[BaseModel]) -> BaseModel:
    if strict_json.has_more(body, b"{[", MAX_CONTAINERS):
        raise TooLargeError(f"the body has more than {MAX_CONTAINERS} lists and objects", hint="Send less at once.")
    value = strict_json.parse(body)
    if strict_json.has_larger_object(value, MAX_MEMBERS):
        raise TooLargeError(f"an object in the body has more than {MAX_MEMBERS} members", hint="Send less at once.")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(errors, body=value) from error


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = _query_names(self.dependant)
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation

        async def strict(request: Request) -> Response:
            _refuse_unknown(request, known)
            return await handle(request if model is None else StrictRequest(request, model))

        return strict


def _query_names(dependant: Dependant) -> set[str]:
    own = {name for field in dependant.query_params for name in _names(field.alias, field.field_info.annotation)}
    return own.union(*map(_query_names, dependant.dependencies))


def _names(alias: str, annotation: object) -> Iterable[str]:
    """Return the names of a query parameter: several if it is a model."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [info.alias or name for name, info in annotation.model_fields.items()]
    return [alias]


def _refuse_unknown(request: Request, known: set[str]) -> None:
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        raise InvalidFieldError(
            [
                FieldError(path=f"query.{name}", message=f"unknown query parameter{did_you_mean(name, known)}")
                for name in unknown[:MAX_ERRORS]
            ]
        )


def raises(*errors: type[ServiceError]) -> Responses:
    declared: Responses = {}
    for error in errors:
        add_error(declared.setdefault(int(error.status), {}), error)
    return declared


def extra_response(status: HTTPStatus, model: type[BaseModel] | None, description: str) -> Responses:
    body = {} if model is None else {"model": model}
    return {int(status): {"description": description, **body}}


def media_response(description: str, *media_types: str, schema: dict[str, str] = TEXT) -> Responses:
    """Declare an answer that is not JSON, in whichever of its media types the client asks for."""
    content = {media_type: {"schema": schema} for media_type in media_types}
    return {int(HTTPStatus.OK): {"description": description, "content": content}}


def add_error(answer: dict[str, Any], error: type[ServiceError]) -> None:
    summary = (inspect.getdoc(error) or "").partition("\n")[0]
    reason = f"`{error.code}`: {summary}"
    description = answer.get("description", "")
    if reason not in description:
        answer["description"] = f"{description}\n\n{reason}".strip()
    answer["content"] = {MEDIA_TYPE: {"schema": {"$ref": PROBLEM_SCHEMA}}}
