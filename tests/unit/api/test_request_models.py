"""No field of a request body accepts `true` or `"1"` as a number, `1` as a boolean, or `0` as a time."""

import types
from collections.abc import Iterator
from datetime import datetime
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, Strict

from rollout_service.server.api import routes


def bodies() -> set[Any]:
    modules = [import_module(f"{routes.__name__}.{found.name}") for found in iter_modules(routes.__path__)]
    routers = [module.router for module in modules if hasattr(module, "router")]
    fields = [
        route.body_field for router in routers for route in router.routes if isinstance(route, APIRoute)
    ]
    return {field.field_info.annotation for field in fields if field}


def lax_fields(annotation: Any, metadata: tuple[Any, ...], where: str, seen: set[Any]) -> Iterator[str]:
    """Yield the paths of numbers, booleans and times that pydantic would convert."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from lax_fields(inner[0], (*metadata, *inner[1:]), where, seen)
    elif annotation in (int, float, bool, datetime):
        if not any(isinstance(each, Strict | BeforeValidator) for each in metadata):
            yield f"{where}: {annotation.__name__}"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation not in seen:
            seen.add(annotation)
            for name, field in annotation.model_fields.items():
                yield from lax_fields(
                    field.annotation, tuple(field.metadata), f"{annotation.__name__}.{name}", seen
                )
    elif origin is not Literal:
        kept = metadata if origin in (Union, types.UnionType) else ()
        for each in inner:
            yield from lax_fields(each, kept, where, seen)


def test_scalars_of_requests_are_not_converted():
    seen: set[Any] = set()
    assert [lax for body in bodies() for lax in lax_fields(body, (), str(body), seen)] == []
    assert len(seen) > 20
