"""Whom sandboxes run as on this host."""

import os
import pwd
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sandboxes.errors import SandboxConfigError

ID_FILES = (Path("/etc/subuid"), Path("/etc/subgid"))
FIRST_ID, ID_COUNT = 100_000, 65_536
"""Where distributions begin to give subordinate ids, and how many they give."""


def resolve_user(name: str) -> tuple[int, int]:
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


def has_subordinate_ids(user: int, files: tuple[Path, ...] = ID_FILES) -> bool:
    """Whether the user may map ids of its own range, of subuid(5), into a user namespace."""
    owners = {str(user)}
    with suppress(KeyError):  # a user id without a name: containers have them
        owners.add(pwd.getpwuid(user).pw_name)
    return all(_names(file, owners) for file in files)


def subordinate_ids_command(user: int | None = None, files: tuple[Path, ...] = ID_FILES) -> str:
    """Return the command that gives a user, by default this one, subordinate ids that nobody else has.

    Two users with the same range could own each other's files, so it begins after all that are given.
    """
    number = os.geteuid() if user is None else user
    name = str(number)
    with suppress(KeyError):
        name = pwd.getpwuid(number).pw_name
    given = max((end for file in files for end in _ends(file)), default=FIRST_ID)
    first = -(-max(given, FIRST_ID) // ID_COUNT) * ID_COUNT
    ids = f"{first}-{first + ID_COUNT - 1}"
    return f"sudo usermod --add-subuids {ids} --add-subgids {ids} {name}"


def _ends(file: Path) -> Iterator[int]:
    """Yield the end of each range in the file."""
    for line in _lines(file):
        _, _, numbers = line.partition(":")
        first, _, count = numbers.partition(":")
        if first.isdigit() and count.isdigit():
            yield int(first) + int(count)


def _names(file: Path, owners: set[str]) -> bool:
    return any(line.partition(":")[0] in owners for line in _lines(file))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
