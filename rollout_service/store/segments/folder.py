"""The shared folder of a store: large records go in, references come out.

Guarantees: see `writer`, `reader`, `collector`, `proof` and `watch`, each of which has a part of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import anyio.to_thread

from rollout_service.base.errors import RecordLostError
from rollout_service.store.segments import collector
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.segments.ledger import SegmentLedger, SegmentTotals
from rollout_service.store.segments.problems import folder_failed
from rollout_service.store.segments.proof import FolderProof, prove_shared
from rollout_service.store.segments.reader import SegmentReader
from rollout_service.store.segments.reference import SegmentReference
from rollout_service.store.segments.watch import FolderWatch
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

        Only the leader of `retention` calls this. See `collector`.

        Raises:
            StoreError: The store fails, or the folder is not the store's any more: its files are not ours to delete.
        """
        await anyio.to_thread.run_sync(self._proof.check)
        freed = await collector.collect(self._files, self.ledger)
        if time.monotonic() >= self._sweep_at:
            freed += await collector.sweep(self._files, self.ledger)
            self._sweep_at = time.monotonic() + SWEEP_SECONDS
        return freed

    async def totals(self) -> SegmentTotals:
        """Return what is held."""
        return await self.ledger.totals()

    async def close(self) -> None:
        """Seal this service's files; idempotent."""
        await self._writer.close()
