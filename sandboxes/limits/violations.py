"""Which limits of a sandbox were reached: counted where they are held, told to each caller once, as a typed error.

Counts only grow, and every session compares them with what it has seen. So a limit that one session ran into is
told to the others too, once each, and asking costs a call some microseconds. What is counted: the kernel's own
counter of processes that it ended for want of memory; that the group was at its limit of processes; that the
sandbox's file system had nothing left; and what the watchdog notes where there is no control group.
"""

import os
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sandboxes.errors import LimitExceededError
from sandboxes.limits.cgroups import ControlGroup, ControlGroupFile, ResourceLimits

UNITS = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))


class LimitMonitor:
    """The limits of one sandbox, and how often each was reached. Any thread may ask, also after `close`."""

    def __init__(
        self,
        limits: ResourceLimits,
        group: ControlGroup | None,
        launcher: int | None,
        space: Path | None,
        tally: Counter[str],
    ) -> None:
        """`space` is where the launcher, which may have mounts of its own, has what the sandbox writes.

        `tally` counts for all sandboxes of the provider.
        """
        self.tally = tally
        self.limits = limits
        self.group = group
        self.launcher = launcher
        self.closed = False
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._at: dict[str, bool] = {}
        """Whether a limit was at its end when it was last looked at."""
        self._kills = 0
        self._oom_kills = group.file("memory", "memory.oom_control", "memory.events") if group else None
        self._peak = group.file("pids", "pids.peak") if group else None
        self._tasks = group.file("pids", "pids.current") if group else None
        self._space = _open_space(launcher, space)
        self.launcher_tasks = _settle(group, limits) if group else 0
        """Processes and threads of the launcher, which share the limit of what is inside: so it is made wider."""
        if self.launcher_tasks == 0 and launcher is not None:
            self.launcher_tasks = _count_threads(launcher)

    def read_counts(self) -> Mapping[str, int]:
        """How often each limit has been reached so far."""
        with self._lock:
            if not self.closed:
                self._refresh()
            return dict(self._counts)

    def is_reached(self, limit: str) -> bool:
        """Whether a limit was at its end when it was last looked at."""
        return self._at.get(limit, False)

    def record(self, limit: str) -> None:
        """Count what somebody else has found."""
        with self._lock:
            self._add(limit)

    def _add(self, limit: str, times: int = 1) -> None:
        self._counts[limit] += times
        self.tally[limit] += times

    def make_error(self, limit: str) -> LimitExceededError:
        """What to tell of a limit that was reached."""
        match limit:
            case "memory":
                size = _format_size(self.limits.memory_bytes)
                return LimitExceededError(
                    f"the sandbox used up its memory{size} and a process in it was ended", limit=limit
                )
            case "processes":
                return LimitExceededError(
                    f"the sandbox's limit of processes ({self.limits.max_processes}) was reached", limit=limit
                )
            case "disk":
                size = _format_size(self.limits.disk_bytes)
                return LimitExceededError(f"the sandbox's disk{size} was full", limit=limit)
            case "watches":
                return LimitExceededError(
                    "the sandbox used up its share of epoll watches and everything in it was ended",
                    limit=limit,
                )
            case _:
                return LimitExceededError(f"the sandbox's limit of {limit} was reached", limit=limit)

    def close(self) -> None:
        """Let go of the files that are asked, without which the sandbox's file system would not end. Idempotent."""
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

    def _update(self, limit: str, at_its_end: bool) -> None:
        if at_its_end and not self._at.get(limit, False):
            self._add(limit)
        self._at[limit] = at_its_end

    def _is_crowded(self) -> bool:
        """Whether the limit of processes is reached; the kernel remembers the first time, later ones are seen."""
        if self.limits.max_processes is None:
            return False
        file: ControlGroupFile | None = (
            self._tasks if self._counts["processes"] else self._peak or self._tasks
        )
        if file is None:
            return False
        return file.number() >= self.launcher_tasks + self.limits.max_processes

    def _is_full(self) -> bool:
        if self._space is None:
            return False
        found = os.fstatvfs(self._space)
        return found.f_bavail == 0 or found.f_favail == 0


class LimitViolations:
    """What one session, or one program, has been told of the limits of its sandbox."""

    def __init__(self, monitor: LimitMonitor) -> None:
        self._monitor = monitor
        self._seen = monitor.read_counts()

    def drain(self) -> tuple[LimitExceededError, ...]:
        """The limits that were reached since this was last asked, each once."""
        counts, before = self._monitor.read_counts(), self._seen
        if counts == before:
            return ()
        self._seen = counts
        return tuple(
            self._monitor.make_error(limit) for limit in counts if counts[limit] > before.get(limit, 0)
        )

    def drain_with_call(
        self, timeout: float | None, output_limit: int | None
    ) -> tuple[LimitExceededError, ...]:
        """The same, with the call's own limits where they were reached: the time-out, and the cut output's length."""
        found = self.drain()
        if timeout is not None:
            self._monitor.tally["time"] += 1
            found += (LimitExceededError(f"the time-out of {timeout:g} s was reached", limit="time"),)
        if output_limit is not None:
            self._monitor.tally["output"] += 1
            text = f"the output was longer than its limit of {output_limit} bytes and was cut in the middle"
            found += (LimitExceededError(text, limit="output"),)
        return found


def _open_space(launcher: int | None, space: Path | None) -> int | None:
    """The file system of what the sandbox writes, if it has one of its own: then what is free in it tells."""
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
    """A number of bytes for people, in parentheses."""
    if count is None:
        return ""
    for unit, size in UNITS:
        if count >= size:
            return f" ({count / size:.4g} {unit})"
    return f" ({count} bytes)"
