"""Bound the epoll watches of sandboxes that share a user of the host, since the kernel counts them together.

If they run out, every program that needs one more fails, including the service's event loop. Counting watches one by
one takes as long as making them. Instead, a process is taken to have as many as it can: its epoll instances times its
descriptors. Nothing legitimate comes near a sandbox's share by this measure.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MOST = Path("/proc/sys/fs/epoll/max_user_watches")
EPOLL = "anon_inode:[eventpoll]"
FEW = 128
"""The largest descriptor table to ignore: even hundreds of such processes have too few watches to matter."""


def watches_per_sandbox(sandboxes: int) -> int | None:
    """Return each sandbox's share of half of a user's watches; None if the kernel does not report the limit."""
    with suppress(OSError, ValueError):
        return int(MOST.read_text()) // 2 // max(1, sandboxes)
    return None


def exceeds(pids: Iterable[int], limit: int) -> bool:
    """Return whether the processes together may have more watches than `limit`."""
    tables = [(pid, _count_descriptors(pid)) for pid in pids]
    if sum((size // 2) ** 2 for _, size in tables) <= limit:
        return False  # not even if half of the descriptors were epoll instances
    found = 0
    for pid, size in tables:
        found += _max_watches(pid, size)
        if found > limit:
            return True
    return False


def _count_descriptors(pid: int) -> int:
    """Return how many descriptors a process has, or the size of its table if they are not visible; 0 for few."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return 0
    found = re.search(r"^FDSize:\s+(\d+)$", status, re.MULTILINE)
    size = int(found[1]) if found else 0
    if size <= FEW:
        return 0
    try:
        return sum(1 for _ in os.scandir(f"/proc/{pid}/fd"))
    except PermissionError:
        return size
    except OSError:
        return 0


def _max_watches(pid: int, size: int) -> int:
    """Return the product of a process's epoll instances and descriptors."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return size * sum(_is_epoll(pid, entry.name) for entry in entries)
    except PermissionError:
        return (size // 2) ** 2
    except OSError:
        return 0


def _is_epoll(pid: int, name: str) -> bool:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{name}") == EPOLL  # noqa: PTH115  thousands of them
    return False
