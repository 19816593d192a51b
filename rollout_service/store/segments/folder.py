"""The shared folder of a store: large records go in, references come out.

Guarantees: see `writer`, `files`, `ledger` and `proof`, each of which has a part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from uuid import uuid4

import anyio
import anyio.to_thread

from rollout_service.base.errors import RecordLostError, StoreError
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.segments.ledger import (
    DRAFT_SUFFIX,
    FILE_NAME,
    SegmentLedger,
    SegmentReference,
    SegmentTotals,
)
from rollout_service.store.segments.proof import (
    FolderMark,
    FolderProof,
    folder_failed,
    folder_hangs,
    prove_shared,
    record_lost,
)
from rollout_service.store.segments.writer import FILE_BYTES, FILE_SECONDS, SegmentWriter

SWEEP_SECONDS = 86_400.0
"""How often the service that collects looks for files that the ledger does not know."""
TIDY_SECONDS = 60.0
"""How often a service looks whether its own file is old."""


class SegmentFolder:
    """One service's view of the folder: `async with await SegmentFolder.open(...) as segments:`."""

    def __init__(
        self,
        files: SharedFiles,
        proof: FolderProof,
        ledger: SegmentLedger,
        watch: FolderWatch,
        writer: SegmentWriter,
    ) -> None:
        self._files = files
        self._proof = proof
        self.ledger = ledger
        self.watch = watch
        """Whether the folder can be used."""
        self._writer = writer
        self._reader = SegmentReader(files, proof)
        self._sweep_at = time.monotonic()

    @classmethod
    async def open(
        cls,
        folder: Path,
        ledger: SegmentLedger,
        *,
        owner: str,
        name: str,
        files: SharedFiles | None = None,
        file_bytes: int = FILE_BYTES,
        file_seconds: float = FILE_SECONDS,
    ) -> Self:
        """Prove that the folder is shared, and open it.

        `owner` is the identity of this service, and `name` its random part, of 12 hexadecimal digits.

        Raises:
            ConfigurationError: The folder is not writable, is not shared, or belongs to another store.
            StoreError: The store fails.
        """
        files = files or SharedFiles(folder)
        proof = await prove_shared(files, ledger)
        watch = FolderWatch(proof, ledger)
        writer = SegmentWriter(
            files,
            proof,
            ledger,
            owner=owner,
            name=name,
            file_bytes=file_bytes,
            file_seconds=file_seconds,
            wrote=watch.wrote,
        )
        return cls(files, proof, ledger, watch, writer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def keep(self, records: Sequence[bytes]) -> AbstractAsyncContextManager[list[str]]:
        """Write records and yield their references; the block stores them. See `SegmentWriter.keep`."""
        return self._writer.keep(records)

    async def abandon(self, reference: str) -> None:
        """Open another file for the next records, since the ledger refused this reference."""
        await self.watch.follow()  # it refuses all files of a folder that was exchanged
        await self._writer.abandon(reference)

    async def read(self, reference: str, subject: str) -> bytes:
        """Return a record. See `SegmentReader.read`."""
        return await self._reader.read(reference, subject)

    async def read_all(self, references: Mapping[str, str]) -> Sequence[bytes | RecordLostError]:
        """Return many records. See `SegmentReader.read_all`."""
        return await self._reader.read_all(references)

    async def overwrite(self, references: Sequence[str]) -> None:
        """Overwrite records to which nothing refers any more; those that are gone, or damaged, are left.

        Raises:
            StoreError: The folder cannot be written at the moment.
        """
        try:
            await anyio.to_thread.run_sync(self._overwrite, references)
        except OSError as error:
            raise folder_failed(self._files.folder, error) from error

    def _overwrite(self, references: Sequence[str]) -> None:
        for reference in references:
            with suppress(ValueError, FileNotFoundError):
                record = SegmentReference.parse(reference)
                self._files.overwrite(record.file, record.offset, record.framed_length)

    async def keep_tidy(self) -> None:
        """Close this service's own file whenever it is old, until cancelled: an idle service holds up no deletion."""
        while True:
            await anyio.sleep(TIDY_SECONDS)
            await self.tidy()

    async def tidy(self) -> None:
        """Close this service's own file if it is old."""
        await self._writer.rotate(only_old=True)

    async def collect(self) -> int:
        """Delete garbage and, once a day, old files that the ledger does not know; return the bytes that this freed.

        Only the leader of `retention` calls this. See `collect` and `sweep`.

        Raises:
            StoreError: The store fails, or the folder is not the store's any more: its files are not ours to delete.
        """
        await anyio.to_thread.run_sync(self._proof.check)
        freed = await collect(self._files, self.ledger)
        if time.monotonic() >= self._sweep_at:
            freed += await sweep(self._files, self.ledger)
            self._sweep_at = time.monotonic() + SWEEP_SECONDS
        return freed

    async def totals(self) -> SegmentTotals:
        """Return the totals of the segment files."""
        return await self.ledger.totals()

    async def close(self) -> None:
        """Seal this service's files; idempotent."""
        await self._writer.close()


# Reads records from segment files, whoever wrote them.
#
# Guarantees: the event loop never waits for the disk; a record that cannot be read is a RecordLostError, which harms
# no other record; a folder that has gone away as a whole is a StoreError, since its records are not lost.

READERS = 8
"""The most threads that read at once."""


class SegmentReader:
    """Reads from the files of one folder."""

    def __init__(self, files: SharedFiles, proof: FolderProof) -> None:
        self._files = files
        self._proof = proof
        self._threads = anyio.CapacityLimiter(READERS)

    async def read(self, reference: str, subject: str) -> bytes:
        """Return a record; `subject` names its owner in errors.

        Raises:
            RecordLostError: The record is gone or damaged.
            StoreError: The folder cannot be read at the moment.
        """
        found = (await self.read_all({subject: reference}))[0]
        if isinstance(found, RecordLostError):
            raise found
        return found

    async def read_all(self, references: Mapping[str, str]) -> Sequence[bytes | RecordLostError]:
        """Return many records by their subjects, in this order; each that is lost is an error in its place.

        Raises:
            StoreError: The folder cannot be read at the moment.
        """
        return await anyio.to_thread.run_sync(self._read_all, references, limiter=self._threads)

    def _read_all(self, references: Mapping[str, str]) -> list[bytes | RecordLostError]:
        found: list[bytes | RecordLostError] = []
        for subject, reference in references.items():
            try:
                found.append(self._read(SegmentReference.parse(reference)))
            except FileNotFoundError:
                self._proof.check()
                found.append(record_lost(subject, "its file is missing"))
            except OSError as error:
                raise folder_failed(self._files.folder, error) from error
            except ValueError as error:
                found.append(record_lost(subject, str(error)))
        return found

    def _read(self, reference: SegmentReference) -> bytes:
        framed = self._files.read(reference.file, reference.offset, reference.framed_length)
        return reference.extract(framed)


# Whether the shared folder can be used, as this service last saw it.
#
# Guarantees: a folder that was lost, exchanged, filled, made read-only, or that does not answer, is noticed within
# seconds although nothing is written; once it is usable again, that is noticed by itself. After the store's folder
# was exchanged for a new one on purpose, the new one is used without a restart.

CHECK_SECONDS = 5.0
"""How often the folder is checked. A check writes one small file."""
AGAIN_SECONDS = 1.0
"""How often it is checked while it cannot be used."""
HANGS_SECONDS = 10.0
"""How long a check may take; file systems over a network wait for their server without end."""
WRITE_SECONDS = 3.0
"""How long a failed write counts: a small file may still fit where a record does not."""


class FolderWatch:
    """Checks the folder, and hears of failures there."""

    def __init__(self, proof: FolderProof, ledger: SegmentLedger) -> None:
        self._proof = proof
        self._ledger = ledger
        self._checked: StoreError | None = None
        """The result of the last check."""
        self._write: StoreError | None = None
        self._write_failed_at = 0.0
        self.tell: Callable[[StoreError | None], None] = lambda _: None
        """Told why the folder cannot be used, or None, whenever that was looked at."""

    @property
    def problem(self) -> StoreError | None:
        """Why the folder cannot be used, or None."""
        recent = time.monotonic() - self._write_failed_at < WRITE_SECONDS
        return self._checked or (self._write if recent else None)

    async def run(self) -> None:
        """Check again and again, until cancelled."""
        while True:
            await anyio.sleep(CHECK_SECONDS if self.problem is None else AGAIN_SECONDS)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._tell_if_it_hangs)
                await self.check()
                tasks.cancel_scope.cancel()

    async def check(self) -> None:
        """Check now whether the folder is the one that the store uses, and can be written."""
        await self.follow()
        try:
            # A check that waits for a file server must not hold up the end of the service.
            await anyio.to_thread.run_sync(self._proof.check_usable, abandon_on_cancel=True)
        except StoreError as error:
            self._found(error)
        else:
            self._found(None)

    async def follow(self) -> None:
        """Learn which folder the store uses now: it may have been exchanged, or Redis may have lost everything."""
        try:
            self._proof.mark = FolderMark(await self._ledger.store_id(), await self._ledger.mark(None))
        except StoreError:
            return  # the store itself fails, and says so

    def wrote(self, error: StoreError | None) -> None:
        """Hear how a write to the folder ended. One that succeeded proves little: its file was open before."""
        self._write = error
        if error is not None:
            self._write_failed_at = time.monotonic()
        self.tell(self.problem)

    def _found(self, error: StoreError | None) -> None:
        self._checked = error
        self.tell(self.problem)

    async def _tell_if_it_hangs(self) -> None:
        await anyio.sleep(HANGS_SECONDS)
        self._found(folder_hangs(self._proof.folder, HANGS_SECONDS))


