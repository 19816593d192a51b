"""The proof that a folder is shared by all services of one store, and by no other store.

A service that cannot write, flush and name files in the folder does not start, nor does one that sees another folder
than the services before it. Whoever relies on the folder later can check that it is still the one that was proved.
Nothing depends on the clocks of the hosts.

The file MARK_FILE contains the id of the store and a random mark; the store keeps both. The first service writes the
file, and only then the store remembers its mark. So a service that sees no file although the store has a mark looks at
another folder, and so does one that sees another mark.
"""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass
from uuid import uuid4

import anyio
import anyio.to_thread

from rollout_service.base.errors import ConfigurationError, RecordLostError, StoreError
from rollout_service.store.segments.contract import SegmentFiles
from rollout_service.store.segments.ledger import SegmentLedger

MARK_FILE = "store.json"
_MARK_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class FolderMark:
    store: str
    mark: str | None
    """None while no service of the store has marked a folder."""


class FolderProof:
    """The mark that was proved, to be looked for again before anything in the folder is relied on.

    `check` and `check_usable` may block: call them in threads.
    """

    def __init__(self, files: SegmentFiles, mark: FolderMark) -> None:
        self.files = files
        self.mark = mark

    def check(self) -> None:
        """
        Raises:
            StoreError: The folder is gone or another one, or it cannot be read.
        """
        try:
            found = _read(self.files)
        except ConfigurationError as error:
            raise folder_lost(self.files, "has a damaged mark") from error
        except OSError as error:
            raise self.files.failed(error) from error
        if found is None:
            raise folder_lost(self.files, "has no mark: it was deleted, moved or emptied, or is not mounted")
        if found.store != self.mark.store:
            raise folder_lost(self.files, "belongs to another store than the one in Redis")
        if found != self.mark:
            raise folder_lost(self.files, "is not the one that the other services of this store use")

    def check_usable(self) -> None:
        """
        Raises:
            StoreError: The folder is gone or another one, or it cannot be written.
        """
        self.check()
        try:
            _probe(self.files)
        except OSError as error:
            raise self.files.failed(error) from error


async def prove_shared(files: SegmentFiles, ledger: SegmentLedger) -> FolderProof:
    """Check a folder at the start of a service; the first service of a store creates and marks it.

    Raises:
        ConfigurationError: The folder is not writable, is not shared, or belongs to another store.
        StoreError: The store fails.
    """
    store, known = await ledger.mark(None)
    with anyio.CancelScope(shield=True):
        mark = await _prove(files, ledger, store, may_create=known is None)
    return FolderProof(files, mark)


async def _prove(files: SegmentFiles, ledger: SegmentLedger, store: str, *, may_create: bool) -> FolderMark:
    found, is_new = await anyio.to_thread.run_sync(_look, files, store, may_create)
    if found is None:
        raise _not_shared(files, "has no mark, although other services have marked theirs")
    if found.store != store:
        raise ConfigurationError(
            f"{files.texts.subject} belongs to another store",
            hint=f"{files.texts.unused} If the other store is gone for good, delete {MARK_FILE} there.",
        )
    _, known = await ledger.mark(found.mark)
    if known != found.mark:
        if is_new:
            await anyio.to_thread.run_sync(files.delete, MARK_FILE)
        raise _not_shared(files, "is not the one that other services of this store see")
    return found


def _look(files: SegmentFiles, store: str, may_create: bool) -> tuple[FolderMark | None, bool]:
    """Return also whether the mark was written now."""
    try:
        if may_create:
            files.prepare()
        _probe(files)
        found = _read(files)
        if found is not None or not may_create:
            return found, False
        mark = json.dumps({"store": store, "mark": uuid4().hex}).encode()
        try:
            files.store_once(MARK_FILE, mark)
        except FileExistsError:
            return _read(files), False  # another service was faster
        return _read(files), True
    except OSError as error:
        failed = files.failed(error)
        raise ConfigurationError(str(failed), hint=failed.hint) from error


def _probe(files: SegmentFiles) -> None:
    """Create, flush, read and delete a file."""
    name, data = f"probe-{uuid4().hex}", b"probe"
    try:
        files.store(name, data)
        if files.read(name, 0, len(data)) != data:
            raise OSError(errno.EIO, "a new file does not contain what was written")
    finally:
        files.delete(name)


def _read(files: SegmentFiles) -> FolderMark | None:
    try:
        text = files.read(MARK_FILE, 0, _MARK_BYTES)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(text)
        return FolderMark(str(found["store"]), str(found["mark"]))
    except (ValueError, TypeError, KeyError):
        raise ConfigurationError(
            f"{MARK_FILE} in {files.texts.subject} is damaged",
            hint=f"Restore it from a backup. Or begin anew: {files.texts.unused}",
        ) from None


def _not_shared(files: SegmentFiles, why: str) -> ConfigurationError:
    return ConfigurationError(f"{files.texts.subject} {why}", hint=f"{files.texts.shared} {BEGIN_AGAIN_HINT}")


LOST_HINT = (
    "Restore the file from a backup, or let the task run again under another rollout_id. "
    "`rollout-service store check` names all that is lost."
)
BEGIN_AGAIN_HINT = "If it is lost for good, `rollout-service store new-folder` says what was in it and begins again."


def folder_lost(files: SegmentFiles, why: str) -> StoreError:
    return StoreError(f"{files.texts.subject} {why}", hint=f"{files.texts.bring_back} {BEGIN_AGAIN_HINT}")


def folder_hangs(files: SegmentFiles, seconds: float) -> StoreError:
    return StoreError(f"{files.texts.subject} has not answered for {seconds:g} s", hint=files.texts.slow)


def record_lost(subject: str, why: str) -> RecordLostError:
    """Return the error for a record that cannot be read; `subject` names its owner."""
    return RecordLostError(f"a record of {subject} is lost: {why}", hint=LOST_HINT)
