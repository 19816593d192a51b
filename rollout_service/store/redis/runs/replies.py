"""Replies of Redis as Python values, and long requests in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def by_number(reply: Sequence[bytes]) -> dict[int, bytes]:
    """Return the values of a hash by their numbers, in order, from the reply to HGETALL."""
    pairs = ((int(name), value) for name, value in zip(reply[::2], reply[1::2], strict=True))
    return dict(sorted(pairs))


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Return the items in parts of this size; the last one may be smaller."""
    return (items[first : first + size] for first in range(0, len(items), size))