# Deletes the segment files that nothing refers to any more.
#
# Guarantees: no file is deleted that is referenced, or that may yet be. The ledger names the files to delete, so
# nothing is scanned; only a rare sweep lists the folder, for files that the ledger does not know, such as after its
# store was restored from an older backup. Call this from one service at a time; a second one does no harm.

T = TypeVar("T")

FILES_AT_ONCE = 64
UNKNOWN_SECONDS = 86_400.0
"""The age from which a file that the ledger does not know is deleted."""


async def collect(files: SharedFiles, ledger: SegmentLedger) -> int:
    """Seal the files of services that have left or died, and delete garbage; return the bytes that this freed.

    A service that was only taken for dead writes to another file when it goes on.

    Raises:
        StoreError: The store or the folder fails.
    """
    if orphans := await ledger.orphans():
        await ledger.seal(orphans)
    freed = 0
    while garbage := await ledger.garbage(FILES_AT_ONCE):
        freed += await _delete(files, garbage)
        await ledger.forget(garbage)
    return freed


async def sweep(files: SharedFiles, ledger: SegmentLedger, *, age: float = UNKNOWN_SECONDS) -> int:
    """Delete files that the ledger does not know and that are older than `age` seconds; return the bytes freed.

    Raises:
        StoreError: The store or the folder fails.
    """
    old = await _in_thread(files, lambda: _older_than(files, age))
    freed = 0
    for start in range(0, len(old), FILES_AT_ONCE):
        unknown = await ledger.unknown(old[start : start + FILES_AT_ONCE])
        freed += await _delete(files, unknown)
    return freed


async def _delete(files: SharedFiles, names: Sequence[str]) -> int:
    return await _in_thread(files, lambda: sum(files.delete(name) for name in names))


async def _in_thread(files: SharedFiles, job: Callable[[], T]) -> T:
    try:
        return await anyio.to_thread.run_sync(job)  # a thread that was begun is waited for
    except OSError as error:
        raise folder_failed(files.folder, error) from error


def _older_than(files: SharedFiles, age: float) -> list[str]:
    """Return the segment files that are older than `age` seconds by the file server's own clock."""
    now = _server_time(files)
    old = set()
    for listed in files.names():
        name = listed.removesuffix(DRAFT_SUFFIX)
        with suppress(FileNotFoundError):
            if FILE_NAME.fullmatch(name) and now - files.changed_at(listed) >= age:
                old.add(name)
    return sorted(old)


def _server_time(files: SharedFiles) -> float:
    name = f"probe-{uuid4().hex}"
    try:
        files.close(files.create(name, b""))
        return files.changed_at(name)
    finally:
        files.delete(name)
