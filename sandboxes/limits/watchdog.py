"""Holds what control groups do not: one thread for all sandboxes of a provider, whatever the event loop does.

- A sandbox that does not rest yields the processor. Whoever used more than half of one at two looks in a row runs
  only when nothing else wants to (`cpu.idle`), until it rests again: among those that compute, the processor is
  shared evenly, and a short command of a neighbour, or the service, never waits for one of them. One look is not
  enough, since the start of a kernel would be taken for it.
- Where no control group holds the memory of a sandbox, the resident memory of its processes is added up; over the
  limit, pages that several share are counted once (PSS), and if it still is, everything inside is ended.
- Where sandboxes share a user of the host, everything inside of one that has more than its share of that user's epoll
  watches is ended.
- Where none counts processes, being at the limit, which rlimits hold, is noted.

Processes are found from the launcher down: code inside cannot leave that tree, since orphans go to the first
process of its namespace. What is not seen there: memory that no process has mapped, such as a file in memory; and
what is over between two looks. A look at 100 sandboxes takes some milliseconds; looks are as rare as it takes to
stay below a hundredth of one processor.
"""

import os
import signal
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from sandboxes.limits.cgroups import ControlGroup
from sandboxes.limits.violations import LimitMonitor
from sandboxes.limits.watches import exceeds, watches_per_sandbox

log = structlog.get_logger(__name__)

INTERVAL = 0.5
"""Seconds between two looks, at least."""
SHARE = 0.01
"""The share of one processor that looks may cost."""
HOG = 0.5
"""The share of one processor above which a sandbox yields."""
PATIENCE = 2
"""After so many looks in a row."""
PAGE = os.sysconf("SC_PAGE_SIZE")
STAT_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Process:
    """What /proc/PID/stat says."""

    pid: int
    parent: int
    threads: int
    start: int
    """Ticks since boot."""
    resident: int
    """Bytes, with what it shares."""


class Processes:
    """All processes of this host at one moment."""

    def __init__(self) -> None:
        self._all = {found.pid: found for entry in os.scandir("/proc") if (found := _read(entry.name))}
        self._children: dict[int, list[Process]] = defaultdict(list)
        for process in self._all.values():
            self._children[process.parent].append(process)

    def descendants(self, pid: int) -> list[Process]:
        """The descendants of a process."""
        found, at = list(self._children.get(pid, ())), 0
        while at < len(found):
            found += self._children.get(found[at].pid, ())
            at += 1
        return found

    def inside(self, launcher: int) -> list[Process]:
        """The processes in the sandbox of a launcher, the control shell first; none where that has ended."""
        first = next((process for process in self.descendants(launcher) if _is_first(process.pid)), None)
        return [] if first is None else [first, *self.descendants(first.pid)]


