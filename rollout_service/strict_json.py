"""Parses JSON that can be kept: what comes back from the store, or an engine, is what was sent.

Guarantees: no lone surrogates, which no UTF-8 can hold; no NaN or Infinity; nesting within a bound, well below that of
the readers of what the service writes.
"""

from __future__ import annotations

from pydantic import JsonValue
from pydantic_core import from_json

MAX_DEPTH = 100
"""Levels of lists and objects. Answers put a body a few levels deeper, and their readers stop at 200."""


def parse(content: bytes) -> JsonValue:
    """Return the value of a JSON text; raises ValueError."""
    value: JsonValue = from_json(content, allow_inf_nan=False)
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return value


def _depth(value: JsonValue) -> int:
    """Return how many levels of lists and objects a value has, without recursion."""
    depth, level = 0, [value] if isinstance(value, dict | list) else []
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if type(inner) is dict or type(inner) is list
        ]
    return depth
