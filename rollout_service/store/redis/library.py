"""The functions that change the store, as one library of Redis.

Guarantees: a function runs to its end before any other command. The library and its functions are named by a digest of
their text, so services of several releases use one Redis at once, each with its own functions.

The library is the files of `lua/`, in the order of `FILES`, as one chunk: each file exports one local table, and
registers its functions with `common.register`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Any

FILES = ("common", "schema", "cluster", "engines", "segments", "index", "rollouts", "runs", "lists")
"""The files of `lua/`; a file may use the tables of those before it."""
LIBRARY_NAMES = "rollouts_*"
"""The pattern of the names of this program's libraries, of whichever release."""
_DIGITS = 12


@dataclass(frozen=True, slots=True)
class FunctionLibrary:
    """A library of functions, ready to be loaded."""

    name: str
    text: str
    suffix: str

    def function(self, name: str) -> str:
        """Return the name under which Redis knows a function."""
        return name + self.suffix


def library_name(listed: Any) -> str:
    """Return the name of a library in the answer to FUNCTION LIST."""
    pairs = listed.items() if isinstance(listed, dict) else zip(listed[::2], listed[1::2], strict=True)
    return str(dict(pairs)[b"library_name"].decode())


@cache
def function_library() -> FunctionLibrary:
    """Return the library of this release."""
    folder = resources.files(__package__) / "lua"
    body = "\n".join((folder / f"{name}.lua").read_text() for name in FILES)
    digest = sha256(body.encode()).hexdigest()[:_DIGITS]
    name, suffix = f"rollouts_{digest}", f"_{digest}"
    return FunctionLibrary(name, f"#!lua name={name}\nlocal SUFFIX = '{suffix}'\n{body}", suffix)
