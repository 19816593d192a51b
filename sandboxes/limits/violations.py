"""Report which limits of a sandbox were reached: each violation once per caller, as a typed error.

Counts only grow, and every session compares them with those it has seen, so each learns of a limit once. The check
costs a call a few microseconds. The sources are:

- the kernel's counter of processes killed for lack of memory;
- the group's number of processes, compared with its limit;
- the free space of the sandbox's file system;
- the watchdog's findings, if there is no control group.
"""

import os
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sandboxes.errors import LimitExceededError
from sandboxes.limits.cgroups import ControlGroup, ControlGroupFile, ResourceLimits

WHOLE = ("memory", "processes", "disk", "watches")
"""Limits that all code in a sandbox shares; others are those of a call, or of the sandbox's time."""
UNITS = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))


class LimitMonitor:
    """Counts how often each limit of one sandbox was reached. Any thread may ask, even after `close`."""

    def __init__(
        self,
        limits: ResourceLimits,
        group: ControlGroup | None,
        launcher: int | None,
        space: Path | None,
        tally: Counter[str],
    ) -> None:
        """`tally` has the counts of all sandboxes of the provider.

        `space` is the folder with the sandbox's files, as the launcher sees it; it may have mounts of its own.
        """
        self.tally = tally
        self.limits = limits
        self.group = group
        self.launcher = launcher
        self.closed = False
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._at: dict[str, bool] = {}
        """Whether a limit was reached at the last look."""
        self._kills = 0
        self._oom_kills = group.file("memory", "memory.oom_control", "memory.events") if group else None
        self._peak = group.file("pids", "pids.peak") if group else None
        self._tasks = group.file("pids", "pids.current") if group else None
        self._space = _open_space(launcher, space)
        self.launcher_tasks = _settle(group, limits) if group else 0
        """Processes and threads. They share the limit of the inside, so it is raised by as many."""
        if self.launcher_tasks == 0 and launcher is not None:
            self.launcher_tasks = _count_threads(launcher)

    def read_counts(self) -> Mapping[str, int]:
        with self._lock:
            if not self.closed:
                self._refresh()
            return dict(self._counts)

    def is_reached(self, limit: str) -> bool:
        return self._at.get(limit, False)

    def record(self, limit: str) -> None:
        """Count a violation that was found elsewhere."""
        with self._lock:
            self._add(limit)

    def _add(self, limit: str, times: int = 1) -> None:
        self._counts[limit] += times
        self.tally[limit] += times

    def make_errors(self) -> tuple[LimitExceededError, ...]:
        counts = self.read_counts()
        return tuple(self.make_error(limit) for limit in WHOLE if counts.get(limit))

    def make_error(self, limit: str) -> LimitExceededError:
        memory, disk = _format_size(self.limits.memory_bytes), _format_size(self.limits.disk_bytes)
        texts = {
            "memory": f"the sandbox ran out of memory{memory}, and a process in it was killed",
            "processes": f"the sandbox reached its limit of {self.limits.max_processes} processes",
            "disk": f"the sandbox's disk{disk} was full",
            "watches": "the sandbox used up its share of epoll watches, and every process in it was killed",
        }
        return LimitExceededError(texts.get(limit, f"the sandbox reached its limit: {limit}"), limit=limit)

    def close(self) -> None:
        """Close the files; while they are open, the sandbox's file system cannot end. Idempotent."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            for file in (self._oom_kills, self._peak, self._tasks):
                if file is not None:
                    file.close()
            if self._space is not None:
                os.close(self._space)

    def _refresh(self) -> None:
        if self._oom_kills is not None:
            before, self._kills = self._kills, self._oom_kills.number("oom_kill")
            if self._kills > before:
                self._add("memory", self._kills - before)
        self._update("processes", self._is_crowded())
        self._update("disk", self._is_full())

    def _update(self, limit: str, is_reached: bool) -> None:
        if is_reached and not self._at.get(limit, False):
            self._add(limit)
        self._at[limit] = is_reached

    def _is_crowded(self) -> bool:
        """Return whether the limit of processes is reached.

        The kernel remembers the first time; later ones count only if a look coincides with them.
        """
        if self.limits.max_processes is None:
            return False
        file: ControlGroupFile | None = self._tasks if self._counts["processes"] else self._peak or self._tasks
        if file is None:
            return False
        return file.number() >= self.launcher_tasks + self.limits.max_processes

    def _is_full(self) -> bool:
        if self._space is None:
            return False
        with suppress(OSError):  # what serves the file system has just ended
            found = os.fstatvfs(self._space)
            return found.f_bavail == 0 or found.f_favail == 0
        return False


class LimitViolations:
    def __init__(self, monitor: LimitMonitor) -> None:
        self._monitor = monitor
        self._seen = monitor.read_counts()

    def drain(self) -> tuple[LimitExceededError, ...]:
        """Return what was reached since the last call, each limit once."""
        counts, before = self._monitor.read_counts(), self._seen
        if counts == before:
            return ()
        self._seen = counts
        return tuple(self._monitor.make_error(limit) for limit in counts if counts[limit] > before.get(limit, 0))

    def drain_with_call(self, timeout: float | None, output_limit: int | None) -> tuple[LimitExceededError, ...]:
        """Add the call's own limits, where they were reached, to the errors of `drain`."""
        found = self.drain()
        if timeout is not None:
            self._monitor.tally["time"] += 1
            found += (LimitExceededError(f"the call timed out after {timeout:g} s", limit="time"),)
        if output_limit is not None:
            self._monitor.tally["output"] += 1
            text = f"the output exceeded its limit of {output_limit} bytes and was cut in the middle"
            found += (LimitExceededError(text, limit="output"),)
        return found


def _open_space(launcher: int | None, space: Path | None) -> int | None:
    """Open the sandbox's file system, if it has its own: its free space shows when it is full."""
    if launcher is None or space is None:
        return None
    with suppress(OSError):
        fd = os.open(f"/proc/{launcher}/root{space}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if os.fstat(fd).st_dev != space.stat().st_dev:
            return fd
        os.close(fd)
    return None


def _settle(group: ControlGroup, limits: ResourceLimits) -> int:
    with suppress(OSError):  # the sandbox has ended already
        return group.settle(limits.max_processes)
    return 0


def _count_threads(pid: int) -> int:
    with suppress(OSError):
        return sum(1 for _ in os.scandir(f"/proc/{pid}/task"))
    return 0


def _format_size(count: int | None) -> str:
    if count is None:
        return ""
    for unit, size in UNITS:
        if count >= size:
            return f" ({count / size:.4g} {unit})"
    return f" ({count} bytes)"
