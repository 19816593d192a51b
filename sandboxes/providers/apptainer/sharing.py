"""Checks, for `doctor`, of the limits of sandboxes on this host, and of what they share. Nothing is changed."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sandboxes.config import ApptainerConfig, default_cache, parse_user_range
from sandboxes.host.facts import read_number
from sandboxes.host.subordinate_ids import resolve_user
from sandboxes.host.uid_leases import HostUsers
from sandboxes.providers.apptainer import seccomp
from sandboxes.providers.apptainer.launch.files import PTYS
from sandboxes.providers.apptainer.launcher import Launcher

COUNTED_BY_USER = {
    "epoll watches": "fs/epoll/max_user_watches",
    "inotify instances": "fs/inotify/max_user_instances",
    "keys": "kernel/keys/maxkeys",
    "pages of pipes": "fs/pipe-user-pages-soft",
}
PTYS_OF_HOST, PTYS_RESERVED = "kernel/pty/max", "kernel/pty/reserve"
FILTERS = "kernel/seccomp/actions_avail"


@dataclass(frozen=True, slots=True)
class Sharing:
    own_users: bool
    """Resources that the host counts by user are counted by sandbox."""

    filtered: bool
    own_terminals: int | None
    """Sandboxes that can use all their pseudo-terminals at once; None if those have no limit."""

    counts: Mapping[str, int]
    changes_images: bool
    """Code may remove and rename folders of the image."""


def read_sharing(config: ApptainerConfig, kernel: Path = Path("/proc/sys")) -> Sharing:
    """Look at this host. Call it in a thread: it may take 100 ms.

    Raises:
        SandboxConfigError: The configured user does not exist.
    """
    launcher = Launcher(*resolve_user(config.user), fakeroot=config.fakeroot)
    counts = {name: found for name, path in COUNTED_BY_USER.items() if (found := read_number(kernel / path))}
    terminals = (read_number(kernel / PTYS_OF_HOST) or 0) - (read_number(kernel / PTYS_RESERVED) or 0)
    return Sharing(
        own_users=_has_own_users(config, launcher),
        filtered=seccomp.build_program() is not None and (kernel / FILTERS).exists(),
        own_terminals=terminals // PTYS if launcher.mounts else None,
        counts=counts,
        changes_images=launcher.can_change_images(_unpacked(config), unpack=config.unpack),
    )


def _unpacked(config: ApptainerConfig) -> Path:
    return (config.unpacked_dir or default_cache() / "unpacked").expanduser().absolute()


def _has_own_users(config: ApptainerConfig, launcher: Launcher) -> bool:
    numbers = parse_user_range(config.user_range)
    if numbers is None or config.fakeroot or os.geteuid() != 0:
        return False
    folder = _unpacked(config)
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    users = HostUsers(numbers)
    try:
        return users.available and launcher.can_map(there, numbers.start)
    finally:
        users.close()
