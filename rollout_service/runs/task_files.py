"""The files that runs take tasks from, as rows by their index.

Guarantees: every row was accepted by the environment when the run was created, and one that was not is named. A file
that has changed since is refused.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import stat
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import JsonValue, TypeAdapter

from api_schemas.errors import FieldError
from api_schemas.runs import FileTasks
from rollout_service import strict_json
from rollout_service.errors import InvalidFieldError, ServiceError

FIELD = "body.source"
R = TypeVar("R")
_ROWS_AT_ONCE = 1_024
_INSTANCE = TypeAdapter(dict[str, JsonValue])


class SourceChangedError(ServiceError):
    """The file or data set that a run's tasks come from has changed."""

    code = "source_changed"


class Rows(Protocol):
    """The instances of a file or data set by their index."""

    digest: str
    """The SHA-256 of the content."""

    def __len__(self) -> int: ...

    def read(self, row: int) -> dict[str, JsonValue]:
        """Return the instance with this index."""
        ...


class JsonLines(Rows):
    """A file with one object per line; empty lines do not count. The lines' offsets are in memory, not the lines."""

    def __init__(self, path: Path, check: Callable[[dict[str, JsonValue]], None]) -> None:
        self._path = path
        self._offsets: list[int] = []
        digest, offset = hashlib.sha256(), 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                if line.strip():
                    check_row(path, f"line {number}", line, lambda one: check(_instance(one)))
                    self._offsets.append(offset)
                offset += len(line)
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, row: int) -> dict[str, JsonValue]:
        with self._path.open("rb") as file:
            file.seek(self._offsets[row])
            instance: dict[str, JsonValue] = json.loads(file.readline())
        return instance


def _instance(line: bytes) -> dict[str, JsonValue]:
    return _INSTANCE.validate_python(strict_json.parse(line))


class Parquet(Rows):
    """A file with one instance per row; needs `pyarrow`.

    Times become ISO 8601 text, decimals their digits, and maps lists of pairs. Bytes and numbers that are not finite
    are rejected, since JSON cannot represent them.
    """

    def __init__(self, path: Path, check: Callable[[dict[str, JsonValue]], None]) -> None:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            message = f"{path} is a Parquet file, but pyarrow is not installed"
            raise InvalidFieldError(
                [FieldError(path=f"{FIELD}.path", message=message)],
                hint="Install it with the service: pip install 'rollout-service[parquet]'. Or write JSONL instead.",
            ) from error
        with path.open("rb") as file:
            self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        try:
            self._table: Any = parquet.read_table(path, memory_map=True)
        except ArrowException as error:
            problem = FieldError(path=f"{FIELD}.path", message=f"{path} is not a whole Parquet file: {error}")
            raise InvalidFieldError([problem], hint="Write the file again.") from error
        number = 0
        for batch in self._table.to_batches(max_chunksize=_ROWS_AT_ONCE):
            for row in batch.to_pylist():
                number += 1
                check_row(path, f"row {number}", row, lambda one: check(_instance(_as_json(one).encode())))

    def __len__(self) -> int:
        rows: int = self._table.num_rows
        return rows

    def read(self, row: int) -> dict[str, JsonValue]:
        found = self._table.slice(row, 1).to_pylist()[0]
        instance: dict[str, JsonValue] = json.loads(_as_json(found))
        return instance


def _as_json(row: Any) -> str:
    """Return a row as JSON.

    Raises:
        ValueError: A number is not finite.
        TypeError: JSON cannot represent a value.
    """
    return json.dumps(row, default=_plain, allow_nan=False)


def _plain(value: Any) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"an instance cannot contain {type(value).__name__}: write it as text or a number")


def check_row(path: Path, where: str, row: R, check: Callable[[R], None]) -> None:
    """Raise an error that names the row, unless it is an instance that the environment accepts.

    Raises:
        InvalidFieldError: The row is not a valid instance.
    """
    try:
        check(row)
    except (ValueError, TypeError, InvalidFieldError) as error:
        problem = FieldError(path=f"{FIELD}.path", message=f"{path}, {where}: {error}")
        raise InvalidFieldError([problem]) from error


_KINDS: dict[str, Callable[[Path, Callable[[dict[str, JsonValue]], None]], Rows]] = {
    ".jsonl": JsonLines,
    ".parquet": Parquet,
}


def _regular(path: Path) -> Path:
    """Return the path of a regular file; opening a FIFO would wait for a writer.

    Raises:
        OSError: The path is not a regular file, or there is none.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is not a regular file")
    return path


def open_file(source: FileTasks, check: Callable[[dict[str, JsonValue]], None]) -> Rows:
    """Return the instances of a file, each validated; call it in a thread.

    Raises:
        InvalidFieldError: The file cannot be read, is empty, or contains a row that is not a valid instance; or
            it is a Parquet file and pyarrow is not installed.
    """
    path = Path(source.path)
    kind = _KINDS.get(path.suffix)
    if kind is None:
        problem = FieldError(path=f"{FIELD}.path", message=f"{path} is neither .jsonl nor .parquet")
        raise InvalidFieldError([problem])
    try:
        path = _regular(path.expanduser())
        rows = kind(path, check)
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the path; the home of nobody
        problem = FieldError(path=f"{FIELD}.path", message=str(error))
        raise InvalidFieldError([problem], hint="The path is on the service's machine.") from error
    if not len(rows):
        raise InvalidFieldError([FieldError(path=f"{FIELD}.path", message=f"{path} contains no instances")])
    return rows


def reopen_file(source: FileTasks, digest: str | None) -> Rows:
    """Return the instances of the same file as before; call it in a thread.

    Raises:
        SourceChangedError: The file has changed, or cannot be read.
    """
    try:
        rows = open_file(source, lambda _: None)
    except InvalidFieldError as error:
        raise SourceChangedError(
            f"the tasks cannot be read again: {error}", hint="Restore the file and resume the run."
        ) from error
    if rows.digest != digest:
        raise SourceChangedError(
            f"{source.path} has changed since the run was created, "
            "so the run's cursor no longer points to the same task",
            hint="Restore the file and resume the run, or end the run and create one for the new file.",
        )
    return rows
