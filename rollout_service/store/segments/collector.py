"""Deletes the segment files that nothing refers to any more.

Guarantees: no file is deleted that is referenced, or that may yet be. The ledger names the files to delete, so nothing
is scanned; only a rare sweep lists the folder, for files that the ledger does not know, such as after its store was
restored from an older backup. Call this from one service at a time; a second one does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar
from uuid import uuid4

import anyio
import anyio.to_thread

from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.segments.ledger import DRAFT_SUFFIX, FILE_NAME, SegmentLedger
from rollout_service.store.segments.proof import folder_failed

T = TypeVar("T")

FILES_AT_ONCE = 64
UNKNOWN_SECONDS = 86_400.0
"""The age from which a file that the ledger does not know is deleted."""


async def collect(files: SharedFiles, ledger: SegmentLedger) -> int:
    """Seal the files of services that have left or died, and delete garbage; return the bytes that this freed.

    A service that was only taken for dead writes to another file when it goes on.

    Raises:
        StoreError: The store or the folder fails.
    """
    if orphans := await ledger.orphans():
        await ledger.seal(orphans)
    freed = 0
    while garbage := await ledger.garbage(FILES_AT_ONCE):
        freed += await _delete(files, garbage)
        await ledger.forget(garbage)
    return freed


async def sweep(files: SharedFiles, ledger: SegmentLedger, *, age: float = UNKNOWN_SECONDS) -> int:
    """Delete files that the ledger does not know and that are older than `age` seconds; return the bytes freed.

    Raises:
        StoreError: The store or the folder fails.
    """
    old = await _in_thread(files, lambda: _older_than(files, age))
    freed = 0
    for start in range(0, len(old), FILES_AT_ONCE):
        unknown = await ledger.unknown(old[start : start + FILES_AT_ONCE])
        freed += await _delete(files, unknown)
    return freed


async def _delete(files: SharedFiles, names: Sequence[str]) -> int:
    return await _in_thread(files, lambda: sum(files.delete(name) for name in names))


async def _in_thread(files: SharedFiles, job: Callable[[], T]) -> T:
    try:
        return await anyio.to_thread.run_sync(job)  # a thread that was begun is waited for
    except OSError as error:
        raise folder_failed(files.folder, error) from error


def _older_than(files: SharedFiles, age: float) -> list[str]:
    """Return the segment files that are older than `age` seconds by the file server's own clock."""
    now = _server_time(files)
    old = set()
    for listed in files.names():
        name = listed.removesuffix(DRAFT_SUFFIX)
        with suppress(FileNotFoundError):
            if FILE_NAME.fullmatch(name) and now - files.changed_at(listed) >= age:
                old.add(name)
    return sorted(old)


def _server_time(files: SharedFiles) -> float:
    name = f"probe-{uuid4().hex}"
    try:
        files.close(files.create(name, b""))
        return files.changed_at(name)
    finally:
        files.delete(name)
