"""Writes the records of one service to its own segment files.

- A reference is given out only once the record is on the disk, in a file that its name leads to, in the store's folder.
- Records that wait at the same time share one write and one flush to the disk; an object is written once.
- After a failed write nothing more is written to that file, since nobody knows what the disk holds of it.
- A file that was deleted under the writer is followed by another, to which its last records are written again.
- A file is sealed only once everyone who was given a reference to it is done with it.
- A write completes even if its caller is cancelled.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import structlog

from rollout_service.base.errors import ServiceError, StoreError
from rollout_service.store.segments.contract import SegmentFile, SegmentFiles
from rollout_service.store.segments.ledger import FILE_HEADER, SegmentLedger, SegmentReference, frame
from rollout_service.store.segments.proof import LOST_HINT, FolderProof, folder_lost

log = structlog.get_logger(__name__)

T = TypeVar("T")

FILE_BYTES = 64_000_000
"""A file of this size takes no more records; deleting it costs little."""
FILE_SECONDS = 600.0
"""A file of this age takes no more records, so that its records expire at about the same time."""
BATCH_BYTES = 16_000_000
"""A write of this size takes no more records, so that the first does not wait for too many others."""


FILES_PER_WRITE = 3
"""Files that may be deleted under a write before it fails."""


class _SegmentGoneError(Exception):
    """The file was deleted or exchanged; its folder is as it should be."""


@dataclass(eq=False, kw_only=True)
class _Registered:
    """A file that the ledger has as open, whether or not it exists."""

    name: str
    pending: int = 0
    """Callers that hold references to it."""


@dataclass(eq=False, kw_only=True)
class _OpenSegment(_Registered):
    file: SegmentFile
    opened: float
    end: int = len(FILE_HEADER)
    broken: bool = False


@dataclass(eq=False)
class _PendingWrite:
    """Records that wait to be written; after `woken`, either they are done, or it is their caller's turn to write."""

    records: Sequence[bytes]
    woken: anyio.Event = field(default_factory=anyio.Event)
    segment: _OpenSegment | None = None
    references: Sequence[SegmentReference] = ()
    error: ServiceError | None = None

    @property
    def done(self) -> bool:
        return self.segment is not None or self.error is not None


