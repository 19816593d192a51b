"""The shared folder of a store, or the part of a bucket: large records go in, references come out.

`writer`, `files`, `ledger` and `proof` each have a part of the guarantees.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import anyio
import anyio.to_thread
import structlog

from rollout_service.base.errors import ConfigurationError, RecordLostError, StoreError
from rollout_service.store.segments.contract import SegmentFiles
from rollout_service.store.segments.ledger import FILE_NAME, SegmentLedger, SegmentReference
from rollout_service.store.segments.proof import FolderMark, FolderProof, folder_hangs, prove_shared, record_lost
from rollout_service.store.segments.writer import FILE_BYTES, FILE_SECONDS, SegmentWriter
from sandboxes.task_groups import open_task_group

T = TypeVar("T")

log = structlog.get_logger(__name__)

SWEEP_SECONDS = 86_400.0
"""How often to look for files that the ledger does not know."""
TIDY_SECONDS = 60.0


class SegmentReader:
    def __init__(self, files: SegmentFiles, proof: FolderProof) -> None:
        self._files = files
        self._proof = proof
        self._threads = anyio.CapacityLimiter(files.reads_at_once)

    async def read_all(self, references: Mapping[str, str]) -> Sequence[bytes | RecordLostError]:
        """Return many records by their subjects, in this order; each that is lost is an error in its place.

        A folder that has gone away as a whole is a StoreError, since its records are not lost.
        """
        pairs = list(references.items())
        found: list[bytes | RecordLostError] = [b""] * len(pairs)

        async def read(part: slice) -> None:
            found[part] = await anyio.to_thread.run_sync(self._read_some, pairs[part], limiter=self._threads)

        length = max(1, -(-len(pairs) // self._files.reads_at_once))
        async with open_task_group() as readers:
            for start in range(0, len(pairs), length):
                readers.start_soon(read, slice(start, start + length))
        return found

    def _read_some(self, references: Sequence[tuple[str, str]]) -> list[bytes | RecordLostError]:
        found: list[bytes | RecordLostError] = []
        for subject, reference in references:
            try:
                found.append(self._read(SegmentReference.parse(reference)))
            except FileNotFoundError:
                self._proof.check()
                found.append(record_lost(subject, "its file is missing"))
            except OSError as error:
                raise self._files.failed(error) from error
            except ValueError as error:
                found.append(record_lost(subject, str(error)))
        return found

    def _read(self, reference: SegmentReference) -> bytes:
        framed = self._files.read(reference.file, reference.offset, reference.framed_length)
        return reference.extract(framed)


class SegmentFolder(SegmentReader):
    """One service's view of the folder: `async with await SegmentFolder.open(...) as segments:`.

    Raises:
        StoreError: The store or the folder fails at the moment; every method can raise it.
    """

    def __init__(
        self,
        files: SegmentFiles,
        proof: FolderProof,
        ledger: SegmentLedger,
        watch: FolderWatch,
        writer: SegmentWriter,
    ) -> None:
        super().__init__(files, proof)
        self.ledger = ledger
        self.watch = watch
        self._writer = writer
        self._sweep_at = time.monotonic()

    @classmethod
    async def open(
        cls,
        files: SegmentFiles,
        ledger: SegmentLedger,
        *,
        owner: str,
        name: str,
        file_bytes: int = FILE_BYTES,
        file_seconds: float = FILE_SECONDS,
        may_be_away: bool = False,
    ) -> Self:
        """Prove that the folder is shared, and open it.

        `owner` is the identity of this service, and `name` its random part, of 12 hexadecimal digits. A store that may
        be away does not fail: `watch` proves the folder later, and it cannot be used before.

        Raises:
            ConfigurationError: The folder is not writable, is not shared, or belongs to another store.
            StoreError: The store fails.
        """
        try:
            proof = await prove_shared(files, ledger)
        except StoreError:
            if not may_be_away:
                raise
            proof = FolderProof(files, FolderMark("", None))
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
        return self._writer.keep(records)

    async def abandon(self, reference: str) -> None:
        """Put the next records elsewhere, since the ledger refused this reference."""
        await self.watch.follow()  # it refuses all files of a folder that was exchanged
        await self._writer.abandon(reference)

    async def overwrite(self, references: Sequence[str]) -> None:
        """Overwrite records that are to be erased; those that are gone, or damaged, are left."""
        try:
            await anyio.to_thread.run_sync(self._overwrite, references)
        except OSError as error:
            raise self._files.failed(error) from error

    def _overwrite(self, references: Sequence[str]) -> None:
        for reference in references:
            with suppress(ValueError, FileNotFoundError):
                record = SegmentReference.parse(reference)
                self._files.overwrite(record.file, record.offset, record.framed_length)

    async def keep_tidy(self) -> None:
        """Close this service's own file whenever it is old: an idle service holds up no deletion."""
        while True:
            await anyio.sleep(TIDY_SECONDS)
            await self._writer.rotate(only_old=True)

    async def collect(self) -> int:
        """Delete garbage and, once a day, old files that the ledger does not know; return how many files.

        Only the leader of `retention` calls this.
        """
        await anyio.to_thread.run_sync(self._proof.check)
        deleted = await collect(self._files, self.ledger)
        if time.monotonic() >= self._sweep_at:
            deleted += await sweep(self._files, self.ledger)
            self._sweep_at = time.monotonic() + SWEEP_SECONDS
        return deleted

    async def close(self) -> None:
        """Seal this service's files; idempotent."""
        await self._writer.close()


