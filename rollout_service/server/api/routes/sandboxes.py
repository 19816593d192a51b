"""Routes for live sandboxes."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter

from api_schemas.nodes import SandboxView
from rollout_service.server.api.routes.support.route import ServiceDep, StrictRoute

router = APIRouter(prefix="/v1", tags=["sandboxes"], route_class=StrictRoute)


@router.get("/sandboxes")
async def list_sandboxes(service: ServiceDep) -> list[SandboxView]:
    """List the sandboxes that are alive. Those in state `warm` were started ahead and wait for a rollout."""
    return [SandboxView.model_validate(asdict(info)) for info in service.sandboxes.live()]
