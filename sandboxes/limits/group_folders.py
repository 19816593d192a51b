"""The folders of control groups: who is in one, and its removal.

Only the standard library is used here, because the guard starts without anything else.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PAUSE = 0.02


def group_members(path: Path) -> set[int]:
    """Return the processes in a control group; none if it is gone."""
    try:
        return {int(line) for line in (path / "cgroup.procs").read_text().split()}
    except OSError:
        return set()


def remove_groups(paths: Iterable[Path], seconds: float) -> bool:
    """Remove control groups, waiting for the kernel to release their last processes; return whether all are gone.

    It blocks for `seconds` at most.
    """
    deadline = time.monotonic() + seconds
    left = list(paths)
    while True:
        for path in left:
            with suppress(OSError):
                path.rmdir()
        left = [path for path in left if path.exists()]
        if not left or time.monotonic() >= deadline:
            return not left
        time.sleep(PAUSE)
