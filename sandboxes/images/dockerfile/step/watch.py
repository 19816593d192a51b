"""Waits for the end of a step, and ends it when it has written more than it may."""

import os
import select
import signal
import time

WATCH_SECONDS = 0.5
WATCH_SHARE = 20
"""Looking at a step's writes takes at most this fraction of the time."""


class FullError(Exception):
    """A step that wrote more than it may."""


def watch(child: int, folder: str, max_bytes: int) -> int:
    """Wait for a child that writes into `folder`; return its exit code.

    Raises:
        FullError: The folder takes more than `max_bytes` (0 is no limit); the child has ended.
    """
    handle, pause = os.pidfd_open(child), WATCH_SECONDS
    while not select.select([handle], [], [], pause if max_bytes else None)[0]:
        begun = time.monotonic()
        if disk_use(folder) > max_bytes:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.waitpid(child, 0)
            raise FullError
        pause = max(WATCH_SECONDS, WATCH_SHARE * (time.monotonic() - begun))
    _, status = os.waitpid(child, 0)
    if max_bytes and disk_use(folder) > max_bytes:
        raise FullError
    return os.waitstatus_to_exitcode(status)


def disk_use(folder: str) -> int:
    total = os.lstat(folder).st_blocks * 512
    for path, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            try:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
            except OSError:
                continue  # it has just been removed
    return total
