"""The agents' artifacts on their way to the graders' sandboxes: archives in unnamed temporary files.

Archives are streamed and never unpacked on the host. Before one is unpacked in a sandbox, each of its entries is
checked to stay within its own path. A crash leaves nothing of them behind. Together they take no more of the host's
temporary disk than the budget.
"""

from __future__ import annotations

import hashlib
import posixpath
import tarfile
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import IO

import anyio
import anyio.to_thread
from anyio import SpooledTemporaryFile

from rollout_service.episodes import WorkClock
from sandboxes.errors import FileTooLargeError, SandboxFileError
from sandboxes.runtime.tree_reader import stays_within

IN_MEMORY_BYTES = 1 << 20
CHUNK_BYTES = 1 << 18
KINDS = frozenset({tarfile.DIRTYPE, tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE})


class DiskBudget:
    """Bytes of the host's temporary disk, shared by all rollouts."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._left = size
        self._returned = anyio.Condition()
        self._first = anyio.Lock()
        """Held by the one who waits for bytes, so that those who come later do not overtake it."""

    async def reserve(self, count: int) -> None:
        """Wait until the bytes are available; `count` is at most the size."""
        async with self._first, self._returned:
            while self._left < count:
                await self._returned.wait()
            self._left -= count

    async def give_back(self, count: int) -> None:
        with anyio.CancelScope(shield=True):
            async with self._returned:
                self._left += count
                self._returned.notify_all()


@dataclass(slots=True)
class Artifacts:
    """Archives at one or more moments, each with the folder in which it is unpacked."""

    budget: DiskBudget
    limit: int
    """Bytes of all contents together; the archives may take twice as many."""
    clock: WorkClock = field(default_factory=WorkClock)
    """That of the agent's work; it stands still while the budget has no room."""
    archives: list[tuple[str, SpooledTemporaryFile[bytes]]] = field(default_factory=list)
    checkpoints: list[list[tuple[str, SpooledTemporaryFile[bytes]]]] = field(default_factory=list)
    """Archives of earlier moments."""
    paths: list[str] = field(default_factory=list)
    """The paths to take, whether they existed or not."""
    notes: list[str] = field(default_factory=list)
    """For people, on artifacts that were left out."""
    ended: list[str] = field(default_factory=list)
    """Command lines of the agent's processes that were ended."""
    _reserved: int = 0
    _used: int = 0

    async def add(self, path: str, archive: AsyncIterable[bytes]) -> None:
        """Leave the archive out if the stream fails, and raise the error.

        An archive too large for memory waits until the budget has room for the largest size it may reach, so a holder
        of a part of the budget never waits for more of it.
        """
        file = SpooledTemporaryFile[bytes](max_size=IN_MEMORY_BYTES)
        used = 0
        try:
            async for chunk in archive:
                used += len(chunk)
                await self._make_room(path, used)
                await file.write(chunk)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await file.aclose()
            raise
        self._used += used
        self.archives.append((str(PurePosixPath(path).parent), file))

    async def _make_room(self, path: str, used: int) -> None:
        if self._used + used > 2 * self.limit:
            raise FileTooLargeError(f"{path}: the archive is longer than {2 * self.limit} bytes")
        if self._used + used > IN_MEMORY_BYTES and not self._reserved:
            with self.clock.standing_still():
                await self.budget.reserve(2 * self.limit)
            self._reserved = 2 * self.limit

    @property
    def left(self) -> int:
        return max(1, self.limit - self._used)

    def keep(self) -> None:
        """Make the archives so far a checkpoint; those that follow begin anew."""
        self.checkpoints.append(list(self.archives))
        self.archives.clear()

    async def settle(self) -> None:
        """Give back the unused part of the reservation once nothing more will be added."""
        spare = self._reserved - min(self._used, self._reserved)
        self._reserved -= spare
        await self.budget.give_back(spare)

    async def checked(self, checkpoint: int | None = None) -> AsyncIterator[tuple[str, AsyncIterator[bytes]]]:
        """Yield folders and archives to unpack there, of a checkpoint or of the end; may be called again."""
        for parent, file in self.archives if checkpoint is None else self.checkpoints[checkpoint]:
            await file.seek(0)
            await anyio.to_thread.run_sync(require_safe, file.wrapped, parent)
            await file.seek(0)
            yield parent, _chunks(file)

    async def drop(self, note: str) -> None:
        """Leave out all artifacts since the last checkpoint."""
        self.notes.append(note)
        if self.checkpoints:
            await self._delete(self.archives)
        else:
            await self.close()

    async def close(self) -> None:
        for archives in (self.archives, *self.checkpoints):
            await self._delete(archives)
        self._used = 0
        reserved, self._reserved = self._reserved, 0
        await self.budget.give_back(reserved)

    async def _delete(self, archives: list[tuple[str, SpooledTemporaryFile[bytes]]]) -> None:
        while archives:
            _, file = archives.pop()
            await file.aclose()


def require_safe(file: IO[bytes], parent: str) -> None:
    """Check that an archive has one top entry, holds no devices, and that no entry leads out of the top one.

    Raises:
        SandboxFileError: The archive is unsafe, or the file is not an archive.
    """
    # Only digests are kept, so that memory depends on the number of entries alone.
    folders: set[bytes] = set()
    files: set[bytes] = set()
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
            while (entry := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]
                above, _, last = entry.name.rpartition("/")
                names = above.split("/") if above else []
                safe = entry.type in KINDS and last not in ("", ".", "..") and not entry.mode & ~0o777
                safe &= _digest(above) in folders if above else not (folders or files)
                safe &= not entry.islnk() or _digest(entry.linkname) in files
                top = posixpath.join(parent, (names or [last])[0])
                safe &= not entry.issym() or stays_within(entry.linkname, names, top)
                if not safe:
                    raise SandboxFileError(f"an artifact of the agent cannot be unpacked safely: {entry.name!r}")
                (folders if entry.isdir() else files).add(_digest(entry.name))
    except tarfile.TarError as error:
        raise SandboxFileError(f"an artifact of the agent is not a valid archive: {error}") from error


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).digest()


async def _chunks(file: SpooledTemporaryFile[bytes]) -> AsyncIterator[bytes]:
    while chunk := await file.read(CHUNK_BYTES):
        yield chunk
