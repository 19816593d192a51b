"""The files that runs take tasks from: which may be read, and their rows by their index.

- Every row was accepted by the environment when the run was created, and one that was not is named. A file that has
  changed since is refused.
- With `folders`, only a file in one of them is read, wherever links lead, and errors say nothing of other files. The
  file that was checked is the one that is read, also later: it is held open, so another in its place changes nothing.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import stat
import weakref
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import JsonValue

from api_schemas.runs import FileTasks
from rollout_service.base import strict_json
from rollout_service.base.errors import InvalidFieldError
from rollout_service.environments.dataset_files import MAX_INSTANCE_BYTES, parse_instance
from sandboxes.extras import extra_hint

FIELD = "body.source"
R = TypeVar("R")
_ROWS_AT_ONCE = 1_024


class Rows(Protocol):
    digest: str
    """The SHA-256 of the content."""

    def __len__(self) -> int: ...

    def read(self, row: int) -> dict[str, JsonValue]: ...


class JsonLines(Rows):
    """A file with one object per line; empty lines do not count. The lines' offsets are in memory, not the lines."""

    def __init__(self, file: BufferedReader, path: Path, check: Callable[[dict[str, JsonValue]], None]) -> None:
        self._offsets: list[int] = []
        digest, offset = hashlib.sha256(), 0
        # A line that is too long is cut, and then refused, before it fills the memory.
        for number, line in enumerate(iter(partial(file.readline, MAX_INSTANCE_BYTES + 1), b""), start=1):
            digest.update(line)
            if line.strip():
                check_row(path, f"line {number}", line, lambda one: check(parse_instance(one)))
                self._offsets.append(offset)
            offset += len(line)
        self.digest = digest.hexdigest()
        self._ends = [*self._offsets[1:], offset]
        self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, row: int) -> dict[str, JsonValue]:
        first = self._offsets[row]
        lines = os.pread(self._file, self._ends[row] - first, first)
        instance: dict[str, JsonValue] = json.loads(lines.strip())
        return instance


class Parquet(Rows):
    """A file with one instance per row; needs `pyarrow`.

    Times become ISO 8601 text, decimals their digits, and maps lists of pairs. Bytes and numbers that are not finite
    are rejected, since JSON cannot represent them.
    """

    def __init__(self, file: BufferedReader, path: Path, check: Callable[[dict[str, JsonValue]], None]) -> None:
        try:
            from pyarrow import ArrowException, memory_map, parquet
        except ImportError as error:
            raise _invalid_path(
                f"{path} is a Parquet file, but pyarrow is not installed",
                f"{extra_hint('parquet')}. Or write JSONL instead.",
            ) from error
        self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        try:
            self._table: Any = parquet.read_table(memory_map(_opened(file.fileno())))
        except ArrowException as error:
            message = f"{path} is not a whole Parquet file: {error}"
            raise _invalid_path(message, "Write the file again.") from error
        number = 0
        for batch in self._table.to_batches(max_chunksize=_ROWS_AT_ONCE):
            for row in batch.to_pylist():
                number += 1
                check_row(path, f"row {number}", row, lambda one: check(parse_instance(_as_json(one))))

    def __len__(self) -> int:
        rows: int = self._table.num_rows
        return rows

    def read(self, row: int) -> dict[str, JsonValue]:
        found = self._table.slice(row, 1).to_pylist()[0]
        instance: dict[str, JsonValue] = json.loads(_as_json(found))
        return instance


def _as_json(row: dict[str, Any]) -> bytes:
    columns = []
    for name, value in row.items():
        try:
            columns.append(f"{json.dumps(name)}: {json.dumps(value, default=_plain, allow_nan=False)}")
        except TypeError as error:
            raise ValueError(f"column {name!r}: {error}") from error
        except ValueError as error:
            raise ValueError(f"column {name!r} has {strict_json.NOT_FINITE}") from error
    return f"{{{', '.join(columns)}}}".encode()


def _plain(value: Any) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"an instance cannot contain {type(value).__name__}: write it as text or a number")


def _invalid_path(message: str, hint: str = "") -> InvalidFieldError:
    return InvalidFieldError.at(f"{FIELD}.path", message, hint=hint)


def check_row(path: Path, where: str, row: R, check: Callable[[R], None]) -> None:
    """
    Raises:
        InvalidFieldError: The row is not an instance that the environment accepts; the error names it.
    """
    try:
        check(row)
    except (ValueError, InvalidFieldError) as error:
        raise _invalid_path(f"{path}, {where}: {error}") from error


_KINDS: dict[str, Callable[[BufferedReader, Path, Callable[[dict[str, JsonValue]], None]], Rows]] = {
    ".jsonl": JsonLines,
    ".parquet": Parquet,
}


def _opened(descriptor: int) -> str:
    """Return a path that leads to the open file, whatever has taken its own."""
    return f"/proc/self/fd/{descriptor}"


def _open_regular(path: Path, folders: Sequence[Path] | None) -> BufferedReader:
    """Open a regular file for reading; with `folders`, only one below them.

    The path alone is checked first, so that nobody learns which other files there are. The file is then found, which
    does nothing to a FIFO or a device, and is checked, and opened.
    """
    _require_below(folders, Path(os.path.realpath(path)), path)
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _require_below(folders, Path(_opened(found)).readlink(), path)
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise OSError(f"{path} is not a regular file")
        return Path(_opened(found)).open("rb")
    finally:
        os.close(found)


def _require_below(folders: Sequence[Path] | None, real: Path, path: Path) -> None:
    if folders is None or any(real.is_relative_to(one.expanduser().resolve()) for one in folders):
        return
    raise _invalid_path(
        f"{path} is in none of the folders that runs may read",
        "An administrator adds its folder to the setting `data_dirs`, or creates the run with a key of the role "
        "admin, which may name any file. Or send the tasks in the request, as a source of the kind inline.",
    )


def open_file(
    source: FileTasks,
    check: Callable[[dict[str, JsonValue]], None],
    folders: Sequence[Path] | None = None,
) -> Rows:
    """Return the instances of a file, each accepted by `check`, which raises InvalidFieldError; call it in a thread.

    `folders` are those whose files may be read, with all below them; None are all.

    Raises:
        InvalidFieldError: The file may not or cannot be read, is empty, or contains a row that is not a valid instance;
            or it is a Parquet file and pyarrow is not installed.
    """
    path = Path(source.path)
    kind = _KINDS.get(path.suffix)
    if kind is None:
        raise _invalid_path(f"{path} is neither .jsonl nor .parquet")
    try:
        path = path.expanduser()
        with _open_regular(path, folders) as file:
            rows = kind(file, path, check)
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the path; the home of nobody
        why = f"{path}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        raise _invalid_path(why, "The path is on the service's machine.") from error
    if not len(rows):
        raise _invalid_path(f"{path} contains no instances")
    return rows
