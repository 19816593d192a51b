"""Routes that list the environments of this service, and the instances that ship with them."""

from __future__ import annotations

from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Query
from pydantic import JsonValue

from api_schemas.base import MAX_INT, Name
from api_schemas.environments import EnvironmentView
from rollout_service.base.errors import InvalidFieldError, NotFoundError
from rollout_service.environments.dataset_files import select_split
from rollout_service.server.api.routes.support.route import ServiceDep, StrictRoute, raises

router = APIRouter(prefix="/v1/environments", tags=["environments"], route_class=StrictRoute)


@router.get("")
async def list_environments(service: ServiceDep) -> list[EnvironmentView]:
    """List the environments that tasks can name, with their image, tools, and limits."""
    specs = [environment.spec for environment in service.environments.list()]
    return [EnvironmentView.model_validate(spec.model_dump(mode="json")) for spec in specs]


@router.get("/{name}/dataset", responses=raises(NotFoundError))
async def list_instances(
    service: ServiceDep,
    name: Name,
    offset: Annotated[int, Query(ge=0, le=MAX_INT, description="Instances to skip.")] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Instances to return at most.")] = 100,
    split: Annotated[
        str | None,
        Query(max_length=256, description="List only the instances of this split, such as `train`."),
    ] = None,
) -> list[dict[str, JsonValue]]:
    """List the instances that ship with an environment, in their order.

    Each is a task's `instance`, ready to be submitted. An environment without a data set answers with an empty list; an
    unknown split is a 422 that names the known ones.
    """
    try:
        environment = service.environments.get(name)
    except InvalidFieldError as error:
        raise NotFoundError(error.fields[0].message, hint=error.hint, context=error.context) from error
    found = await run_sync(environment.dataset)  # it may be generated, or read from a disk
    if split is not None:
        found = select_split(found, split, field="query.split")
    return found[offset : offset + limit]
