"""Values that are written without quotes, read by the schema of their parameter. Pure, whatever the schema.

Guarantee: where a schema allows a string, a text stays as it is unless it is a value of another type that the schema
allows too. A JSON string in quotes is never unquoted, since no format here writes one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from typing import Any

_TYPES = {
    bool: "boolean",
    type(None): "null",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
Types = Set[str]
"""Names of JSON types, as in a schema."""


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):  # as JSON has no infinity, it is not read from 1e999 or Infinity either
        raise ValueError(f"{number} is not a finite number")
    return value


_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def read_value(text: str, types: Types | None, constants: Mapping[str, Any]) -> Any:
    """Return the value of a text. `types` are those that the schema allows; None stands for any.

    `constants` are values that a format writes in words of its own, such as `True`. They count where the schema names
    their type.

    Raises:
        ValueError: The text is not JSON, and the schema does not allow a string.
    """
    if types == {"string"}:
        return text
    word = text.strip()
    if types is not None and word in constants and _is_allowed(constants[word], types):
        return constants[word]
    takes_text = types is None or "string" in types
    try:
        value = _JSON.decode(word)
    except (ValueError, RecursionError) as error:
        if takes_text:
            return text
        raise ValueError("the value is not JSON") from error
    # A value of a wrong type is for the tool to refuse, which knows its whole schema.
    return text if takes_text and not _is_allowed(value, types) else value


def _is_allowed(value: Any, types: Types | None) -> bool:
    """Return whether a value has one of these types, and is not a string."""
    if isinstance(value, str):
        return False
    name = _TYPES[type(value)]
    return types is None or name in types or (name == "integer" and "number" in types)


def types_of(schema: Any, root: Any) -> Types | None:
    """Return the JSON types that a schema allows, or None if it does not say. `root` is where its references begin."""
    found: set[str] = set()
    references: set[str] = set()
    parts = [schema]
    while parts:
        part = parts.pop()
        if not isinstance(part, Mapping):
            return None
        if isinstance(reference := part.get("$ref"), str):
            if reference not in references:  # so that schemas that refer to themselves end
                references.add(reference)
                parts.append(_resolve(reference, root))
            continue
        branches = next((part[key] for key in ("anyOf", "oneOf", "allOf") if part.get(key)), None)
        named = _named_types(part)
        if named:
            found |= named
        elif isinstance(branches, list):
            parts += branches
        else:
            return None
    return found or None


def _named_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names itself, or those of the values that it lists."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return {_TYPES.get(type(value), "string") for value in listed} if isinstance(listed, list) else set()


def _resolve(reference: str, root: Any) -> Any:
    """Return the part of a schema that a reference such as `#/$defs/Color` names, or None."""
    head, *path = reference.split("/")
    found = root if head == "#" else None
    for step in path:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
