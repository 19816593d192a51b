"""The user that sandboxes run as on this host."""

import os
import pwd

from sandboxes.errors import SandboxConfigError


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
