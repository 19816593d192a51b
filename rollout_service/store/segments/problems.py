"""Failures of the shared folder as errors of the store, with what to do next."""

from __future__ import annotations

import errno
from pathlib import Path

from rollout_service.base.errors import RecordLostError, StoreError

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
    """Return the error for a record that cannot be read; `subject` names what it belongs to."""
    return RecordLostError(f"a record of {subject} is lost: {why}", hint=LOST_HINT)
