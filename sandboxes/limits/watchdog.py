"""Enforce the limits that control groups do not, in one thread per provider that does not depend on the event loop.

- A sandbox that used more than half of one processor at two looks in a row runs only when nothing else wants to
  (`cpu.idle`), until it rests again. Busy sandboxes then share the processor evenly, and neither the service nor a
  short command of a neighbor waits for them. One look is not enough: the start of a kernel would count.
- If no control group limits a sandbox's memory, the resident memory of its processes is added up. Above the limit,
  shared pages are counted once (PSS); if the sum is still too large, everything inside is killed.
- If sandboxes share a user of the host, everything inside one with more than its share of that user's epoll watches is
  killed.
- If no control group counts processes, reaching the limit, which rlimits enforce, is recorded.

Processes are found from the launcher down; orphans go to the first process of the namespace, so none leaves that tree.
Two things escape: memory that no process has mapped, such as a file in memory, and anything that is over between two
looks. A look at 100 sandboxes takes some milliseconds. Looks are spaced to take less than a hundredth of one processor.
"""

import os
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from sandboxes.limits.cgroups import ControlGroup
from sandboxes.limits.violations import LimitMonitor

log = structlog.get_logger(__name__)

INTERVAL = 0.5
SHARE = 0.01
HOG = 0.5
"""A sandbox that uses more than this share of one processor is busy."""
PATIENCE = 2
"""How many busy looks in a row make a sandbox yield."""
PAGE = os.sysconf("SC_PAGE_SIZE")
STAT_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    threads: int
    start: int
    """Ticks since boot."""
    resident: int
    """Bytes, including shared pages."""


class Processes:
    def __init__(self) -> None:
        self._all = {found.pid: found for entry in os.scandir("/proc") if (found := _read(entry.name))}
        self._children: dict[int, list[Process]] = defaultdict(list)
        for process in self._all.values():
            self._children[process.parent].append(process)

    def descendants(self, pid: int) -> list[Process]:
        found, at = list(self._children.get(pid, ())), 0
        while at < len(found):
            found += self._children.get(found[at].pid, ())
            at += 1
        return found

    def inside(self, launcher: int) -> list[Process]:
        """Return the control shell and all below it; none if that has ended."""
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
    """Return whether a process is number 1 of a namespace below ours."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return line.split()[2:] == ["1"]
    return False


def _proportional_size(process: Process) -> int:
    """Return its memory in bytes with its part of shared pages, or all of them if the kernel gives no PSS."""
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return process.resident


def _kill(process: Process) -> None:
    """Send SIGKILL to a process, unless its pid belongs to another one by now."""
    with suppress(OSError):
        fd = os.pidfd_open(process.pid)
        try:
            now = _read(str(process.pid))
            if now is not None and now.start == process.start:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)


def _slack(limit: int) -> int:
    """Return how far below its limit a sample may be: it misses processes between the end of one and the next."""
    return min(4 + limit // 32, limit // 8)


class ProcessorYield:
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
        """`now` is from the monotonic clock."""
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
        if self._file is not None:
            self._file.close()
            self._file = None


class WatchedSandbox:
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
        """Whether no group enforces the limits of its processes."""
        limits = (self._memory or self._processes) is not None
        return self.monitor.launcher is not None and (limits or self._shares_user)

    def check(self, now: float) -> None:
        self.monitor.read_counts()  # notices what is over before the end of a call
        if self._yielding is not None:
            self._yielding.check(now)

    def check_processes(self, processes: Processes, watches: int | None) -> None:
        """`watches` is how many epoll watches one sandbox may have."""
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
        if self._yielding is not None:
            self._yielding.close()


class Watchdog:
    """Its thread runs while there are sandboxes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wards: list[WatchedSandbox] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.cost = 0.0
        """Processor seconds of the last look."""

    def add(self, monitor: LimitMonitor, *, shares_user: bool = False) -> None:
        with self._lock:
            self._wards.append(WatchedSandbox(monitor, shares_user=shares_user))
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="sandbox-watchdog", daemon=True)
                self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def close(self) -> None:
        """Stop looking. Idempotent; the thread ends promptly by itself."""
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
            with _surviving():
                self._check(wards)

    def _check(self, wards: list[WatchedSandbox]) -> None:
        begun = time.thread_time()
        now = time.monotonic()
        for ward in wards:
            with _surviving():
                ward.check(now)
        if needs_scan := [ward for ward in wards if ward.needs_scan]:
            processes = Processes()
            watches = watches_per_sandbox(len(wards))
            for ward in needs_scan:
                with _surviving():
                    ward.check_processes(processes, watches)
        self.cost = time.thread_time() - begun


@contextmanager
def _surviving() -> Iterator[None]:
    """Log an error: it must not end the checks of other sandboxes, nor the thread, whose end nothing would report."""
    try:
        yield
    except Exception:
        log.exception("could not check the limits of sandboxes; trying again")


# The kernel counts the epoll watches of all sandboxes that share a user. If they run out, every program that needs one
# more fails, including the service's event loop. Counting watches one by one takes as long as making them. Instead, a
# process is taken to have as many as it can: its epoll instances times its descriptors. Nothing legitimate comes near a
# sandbox's share by this measure.

MOST = Path("/proc/sys/fs/epoll/max_user_watches")
EPOLL = "anon_inode:[eventpoll]"
FEW = 128
"""Smaller descriptor tables are ignored: even hundreds have too few watches to matter."""


def watches_per_sandbox(sandboxes: int) -> int | None:
    """Return each sandbox's share of half of a user's watches; None if the kernel does not report the limit."""
    with suppress(OSError, ValueError):
        return int(MOST.read_text()) // 2 // max(1, sandboxes)
    return None


def exceeds(pids: Iterable[int], limit: int) -> bool:
    """Return whether together they may have more watches than `limit`."""
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
    """Return the size of its table if descriptors are not visible; 0 for few."""
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
