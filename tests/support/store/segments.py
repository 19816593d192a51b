"""Segments with a ledger in memory, and a folder whose operations fail on demand."""

import errno
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from rollout_service.base.errors import RecordLostError
from rollout_service.store.segments import SegmentFiles, SegmentFolder
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.segments.ledger import SegmentReference
from rollout_service.store.segments.proof import MARK_FILE

OWNER, NAME = "host/one", "0123456789ab"


class MemoryLedger:
    """A ledger for the services of one process; `add` and `drop` are what a store's functions do."""

    def __init__(self) -> None:
        self._store = uuid4().hex
        self._mark: str | None = None
        self.owners: dict[str, str] = {}
        self.dead: set[str] = set()
        """The owners that are gone."""
        self.live: dict[str, int] = {}
        self.collected: set[str] = set()

    def add(self, reference: str) -> bool:
        """Count a reference; return False if its file is not open."""
        found = SegmentReference.parse(reference)
        if found.file not in self.owners:
            return False
        self.live[found.file] += 1
        return True

    def drop(self, reference: str) -> None:
        """Stop counting a reference."""
        found = SegmentReference.parse(reference)
        self.live[found.file] -= 1
        self._discard(found.file)

    async def mark(self, proposal: str | None) -> tuple[str, str | None]:
        self._mark = self._mark or proposal
        return self._store, self._mark

    def forget_mark(self) -> None:
        """Let the next service mark a new folder."""
        self._mark = None
        self.owners.clear()

    def lose_everything(self) -> None:
        """Be another store, as an emptied Redis is."""
        self._store, self._mark = uuid4().hex, None

    async def register(self, file: str, owner: str) -> None:
        self.owners[file] = owner
        self.live[file] = 0

    async def seal(self, files: Collection[str]) -> None:
        for file in files:
            if self.owners.pop(file, None) is not None:
                self._discard(file)

    async def orphans(self) -> Sequence[str]:
        return [file for file, owner in self.owners.items() if owner in self.dead]

    async def garbage(self, limit: int) -> Sequence[str]:
        return sorted(self.collected)[:limit]

    async def forget(self, files: Collection[str]) -> None:
        self.collected -= set(files)

    async def unknown(self, files: Collection[str]) -> Sequence[str]:
        return [file for file in files if file not in self.live and file not in self.collected]

    @property
    def records(self) -> int:
        return sum(self.live.values())

    def _discard(self, file: str) -> None:
        if file not in self.owners and self.live.get(file) == 0:
            del self.live[file]
            self.collected.add(file)


class FaultyFiles(SharedFiles):
    """A folder whose next operations fail; `fail["write"] = errno.ENOSPC` also leaves half of the bytes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fail: dict[str, int] = {}
        self.flushes = 0

    def create(self, name: str, header: bytes) -> int:
        self._check("create")
        return super().create(name, header)

    def write(self, descriptor: int, parts: Sequence[bytes], offset: int) -> None:
        if "write" in self.fail:
            whole = b"".join(parts)
            super().write(descriptor, [whole[: len(whole) // 2]], offset)
        self._check("write")
        super().write(descriptor, parts, offset)

    def sync(self, descriptor: int) -> None:
        self._check("sync")
        self.flushes += 1
        super().sync(descriptor)

    def read(self, name: str, offset: int, length: int) -> bytes:
        self._check("read")
        return super().read(name, offset, length)

    def _check(self, operation: str) -> None:
        number = self.fail.pop(operation, None)
        if number is not None:
            raise OSError(number, os.strerror(number))


NO_SPACE, IO_ERROR = errno.ENOSPC, errno.EIO


async def opened(files: SegmentFiles, ledger: MemoryLedger, name: str = NAME, **given: Any) -> SegmentFolder:
    """Open the segments of a service."""
    return await SegmentFolder.open(files, ledger, owner=OWNER, name=name, **given)


async def keep(segments: SegmentFolder, ledger: MemoryLedger, *records: bytes) -> list[str]:
    """Write records, and refer to them."""
    async with segments.keep(records) as references:
        assert all(ledger.add(reference) for reference in references)
    return references


async def read(segments: SegmentFolder, reference: str, subject: str = "r1") -> bytes:
    """Return a record."""
    (found,) = await segments.read_all({subject: reference})
    if isinstance(found, RecordLostError):
        raise found
    return found


def segment_files(files: SegmentFiles) -> set[str]:
    return files.sizes().keys() - {MARK_FILE}
