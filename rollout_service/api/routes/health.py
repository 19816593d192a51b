"""Health: is it alive, can it take work, what do its metrics say.

Guarantee: a service of which a part has failed does not say that it is alive.
"""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from api_schemas.nodes import Health, Readiness
from rollout_service import __version__
from rollout_service.api.openapi.responses import extra_response, media_response, raises
from rollout_service.api.routes.dependencies import ServiceDep
from rollout_service.errors import UnavailableError
from rollout_service.shutdown import Shutdown

router = APIRouter(tags=["health"])


@router.get("/health", responses=raises(UnavailableError))
async def get_health(request: Request) -> Health:
    """Alive."""
    shutdown: Shutdown = request.app.state.shutdown
    if shutdown.failed:
        raise UnavailableError("a part of the service failed", hint="Its log says why; restart it.")
    return Health(version=__version__)


@router.get("/ready", responses=extra_response(HTTPStatus.SERVICE_UNAVAILABLE, Readiness, "It cannot."))
async def get_readiness(service: ServiceDep, response: Response) -> Readiness:
    """Whether the service can take work, and if not, what to do about it."""
    reasons = service.unready()
    response.status_code = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
    return Readiness(ready=not reasons, reasons=reasons, warnings=service.warnings())


@router.get(
    "/metrics",
    response_class=Response,
    responses=media_response(CONTENT_TYPE_LATEST, "Prometheus's text format.", schema={"type": "string"}),
)
async def get_metrics(service: ServiceDep) -> Response:
    """Prometheus metrics."""
    return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)
