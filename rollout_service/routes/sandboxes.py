"""Sandboxes and nodes: what is alive, how much more the host bears, and why not more."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from api_schemas.nodes import NodeView
from rollout_service.routes.dependencies import ServiceDep

router = APIRouter(prefix="/v1", tags=["sandboxes"])


@router.get("/sandboxes")
async def sandboxes(service: ServiceDep) -> list[dict[str, Any]]:
    """The sandboxes that are alive; those of state `warm` wait for a rollout."""
    return [asdict(info) for info in service.sandboxes.live()]


@router.get("/nodes")
async def nodes(service: ServiceDep) -> list[NodeView]:
    """The hosts that run sandboxes: this one."""
    return [service.node.view()]
