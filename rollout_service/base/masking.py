"""Removal of secrets from texts, in the spellings of shells, JSON and Python.

Without secrets nothing is searched. A value is masked whole; one that is encoded otherwise, or cut in two, is not
found.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator
from typing import TypeVar

from api_schemas.errors import ErrorInfo
from api_schemas.trajectories import Message

MASK = "***"
ARMOR = "-----"
"""Begins the first and the last line of a key in PEM, which are the same for all keys."""
MIN_CHARS = 8
"""Shorter texts, and shorter lines of a secret, also occur by chance."""

T = TypeVar("T")


def spellings(value: str) -> set[str]:
    """Return the texts by which a secret is found: itself, its lines, and both with their quotes escaped."""
    lines = [line.strip() for line in value.splitlines()]
    plain = {value, *(line for line in lines if len(line) >= MIN_CHARS and not line.startswith(ARMOR))}
    return plain | {spelling for text in plain for spelling in _escaped(text)}


def _escaped(text: str) -> Iterator[str]:
    yield json.dumps(text)[1:-1]
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield repr(text)[1:-1]
    yield shlex.quote(text).removeprefix("'").removesuffix("'")
    yield text.replace("'", "'\\''")
    yield "".join(f"\\{letter}" if letter in '\\"$`' else letter for letter in text)


def mask(text: str, values: Collection[str]) -> str:
    """Replace the values; longer ones first, since one may contain another."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


def mask_bytes(data: bytes, values: Collection[str]) -> bytes:
    for value in sorted(values, key=len, reverse=True):
        data = data.replace(value.encode(), MASK.encode())
    return data


def mask_texts(data: T, values: Collection[str]) -> T:
    """Mask each text in lists, tuples, sets and mappings."""
    return _masked(data, values) if values else data  # type: ignore[return-value]


def _masked(data: object, values: Collection[str]) -> object:
    if isinstance(data, str):
        return mask(data, values)
    if isinstance(data, bytes):
        return mask_bytes(data, values)
    if isinstance(data, dict):
        return {_masked(key, values): _masked(value, values) for key, value in data.items()}
    if type(data) in (list, tuple, set):
        return type(data)(_masked(item, values) for item in data)  # type: ignore[attr-defined,call-arg]
    return data


def mask_messages(messages: list[Message], values: Collection[str]) -> list[Message]:
    if not values:
        return messages
    return [
        message.model_copy(update=mask_texts({"content": message.content, "reasoning": message.reasoning}, values))
        for message in messages
    ]


def mask_info(info: ErrorInfo, values: Collection[str]) -> ErrorInfo:
    if not values:
        return info
    return info.model_copy(
        update=mask_texts({"message": info.message, "hint": info.hint, "frames": info.frames}, values)
    )


def mask_error(error: BaseException, values: Collection[str]) -> None:
    """Mask the texts of an error in place, with its causes and the errors in a group."""
    left, seen = [error] if values else [], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
        else:
            one.args = mask_texts(one.args, values)
        vars(one).update(mask_texts(vars(one), values))  # such as a hint, and a context
        left += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
