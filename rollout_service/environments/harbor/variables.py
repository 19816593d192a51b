"""Values of `task.toml` that stand for variables of the host: `${NAME}` and `${NAME:-DEFAULT}`.

Guarantee: a task gets no variable of the host but those that the operator has named, since its sandbox is hostile.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator, Mapping

REFERENCE = re.compile(r"\$\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}")


def resolve(
    table: Mapping[str, str], allowed: Container[str], host: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the values with their references replaced; a reference without a value becomes empty."""

    def value_of(match: re.Match[str]) -> str:
        name = match["name"]
        return (host.get(name) if name in allowed else None) or match["default"] or ""

    return {key: REFERENCE.sub(value_of, value) for key, value in table.items()}


def missing(
    table: Mapping[str, str], path: str, allowed: Container[str], host: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """Yield a sentence for each reference that has neither a value nor a default; `path` is that of the table."""
    for key, value in table.items():
        for match in REFERENCE.finditer(value):
            name = match["name"]
            if match["default"] is not None or (name in allowed and host.get(name)):
                continue
            why = "is not set" if name in allowed else "may not be read by tasks: see [harbor] variables"
            yield f"{path}.{key}: the variable {name} {why}"