CHECK_SECONDS = 5.0
"""Each check writes one small file."""
AGAIN_SECONDS = 1.0
"""Replaces `CHECK_SECONDS` while the folder cannot be used."""
HANGS_SECONDS = 10.0
"""How long a check may take: file systems over a network wait for their server without end."""
WRITE_SECONDS = 3.0
"""How long a failed write counts: a small file may still fit where a record does not."""


class FolderWatch:
    """Whether the shared folder can be used, as this service last saw it.

    A folder that was lost, exchanged, filled, made read-only, or that does not answer, is noticed within seconds
    although nothing is written, and so is its return. After it was exchanged on purpose, the new one is used without a
    restart.
    """

    def __init__(self, proof: FolderProof, ledger: SegmentLedger) -> None:
        self._proof = proof
        self._ledger = ledger
        self._checked: StoreError | None = None
        self._write: StoreError | None = None
        self._write_failed_at = 0.0
        self.tell: Callable[[StoreError | None], None] = lambda _: None
        """Told the problem, or None, after each look."""

    @property
    def problem(self) -> StoreError | None:
        recent = time.monotonic() - self._write_failed_at < WRITE_SECONDS
        return self._checked or (self._write if recent else None)

    async def run(self) -> None:
        while True:
            await anyio.sleep(CHECK_SECONDS if self.problem is None else AGAIN_SECONDS)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._tell_if_it_hangs)
                await self.check()
                tasks.cancel_scope.cancel()

    async def check(self) -> None:
        """Check that the folder is the one that the store uses, and can be written."""
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
            if self._proof.mark.store:
                self._proof.mark = FolderMark(*await self._ledger.mark(None))
            else:  # the store was away as the service started
                self._proof.mark = (await prove_shared(self._proof.files, self._ledger)).mark
        except ConfigurationError as error:
            log.error("the folder cannot be used", error=str(error), hint=error.hint)
        except StoreError:
            return  # the store itself fails, and says so

    def wrote(self, error: StoreError | None) -> None:
        """Note how a write to the folder ended. One that succeeded proves little: its file was open before."""
        self._write = error
        if error is not None:
            self._write_failed_at = time.monotonic()
        self.tell(self.problem)

    def _found(self, error: StoreError | None) -> None:
        self._checked = error
        self.tell(self.problem)

    async def _tell_if_it_hangs(self) -> None:
        await anyio.sleep(HANGS_SECONDS)
        self._found(folder_hangs(self._proof.files, HANGS_SECONDS))


PROBE_NAME = re.compile(r"probe-[0-9a-f]{32}", re.ASCII)
FILES_AT_ONCE = 500
UNKNOWN_SECONDS = 86_400.0
"""Files that the ledger does not know are deleted at this age."""


async def collect(files: SegmentFiles, ledger: SegmentLedger) -> int:
    """Seal the files of services that have left or died, and delete garbage; return how many files.

    The ledger names the files, so nothing is scanned, and no file is deleted that may yet be referenced. A second
    service that does this does no harm. A service that was only taken for dead writes to another file when it goes on.
    """
    if orphans := await ledger.orphans():
        await ledger.seal(orphans)
    deleted = 0
    while garbage := await ledger.garbage(FILES_AT_ONCE):
        await _in_thread(files, partial(files.delete, *garbage))
        await ledger.forget(garbage)
        deleted += len(garbage)
    return deleted


async def sweep(files: SegmentFiles, ledger: SegmentLedger, *, age: float = UNKNOWN_SECONDS) -> int:
    """Delete files that the ledger does not know, as after its store was restored from an older backup, and forgotten
    probes.

    Only those older than `age` seconds are deleted; return how many.
    """
    ages = await _in_thread(files, files.ages)
    old = sorted(name for name, seconds in ages.items() if FILE_NAME.fullmatch(name) and seconds >= age)
    probes = [name for name, seconds in ages.items() if PROBE_NAME.fullmatch(name) and seconds >= age]
    await _in_thread(files, partial(files.delete, *probes))
    deleted = len(probes)
    for start in range(0, len(old), FILES_AT_ONCE):
        if unknown := await ledger.unknown(old[start : start + FILES_AT_ONCE]):
            await _in_thread(files, partial(files.delete, *unknown))
            deleted += len(unknown)
    return deleted


async def _in_thread(files: SegmentFiles, job: Callable[[], T]) -> T:
    try:
        return await anyio.to_thread.run_sync(job)  # a thread that was begun is waited for
    except OSError as error:
        raise files.failed(error) from error
