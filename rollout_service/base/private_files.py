"""Files that other users cannot read, since they hold tasks, trajectories and addresses; which of them a backup has.

Only the owner can read a file from the moment it exists, whatever the umask and the folder allow. A file that was
opened to others since is closed to them.
"""

from __future__ import annotations

import os
from pathlib import Path

from rollout_service.base.errors import ConfigurationError

OWNER_ONLY = 0o600
OTHERS = 0o077


def open_state_folder(folder: Path) -> Path:
    """Create the state folder for its owner alone; leave an existing folder as it is.

    Raises:
        ConfigurationError: The folder cannot be created or written, or has a part of a backup.
    """
    check_whole(folder)
    hint = "Choose another folder with --state-dir or ROLLOUT_STATE_DIR, or give the service's user write access."
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigurationError(f"the state folder {folder} cannot be created: {error.strerror}", hint=hint) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"the state folder {folder} is not writable", hint=hint)
    return folder


def check_whole(folder: Path) -> None:
    """
    Raises:
        ConfigurationError: A backup is being restored to the folder, or that was cut off.
    """
    if (folder / RESTORING).exists():
        raise ConfigurationError(
            f"the state folder {folder} has a restore that has not ended",
            hint="Wait for it. If it was cut off, delete this folder, and what it restored to a shared store, and "
            "restore the backup again.",
        )


def make_private(path: Path) -> None:
    """Create a file that only its owner can read, or close an existing one to others.

    Raises:
        OSError: The file cannot be opened or changed.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY)
    try:
        found = os.fstat(descriptor)
        if found.st_mode & OTHERS and found.st_uid == os.geteuid():
            os.fchmod(descriptor, OWNER_ONLY)
    finally:
        os.close(descriptor)


def write_private(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file atomically, readable by its owner alone; unless it is `durable`, a power failure may empty it.

    Raises:
        OSError: The file cannot be written.
    """
    draft = path.with_suffix(".draft")
    make_private(draft)
    with draft.open("wb") as file:
        file.write(data)
        if durable:  # the name may be on the disk before the data is
            file.flush()
            os.fsync(file.fileno())
    draft.replace(path)


# The files in a state folder that a backup has; all others matter only to the process that wrote them, or on that
# machine.

STORE = "rollouts.sqlite3"
"""Rollouts, runs and events of a service that shares them with nobody."""
LIVE_STORE = "live.sqlite3"
USERS_SALT = "live-users.salt"
"""The salt of users' hashes: without it, their sessions cannot be found any more."""
CANARIES = "live-canaries.json"
"""The pools that try candidates in live sessions."""
BACKENDS = "backends.json"

DATABASES = (STORE, LIVE_STORE)
"""Copied by SQLite, since a plain copy of one that is written is torn."""
DOCUMENTS = (USERS_SALT, CANARIES, BACKENDS)
"""Replaced as a whole, and so whole at any time."""
RESTORING = "restore.unfinished"
"""Is there from before anything of a backup is restored until all of it is."""
