"""Whom sandboxes run as on this host."""

import os
import pwd
from contextlib import suppress
from pathlib import Path

from sandboxes.errors import SandboxConfigError


def ids_of(name: str) -> tuple[int, int]:
    """User and group: this service's own, or, where that is root, those of the user with the name.

    Raises:
        SandboxConfigError: there is no such user, or it is root.
    """
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    try:
        entry = pwd.getpwnam(name)
    except KeyError as error:
        raise SandboxConfigError(f"there is no user {name!r}", hint="make it, or set sandbox.user") from error
    if entry.pw_uid == 0:
        raise SandboxConfigError("sandboxes never run as root", hint="set sandbox.user to another user")
    return entry.pw_uid, entry.pw_gid


def has_subordinate_ids(
    user: int, files: tuple[Path, ...] = (Path("/etc/subuid"), Path("/etc/subgid"))
) -> bool:
    """Whether the user may map ids of its own range, of subuid(5), into a user namespace."""
    owners = {str(user)}
    with suppress(KeyError):  # a user id without a name: containers have them
        owners.add(pwd.getpwuid(user).pw_name)
    return all(_names(file, owners) for file in files)


def _names(file: Path, owners: set[str]) -> bool:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.partition(":")[0] in owners for line in lines)
