"""Opening the store's file.

Only one process at a time has the file open, and errors say what to do. Whether the open file is still at its path can
be asked at any time: SQLite itself writes to a file that was deleted. The claim on a file is a lock on `<file>.lock`,
which the kernel releases however the process dies; the lock file contains the owner's pid for people to read. No child
process inherits the lock, since every child calls `exec`.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path

from rollout_service.base.errors import DefectError, ServiceError, StoreError
from rollout_service.base.private_files import make_private
from rollout_service.store.sqlite.schema import STORE, DatabaseSchema, prepare

IN_MEMORY = ":memory:"
"""A store for tests that ends with its process."""

_HINTS = {
    sqlite3.SQLITE_BUSY: "Another program, such as a `sqlite3` shell, has locked the file: close it.",
    sqlite3.SQLITE_LOCKED: "Another program has locked the file: close it.",
    sqlite3.SQLITE_FULL: "The disk is full: free space in the state directory. No restart is needed.",
    sqlite3.SQLITE_IOERR: "The disk failed: see `dmesg`, and keep the state directory on a local disk.",
    sqlite3.SQLITE_READONLY: "Make the state directory and its files writable for the service's user.",
    sqlite3.SQLITE_CANTOPEN: "Make the state directory exist and be writable for the service's user.",
    sqlite3.SQLITE_CORRUPT: "The file is damaged: restore a backup, or rescue it with `sqlite3 FILE .recover`.",
    sqlite3.SQLITE_NOTADB: "The file is not a SQLite database: restore a backup, or move it away to start afresh.",
}


_REPORT = "Report it with the log's traceback; the database was not changed."

_PASSING = _HINTS.keys() | {sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_PROTOCOL}
"""These may end while the service runs, by themselves or once their hint is followed."""


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def explain(error: sqlite3.Error) -> StoreError:
    code = _code(error)
    hint = _HINTS.get(code, "See the service's log for details. The database was not changed.")
    return StoreError(f"the store failed: {error}", hint=hint)


def explain_job(error: sqlite3.Error) -> ServiceError:
    """Return a DefectError unless the file or its disk is at fault."""
    failure: ServiceError = explain(error)
    if _code(error) not in _PASSING:
        failure = DefectError(f"a statement on the store is wrong: {error}", hint=_REPORT)
    failure.__cause__ = error  # the log shows where it was raised
    return failure


class FileLostError(StoreError):
    """The open file is no longer where it was opened: further writes would be gone with the process."""


class FilePlace:
    """Where an open file and its log were, to be compared with where they are now.

    The log is known from the first look after something was written.
    """

    def __init__(self, path: Path) -> None:
        self._paths = (path, path.with_name(path.name + "-wal"))
        self._known: dict[Path, os.stat_result] = {path: path.stat()}

    def check(self) -> None:
        """
        Raises:
            FileLostError: A path no longer leads to the open file.
        """
        for path in self._paths:
            try:
                found = path.stat()
            except FileNotFoundError:
                if path in self._known:
                    raise _lost(path, "was deleted or moved") from None
            except OSError as error:
                raise _lost(path, f"cannot be reached: {error.strerror}") from error
            else:
                if not os.path.samestat(found, self._known.setdefault(path, found)):
                    raise _lost(path, "was replaced by another file")


def _lost(path: Path, why: str) -> FileLostError:
    return FileLostError(
        f"the store's file {path} {why} while it is open",
        hint="Move it back; no restart is needed. If it is lost for good, stop the service and restore a backup "
        "(`rollout-service restore`): a start without one begins with an empty store.",
    )


class FileClaim:
    """This process's claim on a store's file, until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")
        make_private(self._path)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(self._descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise StoreError(
                f"{path} is in use by the process with pid {pid}",
                hint="Stop that service, or give this one another folder with --state-dir or ROLLOUT_STATE_DIR.",
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)


def _close_to_others(path: Path) -> None:
    """Make the file private before SQLite opens it, which gives its log and index the same mode."""
    make_private(path)
    for suffix in ("-wal", "-shm"):
        if (beside := path.with_name(path.name + suffix)).exists():
            make_private(beside)


class Database:
    """An open store file: one connection, used only in the thread that created it.

    A commit that has returned is on the disk if its schema is `synchronous=FULL`, and in the operating system's hands
    if it is `NORMAL`.

    Raises:
        StoreError: The file is in use, is damaged, belongs to another program, or cannot be created.
    """

    def __init__(self, path: Path | str, schema: DatabaseSchema = STORE) -> None:
        self._claim: FileClaim | None = None
        self._place: FilePlace | None = None
        try:
            if str(path) != IN_MEMORY:
                Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._claim = FileClaim(Path(path))
                _close_to_others(Path(path))
            self.connection = self._connect(path, schema)
            if self._claim is not None:
                self._place = FilePlace(Path(path))
        except OSError as error:
            self._release()
            raise StoreError(f"the store cannot be opened: {error}", hint=_HINTS[sqlite3.SQLITE_CANTOPEN]) from error
        except sqlite3.Error as error:
            self._release()
            raise explain(error) from error
        except StoreError:
            self._release()
            raise

    def check_place(self) -> None:
        """
        Raises:
            FileLostError: The file is not where it was opened.
        """
        if self._place is not None:
            self._place.check()

    def close(self) -> None:
        """Merge a write-ahead log into the file, close the file and release the claim."""
        try:
            self.connection.close()
        finally:
            self._release()

    def _connect(self, path: Path | str, schema: DatabaseSchema) -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None, timeout=5.0, cached_statements=64)
        try:
            connection.row_factory = sqlite3.Row
            connection.execute(f"PRAGMA page_size = {schema.page_size}")  # of a new file
            connection.execute(f"PRAGMA journal_mode = {schema.journal_mode}")
            connection.execute(f"PRAGMA synchronous = {schema.synchronous}")
            connection.execute(f"PRAGMA secure_delete = {schema.secure_delete:d}")
            connection.execute("PRAGMA journal_size_limit = 67108864")
            connection.execute("PRAGMA temp_store = MEMORY")
            prepare(connection, schema)
        except BaseException:
            connection.close()
            raise
        return connection

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None
