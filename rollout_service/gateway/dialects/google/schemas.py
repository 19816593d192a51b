"""Schemas of the OpenAPI kind, in which Google's clients declare functions, as JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
_OF_SCHEMAS = frozenset({"properties", "$defs", "defs", "patternProperties"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE = frozenset({"items", "additionalProperties", "not"})
_RENAMED = {"any_of": "anyOf", "min_items": "minItems", "max_items": "maxItems"}
_WITHOUT_MEANING = frozenset({"propertyOrdering", "property_ordering", "nullable"})


def to_json_schema(schema: Any) -> Any:
    """Return a schema with its types in lower case, and `nullable` as a type. What is no schema is unchanged."""
    if not isinstance(schema, dict):
        return schema
    translated: dict[str, Any] = {}
    for spelling, value in schema.items():
        if spelling not in _WITHOUT_MEANING:
            name: str = _RENAMED.get(spelling) or spelling
            translated[name] = _translate(name, value)
    kind = translated.get("type")
    if schema.get("nullable") is True and isinstance(kind, str):
        translated["type"] = [kind, "null"]
    return translated


def _translate(name: str, value: Any) -> Any:
    if name == "type" and isinstance(value, str):
        return value.lower() if value in _TYPES else value
    if name in _OF_SCHEMAS and isinstance(value, Mapping):
        return {key: to_json_schema(inner) for key, inner in value.items()}
    if name in _LISTS and isinstance(value, list):
        return [to_json_schema(inner) for inner in value]
    return to_json_schema(value) if name in _SINGLE else value
