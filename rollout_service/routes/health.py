"""Health: is it alive, can it take work, what do its metrics say."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from rollout_service import __version__
from rollout_service.routes.dependencies import ServiceDep

router = APIRouter(tags=["health"])


@router.get("/health")
async def health() -> dict[str, str]:
    """Alive."""
    return {"status": "ok", "version": __version__}


@router.get("/ready")
async def ready(service: ServiceDep) -> JSONResponse:
    """Whether the service can take work, and if not, what to do about it."""
    reasons = service.unready()
    status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
    return JSONResponse({"ready": not reasons, "reasons": reasons}, status)


@router.get("/metrics", response_class=Response)
async def metrics(service: ServiceDep) -> Response:
    """Prometheus metrics."""
    return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)
