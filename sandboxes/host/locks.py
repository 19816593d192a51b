"""Locks on files and folders, which the kernel releases when their holder ends and for no other reason.

Only the standard library is used here, because the guard starts without anything else.
"""

import fcntl
import os
from pathlib import Path


def try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_still_at(handle: int, path: Path) -> bool:
    """Return whether an open file or folder is the one at `path`: another process may have removed it."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except OSError:
        return False