class SegmentWriter:
    def __init__(
        self,
        files: SegmentFiles,
        proof: FolderProof,
        ledger: SegmentLedger,
        *,
        owner: str,
        name: str,
        file_bytes: int = FILE_BYTES,
        file_seconds: float = FILE_SECONDS,
        wrote: Callable[[StoreError | None], None] = lambda _: None,
    ) -> None:
        """`name` is 12 hexadecimal digits that nobody else has; the names of files begin with it.

        `wrote` is called after each write to the folder, with its error or None.
        """
        self._files = files
        self._proof = proof
        self._ledger = ledger
        self._owner = owner
        self._name = name
        self._file_bytes = file_bytes
        self._file_seconds = file_seconds
        self._wrote = wrote
        self._number = 0
        self._queue: list[_PendingWrite] = []
        self._is_writing = False
        self._write_at = 0.0
        """When the next write may begin, in monotonic seconds."""
        self._segment: _OpenSegment | None = None
        self._retired: list[_Registered] = []
        self._thread = anyio.CapacityLimiter(1)

    @asynccontextmanager
    async def keep(self, records: Sequence[bytes]) -> AsyncIterator[list[str]]:
        """Write records, and yield their references; the block stores them.

        Raises:
            StoreError: The records could not be written.
        """
        with anyio.CancelScope(shield=True):
            written = await self._write(records)
        try:
            yield [str(reference) for reference in written.references]
        finally:
            if written.segment is not None:
                written.segment.pending -= 1
            if self._retired:
                with anyio.CancelScope(shield=True):
                    await self.seal()

    async def rotate(self, *, only_old: bool = False) -> None:
        """Close the current file to records, or only if it is old; the next record opens another."""
        segment = self._segment
        if segment is not None and not self._is_writing and (not only_old or self._is_old(segment)):
            await self._retire(segment)
        await self.seal()

    async def abandon(self, reference: str) -> None:
        """Close the file of a reference that the ledger refused.

        If the store has deleted the file before it was whole, nobody else deletes it now.
        """
        segment, name = self._segment, SegmentReference.parse(reference).file
        if segment is not None and segment.name == name:
            await self._retire(segment)
        with suppress(StoreError):  # then the sweep does it
            if await self._ledger.unknown([name]):
                await self._in_thread(self._files.delete, name)

    async def seal(self) -> None:
        """Seal the files that nobody needs any more; if the ledger fails, a later call does it."""
        files = [segment for segment in self._retired if not segment.pending]
        if not files:
            return
        with suppress(StoreError):
            await self._ledger.seal([segment.name for segment in files])
            self._retired = [segment for segment in self._retired if segment not in files]

    async def close(self) -> None:
        """Seal all files; call it once nobody writes any more. Idempotent."""
        with anyio.CancelScope(shield=True):
            await self.rotate()

    async def _write(self, records: Sequence[bytes]) -> _PendingWrite:
        own = _PendingWrite(records)
        self._queue.append(own)
        if self._is_writing:
            await own.woken.wait()
        if not own.done:
            await self._write_queue()
        if own.error is not None:
            raise type(own.error)(str(own.error), hint=own.error.hint) from own.error
        return own

    async def _write_queue(self) -> None:
        """Write the records that wait, up to a limit, then let the first of the others write."""
        self._is_writing = True
        await anyio.sleep(max(0.0, self._write_at - time.monotonic()))
        self._write_at = time.monotonic() + self._files.write_seconds
        batch = self._next_batch()
        try:
            segment, found = await self._write_batch(batch)
            segment.pending += len(batch)
            if not segment.file.takes_more:
                await self._retire(segment)
            for write, references in zip(batch, found, strict=True):
                write.references, write.segment = references, segment
        except ServiceError as error:
            self._fail(batch, error)
        finally:
            for write in batch:
                if not write.done:
                    write.error = StoreError("the record was not written", hint="Repeat the request.")
                write.woken.set()
            self._is_writing = bool(self._queue)
            if self._queue:
                self._queue[0].woken.set()

    async def _write_batch(self, batch: Sequence[_PendingWrite]) -> tuple[_OpenSegment, list[list[SegmentReference]]]:
        for _ in range(FILES_PER_WRITE):
            segment = await self._current()
            try:
                found = await self._in_thread(self._append, segment, batch)
            except _SegmentGoneError:
                await self._report_gone(segment)
            else:
                self._wrote(None)
                return segment, found
        raise folder_lost(self._files, "loses the files that are written there")

    async def _report_gone(self, segment: _OpenSegment) -> None:
        """Log that a file is gone with the results in it; the store deletes only files that it has forgotten.

        A file that has been mounted anew is another one, and has them still.
        """
        is_there = await self._in_thread(self._files.has, segment.name)
        if not is_there and not await self._ledger.unknown([segment.name]):
            log.error(
                "a file of the shared folder was deleted, with the trajectories in it",
                file=segment.name,
                place=self._files.texts.subject,
                hint=LOST_HINT,
            )

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Pass a failure to `wrote`."""
        try:
            return await anyio.to_thread.run_sync(work, *arguments, limiter=self._thread)
        except OSError as error:
            failed = self._files.failed(error)
            self._wrote(failed)
            raise failed from error
        except StoreError as error:
            self._wrote(error)
            raise

    def _next_batch(self) -> list[_PendingWrite]:
        size, count = 0, 0
        for write in self._queue:
            size += sum(map(len, write.records))
            if count and size > BATCH_BYTES:
                break
            count += 1
        batch, self._queue = self._queue[:count], self._queue[count:]
        return batch

    def _fail(self, batch: Sequence[_PendingWrite], error: ServiceError) -> None:
        for write in batch:
            if not write.done:
                write.error = error

    def _append(self, segment: _OpenSegment, batch: Sequence[_PendingWrite]) -> list[list[SegmentReference]]:
        """Write records to the disk, in a thread; return the references of each write."""
        end = segment.end
        parts: list[bytes] = []
        found: list[list[SegmentReference]] = []
        for write in batch:
            references = []
            for data in write.records:
                reference, header = frame(segment.name, end, data)
                references.append(reference)
                parts += [header, data]
                end += reference.framed_length
            found.append(references)
        try:
            self._flush(segment, parts)
        except BaseException:
            segment.broken = True
            raise
        segment.end = end
        return found

    def _flush(self, segment: _OpenSegment, parts: Sequence[bytes]) -> None:
        """Write to the disk, and see that it is where readers will look for it."""
        segment.file.append(parts, segment.end)
        self._proof.check()
        if not segment.file.is_there():
            raise _SegmentGoneError

    async def _current(self) -> _OpenSegment:
        segment = self._segment
        if segment is not None and (segment.broken or self._is_full(segment) or self._is_old(segment)):
            await self._retire(segment)
            segment = None
        if segment is None:
            segment = self._segment = await self._open()
        return segment

    async def _open(self) -> _OpenSegment:
        await self._in_thread(self._proof.check)  # or a file would be left where the folder was mounted
        self._number += 1
        name = f"{self._name}-{self._number}.segment"
        await self._ledger.register(name, self._owner)
        try:
            file = await self._in_thread(self._files.begin, name)
        except StoreError:
            self._retired.append(_Registered(name=name))
            raise
        return _OpenSegment(name=name, file=file, opened=time.monotonic())

    async def _retire(self, segment: _OpenSegment) -> None:
        self._segment = None
        self._retired.append(segment)
        with suppress(OSError):  # all that counts is flushed
            await anyio.to_thread.run_sync(segment.file.close, limiter=self._thread)

    def _is_full(self, segment: _OpenSegment) -> bool:
        return segment.end >= self._file_bytes

    def _is_old(self, segment: _OpenSegment) -> bool:
        return time.monotonic() - segment.opened >= self._file_seconds
