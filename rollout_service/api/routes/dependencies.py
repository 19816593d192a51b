"""What the routes share: the service behind them, and an answer that is serialised once."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Request
from fastapi.responses import Response
from pydantic import BaseModel

from rollout_service.service import Service


def get_service(request: Request) -> Service:
    """The service that the app's lifespan opened."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(get_service)]


def as_json(model: BaseModel, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Serialise a model that is valid already; a long trajectory is not validated again on its way out."""
    return Response(model.model_dump_json(), status_code=status, media_type="application/json")
