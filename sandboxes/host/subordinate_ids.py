"""Subordinate ids: the ranges of subuid(5) that users may map into user namespaces."""

import os
import pwd
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sandboxes.errors import SandboxConfigError

SUBUID, SUBGID = Path("/etc/subuid"), Path("/etc/subgid")
ID_FILES = (SUBUID, SUBGID)
FIRST_ID, ID_COUNT = 100_000, 65_536
"""The first subordinate id that distributions give out, and how many a user gets."""


class SubordinateIds(NamedTuple):
    owner: str
    """A user's name or number."""

    ids: range

    def __str__(self) -> str:
        return f"{self.owner}:{self.ids.start}:{len(self.ids)}"


def read_subordinate_ids(file: Path) -> list[SubordinateIds]:
    """Leave out lines that are not a range; return none if the file cannot be read."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        owner, _, numbers = line.strip().partition(":")
        first, _, count = numbers.partition(":")
        if owner and owner[0] != "#" and first.isdecimal() and count.isdecimal():
            found.append(SubordinateIds(owner, range(int(first), int(first) + int(count))))
    return found


def subordinate_ids_of(user: int, file: Path) -> list[SubordinateIds]:
    """Return the ranges of one user, whether the file has the user's name or number."""
    owners = {str(user)}
    with suppress(KeyError):  # a user id without a name: containers have them
        owners.add(pwd.getpwuid(user).pw_name)
    return [found for found in read_subordinate_ids(file) if found.owner in owners]


def has_subordinate_ids(user: int, files: tuple[Path, ...] = ID_FILES) -> bool:
    return all(subordinate_ids_of(user, file) for file in files)


def subordinate_ids_command(user: int | None = None, files: tuple[Path, ...] = ID_FILES) -> str:
    """Return the command that gives a user, by default this one, subordinate ids that nobody else has.

    Two users with the same range could own each other's files, so it begins after all that are given.
    """
    number = os.geteuid() if user is None else user
    name = str(number)
    with suppress(KeyError):
        name = pwd.getpwuid(number).pw_name
    given = [found.ids.stop for file in files for found in read_subordinate_ids(file)]
    first = -(-max([FIRST_ID, *given]) // ID_COUNT) * ID_COUNT
    ids = f"{first}-{first + ID_COUNT - 1}"
    return f"sudo usermod --add-subuids {ids} --add-subgids {ids} {name}"


def resolve_user(name: str) -> tuple[int, int]:
    """Return the user and group of sandboxes: this service's own or, if that is root, those of the named user.

    Raises:
        SandboxConfigError: There is no such user, or it is root.
    """
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    try:
        entry = pwd.getpwnam(name)
    except KeyError as error:
        raise SandboxConfigError(
            f"there is no user {name!r}", hint="create the user, or set sandbox.user to another"
        ) from error
    if entry.pw_uid == 0:
        raise SandboxConfigError("sandboxes never run as root", hint="set sandbox.user to another user")
    return entry.pw_uid, entry.pw_gid
