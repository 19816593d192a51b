"""Segment files in a folder that hosts share.

A new file has its name only once its header and its name are on the disk; nothing relies on locks or on appending, so
hosts may share the folder over NFS. Only the owner can read the files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from rollout_service.base.errors import StoreError
from rollout_service.base.private_files import OWNER_ONLY
from rollout_service.settings import StoreSettings
from rollout_service.store.segments.contract import PlaceTexts, SegmentFile, SegmentFiles
from rollout_service.store.segments.ledger import DRAFT_SUFFIX, FILE_HEADER

_HINTS = {
    errno.ENOSPC: "Free space on the file system of [store] folder; no restart is needed.",
    errno.EDQUOT: "Raise the quota on the file system of [store] folder, or free space; no restart is needed.",
    errno.EROFS: "Mount the file system of [store] folder for writing; no restart is needed.",
    errno.EACCES: "Give the service's user write access to [store] folder.",
    errno.EPERM: "Give the service's user write access to [store] folder.",
    errno.ENOENT: "Mount the file system of [store] folder again; no restart is needed.",
    errno.ESTALE: "Mount the file system of [store] folder again; no restart is needed.",
}
_OTHERWISE = "Check the file system of [store] folder, and the kernel's log (dmesg)."


class SharedFiles(SegmentFiles):
    write_seconds = 0.0
    """A flush takes long enough to gather records."""
    reads_at_once = 8

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def texts(self) -> PlaceTexts:
        return PlaceTexts(
            where=str(self.folder),
            subject=f"the shared folder {self.folder}",
            unused="Set [store] folder to an empty folder.",
            shared="Set [store] folder to a folder that all nodes share, and mount its file system on this node.",
            bring_back="Mount it or move it back; no restart is needed.",
            slow="Look at its file server and at the network; no restart is needed.",
        )

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def begin(self, name: str) -> SegmentFile:
        return _FolderFile(self, name, self.create(name, FILE_HEADER))

    def store(self, name: str, data: bytes) -> None:
        os.close(self.create(name, data))

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

    def store_once(self, name: str, data: bytes) -> None:
        source = f"{uuid4().hex}-{name}"
        try:
            self.store(source, data)
            os.link(self.folder / source, self.folder / name)  # unlike a rename, it never replaces a file
            self.sync_folder()
        finally:
            self.delete(source)

    def write(self, descriptor: int, parts: Sequence[bytes], offset: int) -> None:
        remaining = memoryview(b"".join(parts))
        while remaining:
            written = os.pwrite(descriptor, remaining, offset)
            remaining, offset = remaining[written:], offset + written

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def read(self, name: str, offset: int, length: int) -> bytes:
        # Opened anew each time, because NFS shows the writes of other hosts only to those who open the file later.
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            list(self.folder.iterdir())  # NFS may remember that the file was absent until the folder is read again
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
        descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self.write(descriptor, [bytes(length)], offset)
            self.sync(descriptor)
        finally:
            os.close(descriptor)

    def leads_to(self, name: str, descriptor: int) -> bool:
        """Return whether a name still leads to an open file: not if it was deleted, moved or replaced.

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

    def delete(self, *names: str) -> None:
        for name in names:
            for path in (self.folder / f"{name}{DRAFT_SUFFIX}", self.folder / name):
                path.unlink(missing_ok=True)

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def ages(self) -> dict[str, float]:
        now = self._server_time()
        found: dict[str, float] = {}
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):
                age = now - path.stat().st_mtime
                name = path.name.removesuffix(DRAFT_SUFFIX)
                found[name] = max(age, found.get(name, age))
        return found

    def failed(self, error: OSError) -> StoreError:
        why = error.strerror or type(error).__name__
        return StoreError(f"{self.texts.subject} cannot be used: {why}", hint=_HINTS.get(error.errno or 0, _OTHERWISE))

    def _server_time(self) -> float:
        name = f"probe-{uuid4().hex}"
        try:
            self.store(name, b"")
            return (self.folder / name).stat().st_mtime
        finally:
            self.delete(name)

    def sync_folder(self) -> None:
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _FolderFile(SegmentFile):
    takes_more = True

    def __init__(self, files: SharedFiles, name: str, descriptor: int) -> None:
        self._files = files
        self._name = name
        self._descriptor = descriptor

    def append(self, parts: Sequence[bytes], offset: int) -> None:
        self._files.write(self._descriptor, parts, offset)
        self._files.sync(self._descriptor)

    def is_there(self) -> bool:
        return self._files.leads_to(self._name, self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def files_of(settings: StoreSettings, shard: int = 0) -> SegmentFiles | None:
    """Return the shared folder or the object store of a shard; None if the settings name neither.

    Raises:
        ConfigurationError: The object store cannot be used, or its packages are not installed.
    """
    below = f"shard-{shard}" if max(settings.shards, len(settings.url)) > 1 else ""
    if settings.objects is not None:
        from rollout_service.store.segments.s3 import open_objects  # the packages may be missing

        address = f"{settings.objects.rstrip('/')}/{below}" if below else settings.objects
        return open_objects(address, endpoint=settings.objects_endpoint, region=settings.objects_region)
    return None if settings.folder is None else SharedFiles(settings.folder / below)
