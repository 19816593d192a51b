"""Probes and metrics. A service that has lost one of its parts does not report that it is alive."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from api_schemas.nodes import Health, Readiness
from rollout_service import __version__
from rollout_service.base.errors import UnavailableError
from rollout_service.base.shutdown import Shutdown
from rollout_service.server.api.routes.support.route import ServiceDep, extra_response, media_response, raises

router = APIRouter(tags=["health"])


@router.get("/health", responses=raises(UnavailableError))
async def get_health(request: Request) -> Health:
    """Check that the service is alive; use it as a liveness probe.

    A 503 means that a part of the service has failed and that it must be restarted. Needs no key.
    """
    shutdown: Shutdown = request.app.state.shutdown
    if shutdown.failed:
        raise UnavailableError("a part of the service failed", hint="The log has the reason. Restart the service.")
    return Health(version=__version__)


@router.get(
    "/ready",
    responses=extra_response(
        HTTPStatus.SERVICE_UNAVAILABLE, Readiness, "The service cannot take work; `reasons` says why."
    ),
)
async def get_readiness(service: ServiceDep, response: Response) -> Readiness:
    """Check that the service can take work; use it as a readiness probe.

    `reasons` says what is missing and what to do about it; `warnings` names problems that keep some rollouts
    from running, or none. Needs no key.
    """
    reasons = service.unready()
    response.status_code = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
    return Readiness(ready=not reasons, reasons=reasons, warnings=service.warnings())


@router.get(
    "/metrics",
    response_class=Response,
    responses=media_response("Metrics in Prometheus's text format.", CONTENT_TYPE_LATEST),
)
async def get_metrics(service: ServiceDep) -> Response:
    """Read the service's metrics, for a Prometheus scrape. With keys configured it needs one; any role will do."""
    await service.live.funnel.refresh()
    await service.count_queued()
    return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)
