"""Files that hold tasks, trajectories and addresses, which other users of the machine have no business with.

Guarantee: a file is its owner's alone from the moment it exists, whatever the umask and the folder allow; one that an
earlier release left open to others is closed to them.
"""

from __future__ import annotations

import os
from pathlib import Path

from rollout_service.errors import ConfigurationError

OWNER_ONLY = 0o600
OTHERS = 0o077


def open_state_folder(folder: Path) -> Path:
    """Make the folder of a service's state, for its owner alone; one that is there stays as it is.

    Raises ConfigurationError when nothing can be written there.
    """
    hint = "Choose another with --state-dir or ROLLOUT_STATE_DIR, or let the service's user write there."
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigurationError(
            f"the state folder {folder} cannot be made: {error.strerror}", hint=hint
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"the state folder {folder} cannot be written", hint=hint)
    return folder


def make_private(path: Path) -> None:
    """Create a file for its owner alone, or close one that is there to others; raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY)
    try:
        found = os.fstat(descriptor)
        if found.st_mode & OTHERS and found.st_uid == os.geteuid():
            os.fchmod(descriptor, OWNER_ONLY)
    finally:
        os.close(descriptor)


def write_private(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, for its owner alone; raises OSError."""
    draft = path.with_suffix(".draft")
    make_private(draft)
    draft.write_bytes(data)
    draft.replace(path)
