"""Helpers that the routes share: access to the service, and a response that is serialized once."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError

from api_schemas.base import TraceContext
from rollout_service.http.keyring import Role
from rollout_service.server.lifecycle import Service


def get_service(request: Request) -> Service:
    """Return the service that the app's lifespan opened."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(get_service)]


def role_of(request: Request) -> Role:
    """Return the role of the request's key; a server without keys lets everyone do everything."""
    role: Role = request.scope.get("state", {}).get("role", Role.ADMIN)
    return role


def as_json(model: BaseModel, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Serialize a model that is already valid, since validating a long trajectory again takes time."""
    return Response(model.model_dump_json(), status_code=status, media_type="application/json")


# The trace that a request's headers name.
#
# Guarantee: headers that are missing or malformed, which any proxy may have written, are as if they were not there.


def trace_of(request: Request) -> TraceContext | None:
    """Return the caller's span, as the headers `traceparent` and `tracestate` say it; None if they do not."""
    traceparent = request.headers.get("traceparent")
    if traceparent is None:
        return None
    try:
        return TraceContext(traceparent=traceparent, tracestate=request.headers.get("tracestate", ""))
    except ValidationError:
        return None
