"""The part of a stored record that the codecs need."""

from __future__ import annotations

from typing import Any, Protocol


class Row(Protocol):
    """A record with named fields, such as a row of SQLite or a dictionary."""

    def __getitem__(self, name: str, /) -> Any: ...