def _read(name: str) -> Process | None:
    if not name.isdigit():
        return None
    try:
        fd = os.open(f"/proc/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, STAT_SIZE)
        finally:
            os.close(fd)
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    if fields[0] in b"ZX":
        return None
    return Process(int(name), int(fields[1]), int(fields[17]), int(fields[19]), int(fields[21]) * PAGE)


def _is_first(pid: int) -> bool:
    """Whether a process is number 1 of a namespace below ours."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return line.split()[2:] == ["1"]
    return False


def _proportional_size(process: Process) -> int:
    """Its memory in bytes, with its share of what it shares; all of that where the kernel does not tell."""
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return process.resident


def _kill(process: Process) -> None:
    """SIGKILL it, if its number is still its own."""
    with suppress(OSError):
        fd = os.pidfd_open(process.pid)
        try:
            now = _read(str(process.pid))
            if now is not None and now.start == process.start:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)


def _slack(limit: int) -> int:
    """A sample of a sandbox that is at its limit of processes finds a few between the end of one and the next."""
    return min(4 + limit // 32, limit // 8)


class ProcessorYield:
    """Lets one sandbox that does not rest yield the processor."""

    def __init__(self, group: ControlGroup) -> None:
        self._group = group
        self._file = group.file("cpuacct", "cpuacct.usage")
        self._key, self._unit = (None, 1e-9)
        if self._file is None:
            self._file = group.file("cpu", "cpu.stat")
            self._key, self._unit = ("usage_usec", 1e-6)
        self._last: tuple[float, float] | None = None
        self._restless = 0
        self._yields = False

    def check(self, now: float) -> None:
        """`now` is of the monotonic clock."""
        if self._file is None:
            return
        used = self._file.number(self._key) * self._unit
        last, self._last = self._last, (now, used)
        if last is None or now <= last[0]:
            return
        self._restless = self._restless + 1 if (used - last[1]) / (now - last[0]) > HOG else 0
        hog = self._restless >= PATIENCE
        if hog != self._yields:
            with suppress(OSError):  # a kernel before 5.15, or the sandbox has just ended
                self._group.yield_processor(hog)
            self._yields = hog

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class WatchedSandbox:
    """One sandbox under watch."""

    def __init__(self, monitor: LimitMonitor, *, shares_user: bool = False) -> None:
        self.monitor = monitor
        self._shares_user = shares_user
        folders = monitor.group.folders if monitor.group else {}
        self._yielding = ProcessorYield(monitor.group) if monitor.group and "cpu" in folders else None
        self._memory = None if "memory" in folders else monitor.limits.memory_bytes
        self._processes = None if "pids" in folders else monitor.limits.max_processes
        self._crowded = False

    @property
    def needs_scan(self) -> bool:
        """Whether its processes must be looked at, since no group holds their limits."""
        limits = (self._memory or self._processes) is not None
        return self.monitor.launcher is not None and (limits or self._shares_user)

    def check(self, now: float) -> None:
        """Look at the groups' counters."""
        self.monitor.read_counts()  # what is over at the end of a call is noticed now
        if self._yielding is not None:
            self._yielding.check(now)

    def check_processes(self, processes: Processes, watches: int | None) -> None:
        """Look at the processes; `watches` is how many one sandbox may have."""
        inside = processes.inside(self.monitor.launcher or 0)
        if self._processes is not None:
            crowded = sum(process.threads for process in inside) >= self._processes - _slack(self._processes)
            if crowded and not self._crowded:
                self.monitor.record("processes")
            self._crowded = crowded
        if self._memory is not None and self._exceeds(inside, self._memory):
            self._kill_all(inside, "memory")
        elif self._has_too_many_watches(inside, watches):
            self._kill_all(inside, "watches")

    def _has_too_many_watches(self, inside: list[Process], limit: int | None) -> bool:
        if limit is None or not self._shares_user:
            return False
        return exceeds((process.pid for process in inside[1:]), limit)

    def _kill_all(self, inside: list[Process], limit: str) -> None:
        self.monitor.record(limit)
        for process in inside[1:]:
            _kill(process)

    @staticmethod
    def _exceeds(inside: list[Process], limit: int) -> bool:
        if sum(process.resident for process in inside) <= limit:
            return False
        return sum(_proportional_size(process) for process in inside) > limit

    def close(self) -> None:
        """Let go of files."""
        if self._yielding is not None:
            self._yielding.close()


class Watchdog:
    """The thread; it runs while there is a sandbox to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wards: list[WatchedSandbox] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.cost = 0.0
        """Processor seconds that the last look took."""

    def add(self, monitor: LimitMonitor, *, shares_user: bool = False) -> None:
        """Watch a sandbox until its monitor is closed."""
        with self._lock:
            self._wards.append(WatchedSandbox(monitor, shares_user=shares_user))
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="sandbox-watchdog", daemon=True)
                self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None

    def close(self) -> None:
        """Watch no more. Idempotent; the thread ends by itself, at once."""
        self._stop.set()

    def _run(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stop.wait(max(INTERVAL, self.cost / SHARE))
            with self._lock:
                for ward in [ward for ward in self._wards if stopped or ward.monitor.closed]:
                    self._wards.remove(ward)
                    ward.close()
                if not self._wards:
                    self._thread = None
                    return
                wards = list(self._wards)
            try:
                self._check(wards)
            except Exception:
                # Nobody sees a thread end, and limits that it holds would hold no longer.
                log.exception("the limits of sandboxes could not be looked at; trying again")

    def _check(self, wards: list[WatchedSandbox]) -> None:
        begun = time.thread_time()
        now = time.monotonic()
        for ward in wards:
            ward.check(now)
        if needs_scan := [ward for ward in wards if ward.needs_scan]:
            processes = Processes()
            watches = watches_per_sandbox(len(wards))
            for ward in needs_scan:
                ward.check_processes(processes, watches)
        self.cost = time.thread_time() - begun
