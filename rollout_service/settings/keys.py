"""The keys of the settings, derived from their models: for the reference, for variables, and for suggestions.

Every key that can be set is listed once, with its table, its type, and its field's docstring.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import NoDecode

from api_schemas.base import field_docstrings

_CONTAINERS = (list, tuple, set, dict)
ANY_NAME = "NAME"
"""Stands in paths for a name that the user chooses, such as a pool's."""


@dataclass(frozen=True, slots=True)
class Key:
    path: tuple[str, ...]
    field: FieldInfo
    about: str
    """The field's docstring."""

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class Table:
    """The keys directly in one table of the settings."""

    path: tuple[str, ...]
    about: str
    keys: list[Key]
    tag: str = ""
    """The distinction from other tables at the same path, such as `provider = "apptainer"`."""
    repeated: bool = False
    """Whether it is a list entry, `[[table]]` in TOML."""


def iter_tables(model: type[BaseModel], path: tuple[str, ...] = (), tag: str = "") -> Iterator[Table]:
    keys = [key for key in _keys(model, path) if not is_table(key.field.annotation)]
    yield Table(path, _about(model), keys, tag)
    for name, field in model.model_fields.items():
        yield from _below((*path, name), field)


def known_keys(model: type[BaseModel]) -> set[str]:
    """Return the dotted paths of all keys and tables."""
    found = list(iter_tables(model))
    paths = {key.path for table in found if not table.repeated for key in table.keys}
    paths |= {table.path for table in found if table.path and table.path[-1] != ANY_NAME}
    return {".".join(path) for path in paths}


def fields_at(model: type[BaseModel], path: Sequence[str]) -> list[FieldInfo]:
    """Return the fields that a path may lead to; none if there is no such key."""
    fields = [FieldInfo(annotation=model)]
    for part in path:
        fields = [below for one in fields for below in _step(one.annotation, part)]
    return fields


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return [model for inner in get_args(annotation) for model in models_in(inner)]
    return []


def is_table(annotation: Any) -> bool:
    """Return whether a value is a table in TOML, or a table of tables whose names the user chooses."""
    return bool(models_in(annotation)) or (get_origin(annotation) is dict and bool(_values_of(annotation)))


def is_json(field: FieldInfo) -> bool:
    """Return whether an environment variable must give the value as JSON."""
    if NoDecode in field.metadata:
        return False
    return is_table(field.annotation) or get_origin(_without_none(field.annotation)) in _CONTAINERS


def _below(path: tuple[str, ...], field: FieldInfo) -> Iterator[Table]:
    models = models_in(field.annotation)
    for model in models:
        tag = model.model_fields[str(field.discriminator)] if field.discriminator else None
        yield from iter_tables(model, path, _tag(str(field.discriminator), tag) if tag else "")
    for model in _values_of(field.annotation):
        yield from iter_tables(model, (*path, ANY_NAME))
    if get_origin(field.annotation) is list:
        for model in models_in(get_args(field.annotation)[0]):
            yield Table(path, _about(model), _keys(model, path), repeated=True)


def _keys(model: type[BaseModel], path: tuple[str, ...]) -> list[Key]:
    about = field_docstrings(model)
    return [Key((*path, name), field, about.get(name, "")) for name, field in model.model_fields.items()]


def _step(annotation: Any, part: str) -> Iterator[FieldInfo]:
    for model in models_in(annotation):
        if part in model.model_fields:
            yield model.model_fields[part]
    if get_origin(annotation) is dict:
        yield FieldInfo(annotation=get_args(annotation)[1])


def _values_of(annotation: Any) -> list[type[BaseModel]]:
    return models_in(get_args(annotation)[1]) if get_origin(annotation) is dict else []


def _without_none(annotation: Any) -> Any:
    options = [one for one in get_args(annotation) if one is not NoneType]
    is_optional = get_origin(annotation) in (Union, UnionType) and len(options) == 1
    return options[0] if is_optional else annotation


def _tag(name: str, field: FieldInfo) -> str:
    return f'{name} = "{get_args(field.annotation)[0]}"'


def _about(model: type[BaseModel]) -> str:
    return inspect.getdoc(model) or ""
