"""Reads records from segment files, whoever wrote them.

Guarantees: the event loop never waits for the disk; a record that cannot be read is a RecordLostError, which harms no
other record; a folder that has gone away as a whole is a StoreError, since its records are not lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio
import anyio.to_thread

from rollout_service.base.errors import RecordLostError
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.segments.problems import folder_failed, record_lost
from rollout_service.store.segments.proof import FolderProof
from rollout_service.store.segments.reference import SegmentReference

READERS = 8
"""The most threads that read at once."""


class SegmentReader:
    """Reads from the files of one folder."""

    def __init__(self, files: SharedFiles, proof: FolderProof) -> None:
        self._files = files
        self._proof = proof
        self._threads = anyio.CapacityLimiter(READERS)

    async def read(self, reference: str, subject: str) -> bytes:
        """Return a record; `subject` names in errors what it belongs to.

        Raises:
            RecordLostError: The record is gone or damaged.
            StoreError: The folder cannot be read at the moment.
        """
        found = (await self.read_all({subject: reference}))[0]
        if isinstance(found, RecordLostError):
            raise found
        return found

    async def read_all(self, references: Mapping[str, str]) -> Sequence[bytes | RecordLostError]:
        """Return many records by what they belong to, in this order; each that is lost is an error in its place.

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
