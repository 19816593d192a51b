"""A JSON parser that accepts only documents that can be stored and sent on unchanged.

There are no lone surrogates, which UTF-8 cannot encode; no NaN or Infinity, and no number that is too large to be told
from it; and nesting is bounded, well below the limit of the programs that read the service's output.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from math import isfinite

from pydantic import JsonValue
from pydantic_core import from_json

MAX_DEPTH = 100
"""Levels of lists and objects. Responses nest a body a few levels deeper, and their readers stop at 200."""
NOT_FINITE = "NaN, or an infinite or too large number, which JSON cannot store; write null instead"
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""One that does not end is the rest of the document, so that no character is looked at twice."""
_SURROGATE = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""An escaped backslash, a surrogate pair, or, as group 1, half of one."""


def parse(content: bytes) -> JsonValue:
    """
    Raises:
        ValueError: The document is not JSON, or not of the kind that can be stored.
    """
    value: JsonValue = from_json(content, allow_inf_nan=False)
    if not is_finite(value):
        raise ValueError("a number is too large for 64 bits")
    if measure_depth(value) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return value


def parse_row(line: bytes) -> dict[str, JsonValue]:
    """Return the object in a line of a data file, without a byte order mark.

    Raises:
        ValueError: The line is not an object that can be stored. The message says what it is not, or names its column.
    """
    line = line.removeprefix(codecs.BOM_UTF8)
    try:
        row = parse(line)
    except ValueError as error:
        raise ValueError(_explain(line) or f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one kind of error for a bad line
    return row


def _explain(line: bytes) -> str:
    """Explain why a line is refused that other programs write and read; "" if no program would."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return f"not in UTF-8: byte {error.start + 1} is {line[error.start]:#04x}"
    except (ValueError, RecursionError):
        return ""
    columns = row.items() if isinstance(row, dict) else ()
    return next((f"column {name!r} has {NOT_FINITE}" for name, value in columns if not is_finite(value)), "")


def has_more(document: bytes, marks: bytes, most: int) -> bool:
    """Return whether a JSON document has more than `most` of some characters, such as commas, outside its strings.

    It takes no memory, so that a document is refused before its values take some: `{}` takes 64 bytes.
    """
    if len(document) <= most or _count(document, marks, 0, len(document)) <= most:
        return False
    count, end = 0, 0
    for string in _STRING.finditer(document):
        count += _count(document, marks, end, string.start())
        if count > most:
            return True
        end = string.end()
    return count + _count(document, marks, end, len(document)) > most


def _count(document: bytes, marks: bytes, begin: int, end: int) -> int:
    return sum([document.count(mark, begin, end) for mark in marks])


def is_finite(value: JsonValue) -> bool:
    numbers = (inner for outer in _all_containers(value) for inner in _members(outer) if type(inner) is float)
    return all(map(isfinite, numbers)) and (not isinstance(value, float) or isfinite(value))


def has_larger_object(value: JsonValue, most: int) -> bool:
    """Return whether an object in a document has more than `most` members."""
    return any(len(outer) > most for outer in _all_containers(value) if isinstance(outer, dict))


def measure_depth(value: JsonValue) -> int:
    """Count the levels of lists and objects."""
    return sum(1 for _ in _levels(value))


def _all_containers(value: JsonValue) -> Iterator[list[JsonValue] | dict[str, JsonValue]]:
    return chain.from_iterable(_levels(value))


def _levels(value: JsonValue) -> Iterator[list[list[JsonValue] | dict[str, JsonValue]]]:
    """Yield the lists and objects of each level, without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    while level:
        yield level
        level = [inner for outer in level for inner in _members(outer) if type(inner) is dict or type(inner) is list]


def _members(outer: list[JsonValue] | dict[str, JsonValue]) -> Iterable[JsonValue]:
    return outer.values() if isinstance(outer, dict) else outer


def without_half_pairs(raw: bytes) -> bytearray:
    """Return a JSON document with U+FFFD for each half of a surrogate pair that it has escaped."""
    mended = bytearray(raw)
    for match in _SURROGATE.finditer(raw):
        if match[1]:
            mended[match.start() : match.end()] = rb"\ufffd"  # of the same length
    return mended
