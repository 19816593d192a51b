"""The proof that a folder is shared by all services of one store, and by no other store.

Guarantees: a service that cannot write, flush and name files in the folder does not start, nor does one that sees
another folder than the services before it. Whoever relies on the folder later can check that it is still the one that
was proved. Nothing depends on the clocks of the hosts.

The file MARK_FILE contains the id of the store and a random mark; the store keeps both. The first service writes the
file, and only then the store remembers its mark. So a service that sees no file although the store has a mark looks at
another folder, and so does one that sees another mark.
"""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import anyio
import anyio.to_thread

from rollout_service.base.errors import ConfigurationError, RecordLostError, StoreError
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.segments.ledger import SegmentLedger

MARK_FILE = "store.json"
_MARK_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class FolderMark:
    """The contents of the file that marks a folder."""

    store: str
    mark: str | None
    """None: no service of the store has marked a folder yet."""


class FolderProof:
    """The mark that was proved, to be looked for again before anything in the folder is relied on.

    `check` and `check_usable` may block: call them in threads.
    """

    def __init__(self, files: SharedFiles, mark: FolderMark) -> None:
        self._files = files
        self.folder = files.folder
        self.mark = mark
        """The mark that the folder is to have."""

    def check(self) -> None:
        """Check that the folder is still there, and is no other.

        Raises:
            StoreError: It is not, or it cannot be read.
        """
        try:
            found = _read(self._files)
        except ConfigurationError as error:
            raise folder_lost(self.folder, "has a damaged mark") from error
        except OSError as error:
            raise folder_failed(self.folder, error) from error
        if found is None:
            raise folder_lost(self.folder, "has no mark: it was deleted, moved or emptied, or is not mounted")
        if found.store != self.mark.store:
            raise folder_lost(self.folder, "belongs to another store than the one in Redis")
        if found != self.mark:
            raise folder_lost(self.folder, "is not the one that the other services of this store use")

    def check_usable(self) -> None:
        """Check the folder as `check` does, and that files can be written there.

        Raises:
            StoreError: It is another folder, or it cannot be written.
        """
        self.check()
        try:
            _probe(self._files)
        except OSError as error:
            raise folder_failed(self.folder, error) from error


async def prove_shared(files: SharedFiles, ledger: SegmentLedger) -> FolderProof:
    """Check a folder at the start of a service; the first service of a store creates and marks it.

    Raises:
        ConfigurationError: The folder is not writable, is not shared, or belongs to another store.
        StoreError: The store fails.
    """
    store, known = await ledger.store_id(), await ledger.mark(None)
    with anyio.CancelScope(shield=True):
        mark = await _prove(files, ledger, store, may_create=known is None)
    return FolderProof(files, mark)


async def _prove(files: SharedFiles, ledger: SegmentLedger, store: str, *, may_create: bool) -> FolderMark:
    found, is_new = await anyio.to_thread.run_sync(_look, files, store, may_create)
    if found is None:
        raise _not_shared(files.folder, "has no mark, although other services have marked theirs")
    if found.store != store:
        raise ConfigurationError(
            f"the folder {files.folder} belongs to another store",
            hint="Set [store] folder to an empty folder. If the other store is gone for good, delete "
            f"{MARK_FILE} there.",
        )
    if await ledger.mark(found.mark) != found.mark:
        if is_new:
            await anyio.to_thread.run_sync(files.delete, MARK_FILE)
        raise _not_shared(files.folder, "is not the one that other services of this store see")
    return found


def _look(files: SharedFiles, store: str, may_create: bool) -> tuple[FolderMark | None, bool]:
    """Return the folder's mark, and whether it was written now.

    Raises:
        ConfigurationError: The folder cannot be used.
    """
    try:
        if may_create:
            files.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _probe(files)
        found = _read(files)
        if found is not None or not may_create:
            return found, False
        mark = json.dumps({"store": store, "mark": uuid4().hex}).encode()
        try:
            files.create_once(MARK_FILE, mark)
        except FileExistsError:
            return _read(files), False  # another service was faster
        return _read(files), True
    except OSError as error:
        failed = folder_failed(files.folder, error)
        raise ConfigurationError(str(failed), hint=failed.hint) from error


def _probe(files: SharedFiles) -> None:
    """Check that files can be created, flushed, read and deleted."""
    name, data = f"probe-{uuid4().hex}", b"probe"
    try:
        files.close(files.create(name, data))
        if files.read(name, 0, len(data)) != data:
            raise OSError(f"a new file in {files.folder} does not contain what was written")
    finally:
        files.delete(name)


def _read(files: SharedFiles) -> FolderMark | None:
    """Return the mark, or None if there is none.

    Raises:
        ConfigurationError: The file is damaged.
    """
    try:
        text = files.read(MARK_FILE, 0, _MARK_BYTES)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(text)
        return FolderMark(str(found["store"]), str(found["mark"]))
    except (ValueError, TypeError, KeyError):
        raise ConfigurationError(
            f"{files.folder / MARK_FILE} is damaged",
            hint="Restore it from a backup, or set [store] folder to an empty folder.",
        ) from None


def _not_shared(folder: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the folder {folder} {why}",
        hint="Set [store] folder to a folder that all nodes share, and mount its file system on this node. "
        f"{BEGIN_AGAIN_HINT}",
    )


# Failures of the shared folder as errors of the store, with what to do next.

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
LOST_HINT = (
    "Restore the file from a backup of [store] folder, or let the task run again under another rollout_id. "
    "`rollout-service store check` names all that is lost."
)
BEGIN_AGAIN_HINT = (
    "If it is lost for good, `rollout-service store new-folder` says what was in it and begins again."
)


def folder_failed(folder: Path, error: OSError) -> StoreError:
    """Return the store's error for a failure of the file system."""
    why = error.strerror or type(error).__name__
    return StoreError(
        f"the shared folder {folder} cannot be used: {why}", hint=_HINTS.get(error.errno or 0, _OTHERWISE)
    )


def folder_lost(folder: Path, why: str) -> StoreError:
    """Return the store's error for a folder that is not the store's any more."""
    return StoreError(
        f"the shared folder {folder} {why}",
        hint=f"Mount it or move it back; no restart is needed. {BEGIN_AGAIN_HINT}",
    )


def folder_hangs(folder: Path, seconds: float) -> StoreError:
    """Return the store's error for a folder that does not answer."""
    return StoreError(
        f"the shared folder {folder} has not answered for {seconds:g} s",
        hint="Look at its file server and at the network; no restart is needed.",
    )


def record_lost(subject: str, why: str) -> RecordLostError:
    """Return the error for a record that cannot be read; `subject` names its owner."""
    return RecordLostError(f"a record of {subject} is lost: {why}", hint=LOST_HINT)
