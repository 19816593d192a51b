"""Environments: what tasks this service can run, and the instances that ship with them."""

from __future__ import annotations

from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Query
from pydantic import JsonValue

from api_schemas.base import MAX_INT, Name
from rollout_service.api.openapi.responses import raises
from rollout_service.api.routes.dependencies import ServiceDep
from rollout_service.api.routes.strict import StrictRoute
from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.environments.splits import select_split
from rollout_service.errors import InvalidFieldError, NotFoundError

router = APIRouter(prefix="/v1/environments", tags=["environments"], route_class=StrictRoute)


@router.get("")
async def list_environments(service: ServiceDep) -> list[EnvironmentSpec]:
    """All environments."""
    return [environment.spec for environment in service.environments.list()]


@router.get("/{name}/dataset", responses=raises(NotFoundError))
async def list_instances(
    service: ServiceDep,
    name: Name,
    offset: Annotated[int, Query(ge=0, le=MAX_INT)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    split: Annotated[
        str | None, Query(max_length=256, description="only the instances of this split")
    ] = None,
) -> list[dict[str, JsonValue]]:
    """Instances that ship with an environment."""
    try:
        environment = service.environments.get(name)
    except InvalidFieldError as error:
        raise NotFoundError(error.fields[0].message, hint=error.hint, context=error.context) from error
    found = await run_sync(environment.dataset)  # some make it, or read it from a disk
    if split is not None:
        found = select_split(found, split, field="query.split")
    return found[offset : offset + limit]
