"""The treatment of each parameter of an API, as data: the dialects' tables, and the sorting of a request by one.

Guarantee: every parameter that a request holds is honored, recorded, named in `ignored`, or refused; none is dropped
in silence. One that no table knows is ignored and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import JsonValue

from api_schemas.errors import FieldError
from rollout_service.gateway.dialects.fields import Fields, as_fields, dump_json
from rollout_service.gateway.errors import RefusedParameterError

FORCES_NOTHING = "the model stays free: tokens that are forced cannot be trained on"
"""The reason that is given where a choice of tools has no effect."""
_MAX_NAMES, _MAX_NAME = 64, 80
"""How many ignored parameters are named, and how many characters of each name are kept."""
_MAX_RECORDED = 8_192
"""The bytes of the largest value that is recorded, since every turn keeps it; a larger one is ignored, and named."""


class Treatment(StrEnum):
    """The treatment of a parameter."""

    HONORED = "honored"
    """The answer is as the client asked."""
    RECORDED = "recorded"
    """Sampling is the run's; the client's value is counted, and some are obeyed by a service that is set to."""
    IGNORED = "ignored"
    """It has no effect, and is counted."""
    REFUSED = "refused"
    """A request that sets it is answered with an error."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row of a dialect's table."""

    path: str
    """Its name, with the names of the objects around it, divided by dots."""
    treatment: Treatment
    note: str = ""
    recorded_as: str = ""
    """The name in `ModelCall.requested`, where dialects differ in spelling; else its path."""


@dataclass(frozen=True)
class ParameterTable:
    """The parameters of a dialect."""

    rows: tuple[Parameter, ...]
    by_path: Mapping[str, Parameter] = field(init=False)
    groups: frozenset[str] = field(init=False)
    """The paths of objects whose fields have rows of their own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_path", {row.path: row for row in self.rows})
        groups = {row.path.rpartition(".")[0] for row in self.rows if "." in row.path}
        object.__setattr__(self, "groups", frozenset(groups))


@dataclass
class Sorted:
    """The parameters of a request that have no effect on the answer."""

    requested: dict[str, JsonValue] = field(default_factory=dict)
    ignored: dict[str, None] = field(default_factory=dict)
    """An ordered set."""

    def ignore(self, path: str) -> None:
        """Name something that has no effect."""
        if len(self.ignored) < _MAX_NAMES:
            self.ignored[path[:_MAX_NAME]] = None


def sort_parameters(body: Fields, table: ParameterTable) -> Sorted:
    """Sort the parameters of a request by the table.

    Raises:
        RefusedParameterError: The request sets a parameter that is refused.
        InvalidFieldError: A parameter that holds others is no object.
    """
    result = Sorted()
    _sort(body, table, "", result)
    return result


def _sort(fields: Fields, table: ParameterTable, prefix: str, result: Sorted) -> None:
    for name, value in fields.values.items():
        path = prefix + name
        if value is None:
            continue
        if path in table.groups:
            _sort(as_fields(value, path), table, f"{path}.", result)
            continue
        row = table.by_path.get(path)
        if row is None or row.treatment is Treatment.IGNORED:
            result.ignore(path)
        elif row.treatment is Treatment.RECORDED:
            if isinstance(value, str | list | dict) and len(dump_json(value)) > _MAX_RECORDED:
                result.ignore(path)
            else:
                result.requested[row.recorded_as or path] = value
        elif row.treatment is Treatment.REFUSED and _asks(value):
            message = f"is not supported: {row.note}" if row.note else "is not supported"
            raise RefusedParameterError([FieldError(path=path, message=message)])


def _asks(value: Any) -> bool:
    """Whether a value asks for something; `false`, 0, and an empty text, list or object, do not."""
    return value not in (0, "", [], {})
