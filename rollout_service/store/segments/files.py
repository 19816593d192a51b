"""The operations on the shared folder, each of which may block and may fail as the file system does.

Guarantees: a new file has its name only once its header and its name are on the disk; nothing relies on locks or on
appending, so hosts may share the folder over NFS. Only the owner can read the files. Call these in threads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from rollout_service.base.private_files import OWNER_ONLY
from rollout_service.store.segments.ledger import DRAFT_SUFFIX


class SharedFiles:
    """The files of one folder.

    Raises:
        OSError: The file system fails; every method can raise it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self, name: str, header: bytes) -> int:
        """Create a durable file that begins with a header; return a descriptor to write to.

        The name must be one that nobody else uses, now or later.
        """
        draft = self.folder / f"{name}{DRAFT_SUFFIX}"
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, OWNER_ONLY)
        try:
            self.write(descriptor, [header], 0)
            self.sync(descriptor)
            draft.replace(self.folder / name)
            self.sync_folder()
        except BaseException:
            os.close(descriptor)
            with suppress(OSError):
                draft.unlink()
            raise
        return descriptor

    def create_once(self, name: str, data: bytes) -> None:
        """Create a durable file with these contents, if no host has created one of this name.

        Raises:
            FileExistsError: There is such a file.
        """
        source = f"{uuid4().hex}-{name}"
        try:
            self.close(self.create(source, data))
            os.link(self.folder / source, self.folder / name)  # unlike a rename, it never replaces a file
            self.sync_folder()
        finally:
            self.delete(source)

    def write(self, descriptor: int, parts: Sequence[bytes], offset: int) -> None:
        """Write all parts, one after the other."""
        remaining = memoryview(b"".join(parts))
        while remaining:
            written = os.pwrite(descriptor, remaining, offset)
            remaining, offset = remaining[written:], offset + written

    def sync(self, descriptor: int) -> None:
        """Wait until the written bytes are on the disk."""
        os.fdatasync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return up to this many bytes; fewer where the file ends.

        The file is opened anew each time, because NFS shows the writes of other hosts only to those who open it later.

        Raises:
            FileNotFoundError: There is no such file.
        """
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self.names()  # NFS may remember that the file was absent until the folder is read again
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = []
            while length and (part := os.pread(descriptor, length, offset)):
                parts.append(part)
                length, offset = length - len(part), offset + len(part)
            return b"".join(parts)
        finally:
            os.close(descriptor)

    def overwrite(self, name: str, offset: int, length: int) -> None:
        """Overwrite bytes of a file with zeros, and wait until they are on the disk.

        Raises:
            FileNotFoundError: There is no such file.
        """
        descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self.write(descriptor, [bytes(length)], offset)
            self.sync(descriptor)
        finally:
            os.close(descriptor)

    def leads_to(self, name: str, descriptor: int) -> bool:
        """Return whether a name still leads to an open file: not if the file was deleted, moved or replaced.

        The name is opened anew, because NFS may answer a mere question about it from memory.
        """
        try:
            found = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return os.path.samestat(os.fstat(found), os.fstat(descriptor))
        finally:
            os.close(found)

    def delete(self, name: str) -> int:
        """Delete a file and its draft, if they exist; return the bytes that this freed."""
        freed = 0
        for path in (self.folder / f"{name}{DRAFT_SUFFIX}", self.folder / name):
            with suppress(FileNotFoundError):
                size = path.stat().st_size
                path.unlink()
                freed += size
        return freed

    def names(self) -> list[str]:
        return [path.name for path in self.folder.iterdir()]

    def sizes(self) -> dict[str, int]:
        """Return the size of each file, in bytes, by its name."""
        with os.scandir(self.folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def changed_at(self, name: str) -> float:
        """Return when a file was last changed, in Unix seconds of the file server's clock."""
        return (self.folder / name).stat().st_mtime

    def sync_folder(self) -> None:
        """Wait until the names of new files are on the disk."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
