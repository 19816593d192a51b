"""Descriptions of validation errors, for the author of the document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from rollout_service.base.errors import did_you_mean


def describe_problems(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return `path: message` for each problem; an unknown field comes with the closest known one at its path."""
    return [_problem(item, model) for item in error.errors(include_url=False, include_context=False)]


def _problem(item: Any, model: type[BaseModel]) -> str:
    *parents, last = item["loc"] or ("",)
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        message = f"unknown field{did_you_mean(str(last), known_fields(model, parents))}"
    if item["type"] == "json_invalid":
        message = message.replace("Invalid JSON:", "not valid JSON:")
    path = ".".join(map(str, item["loc"]))
    return f"{path}: {message}" if path else message


def known_fields(model: type[BaseModel], path: Iterable[str | int]) -> set[str]:
    """Return the fields at a path; indices, mapping keys, and union tags are passed over."""
    models = [model]
    for part in path:
        below = [one.model_fields[part].annotation for one in models if part in one.model_fields]
        models = [inner for annotation in below for inner in _models(annotation)] or models
    return {name for one in models for name in one.model_fields}


def path_as_sent(loc: Iterable[str | int], sent: object, *, missing: bool) -> list[str | int]:
    """Return a location as a path in the document, without the names that pydantic gives to union members.

    `missing` says that the last part is a field that the document lacks.
    """
    *parents, last = list(loc) or [""]
    path: list[str | int] = []
    for part in parents:
        if _holds(sent, part):
            sent = sent[part]  # type: ignore[index]
            path.append(part)
    return [*path, last] if missing or _holds(sent, last) else path


def _holds(sent: object, part: str | int) -> bool:
    if isinstance(sent, dict):
        return part in sent
    return isinstance(sent, list) and isinstance(part, int) and part < len(sent)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
