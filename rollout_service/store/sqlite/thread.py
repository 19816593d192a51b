"""The thread that owns the database and commits in groups.

- Jobs run one at a time, in the order of their requests.
- Writing jobs that wait at the same time share one transaction, and so one flush to the disk.
- A job that fails undoes its own changes and no others.
- A result is returned only after its transaction is on the disk, in a file that is where it was opened.
- The event loop never waits for the disk.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any, Concatenate, ParamSpec, TypeVar

from rollout_service.base.errors import StoreError
from rollout_service.store.jobs import Job, JobResult, JobThread
from rollout_service.store.sqlite.connection import Database, FileLostError, explain_job
from rollout_service.store.sqlite.schema import STORE, DatabaseSchema

P = ParamSpec("P")
T = TypeVar("T")

Statement = Callable[Concatenate[sqlite3.Connection, P], T]
"""Runs in the database's thread, as a whole or not at all."""

LOOK_SECONDS = 2.0
"""How often the thread looks whether the file is still there; it also looks each time it writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DatabaseJob(Job):
    run: Callable[[sqlite3.Connection], Any]
    alone: bool = False
    """Runs outside any transaction, after the others of its batch."""


class DatabaseThread(JobThread[_DatabaseJob]):
    def __init__(self, path: Path | str, on_commit: Callable[[int], None], schema: DatabaseSchema = STORE) -> None:
        """`on_commit` is called on the event loop after each commit, with the id of the newest event."""
        super().__init__("store", str(path))
        self._path = path
        self._schema = schema
        self._on_commit = on_commit
        self._look_at = 0.0

    def size_bytes(self) -> int:
        """Return the size of the database with its write-ahead log; 0 in memory."""
        total = 0
        for suffix in ("", "-wal", "-shm"):
            with suppress(OSError):
                total += Path(f"{self._path}{suffix}").stat().st_size
        return total

    async def read(self, statement: Statement[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a statement that only reads, and return its result; cancelling the caller does not stop it.

        Raises:
            StoreError: The database failed, or the store is closed.
            DefectError: The statement is wrong.
            Exception: Whatever the statement raises.
        """
        result: T = await self._submit(_DatabaseJob(run=lambda db: statement(db, *args, **kwargs), writes=False))
        return result

    async def write(self, statement: Statement[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a statement that writes, and return its result once it is durable; raise what `read` does."""
        result: T = await self._submit(_DatabaseJob(run=lambda db: statement(db, *args, **kwargs), writes=True))
        return result

    async def truncate_log(self) -> None:
        """Merge the log into the file and empty it, so that it keeps nothing that was deleted."""
        await self._submit(_DatabaseJob(run=_truncate_log, writes=False, alone=True))

    def _open(self) -> None:
        self._database = Database(self._path, self._schema)

    def _disconnect(self) -> None:
        self._database.close()

    def _next_job(self) -> _DatabaseJob | None:
        """Look now and then whether the file is still there."""
        while True:
            self._look()
            try:
                return self._jobs.get(timeout=LOOK_SECONDS)
            except Empty:
                pass

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        try:
            self._database.check_place()
        except FileLostError as error:
            self._call(self._looked, error)
        else:
            self._call(self._looked, None)

    def _run_batch(self, batch: list[_DatabaseJob]) -> None:
        connection = self._database.connection
        writes = any(job.writes for job in batch)
        started = time.perf_counter()
        try:
            if writes:
                self._database.check_place()
                connection.execute("BEGIN IMMEDIATE")
            outcomes = [_attempt(connection, job) for job in batch if not job.alone]
            newest = newest_event(connection) if writes and self._schema.has_events else 0
            if writes:
                self._database.check_place()
                connection.execute("COMMIT")
                self.commit_seconds.observe(time.perf_counter() - started)
        except (sqlite3.Error, FileLostError) as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            failure = error if isinstance(error, FileLostError) else explain_job(error)
            outcomes = [JobResult(job, error=failure) for job in batch if not job.alone]
            writes = False
        outcomes += [_attempt(connection, job) for job in batch if job.alone]
        self._call(self._deliver, outcomes, newest if writes else None)

    def _deliver(self, outcomes: list[JobResult[_DatabaseJob]], newest: int | None) -> None:
        failed = [outcome.error for outcome in outcomes if isinstance(outcome.error, StoreError)]
        if failed:
            part = "file" if isinstance(failed[0], FileLostError) else "database"
            self.health.failed(part, failed[0], calls=len(failed))
        elif newest is not None:
            self.health.succeeded("file")
            self.health.succeeded("database")
        for outcome in outcomes:
            outcome.deliver()
        if newest is not None:
            self._on_commit(newest)

    def _looked(self, lost: FileLostError | None) -> None:
        if lost is not None:
            self.health.failed("file", lost)
        else:
            self.health.succeeded("file")


def reads(statement: Statement[P, T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a method for a class whose objects have a `_thread`: `get = reads(run_statements.get)`.

    It has the statement's own parameters but the first, and its type.
    """

    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        thread: DatabaseThread = self._thread
        return await thread.read(statement, *args, **kwargs)

    return method


def writes(statement: Statement[P, T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a method whose statement writes; see `reads`."""

    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        thread: DatabaseThread = self._thread
        return await thread.write(statement, *args, **kwargs)

    return method


def writes_now(
    statement: Callable[Concatenate[sqlite3.Connection, float, P], T],
    after: Callable[[Any], None] = lambda _: None,
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a method whose statement writes, and gets the time of the object's `_clock`; see `reads`.

    Once it is durable, `after` is called with the object.
    """

    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        thread: DatabaseThread = self._thread
        result = await thread.write(statement, self._clock(), *args, **kwargs)
        after(self)
        return result

    return method


def _attempt(connection: sqlite3.Connection, job: _DatabaseJob) -> JobResult[_DatabaseJob]:
    if job.writes:
        connection.execute("SAVEPOINT job")
    try:
        outcome = JobResult(job, value=job.run(connection))
    except sqlite3.Error as error:
        if job.writes and not connection.in_transaction:
            raise
        outcome = JobResult(job, error=explain_job(error))
    except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it
        outcome = JobResult(job, error=error)
    if job.writes:
        if outcome.error is not None:
            connection.execute("ROLLBACK TO job")
        connection.execute("RELEASE job")
    return outcome


def _truncate_log(connection: sqlite3.Connection) -> None:
    busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise StoreError(
            "the store's log cannot be emptied while another program reads the file",
            hint="Close every other program that has the store's file open, and try again.",
        )


def newest_event(connection: sqlite3.Connection) -> int:
    """Return the id of the newest event; 0 if there is none."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
    return row[0] if row else 0
