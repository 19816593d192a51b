"""The forms in which a flag, a variable or a file may give a list or a table.

A variable holds one value, several separated by commas, or JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_settings import NoDecode

from api_schemas.base import Name
from api_schemas.inference import BackendSpec
from rollout_service.http.keyring import ApiKey, name_keys


def _split(value: object) -> object:
    """Parse one value, several separated by commas, or a JSON list or table."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith(("[", "{")):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON: {error}") from None
    parts = [part.strip() for part in value.split(",")]
    if not all(parts):
        raise ValueError("the value is empty, or a part of it is; set it, or unset the variable")
    return parts


def _addresses(value: object) -> object:
    """Turn an engine that is only an address into one with default settings."""
    return [{"url": one} if isinstance(one, str) else one for one in value] if isinstance(value, list) else value


def _pairs(value: object) -> object:
    """Turn a list of `NAME=VALUE`, as flags and variables give it, into a table."""
    if not isinstance(value, list):
        return value
    pairs = [str(one).partition("=") for one in value]
    wrong = [name for name, equals, inner in pairs if not (name and equals and inner)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not of the form NAME=VALUE")
    table = {name: inner for name, _, inner in pairs}
    if len(table) < len(pairs):
        raise ValueError("a name is given twice")
    return table


def _hosts(value: object) -> object:
    return value if value in ("none", "full") else _split(value)


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]
Labels = Annotated[list[Name], NoDecode, BeforeValidator(_split)]
Paths = Annotated[list[Path], NoDecode, BeforeValidator(_split)]
Hosts = Annotated[Literal["none", "full"] | list[str], NoDecode, BeforeValidator(_hosts)]
Backends = Annotated[list[BackendSpec], NoDecode, BeforeValidator(_addresses), BeforeValidator(_split)]
Models = Annotated[dict[Name, str], NoDecode, BeforeValidator(_pairs), BeforeValidator(_split)]
Keys = Annotated[list[ApiKey], NoDecode, BeforeValidator(name_keys), BeforeValidator(_split)]


class Section(BaseModel):
    """A table of the settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
