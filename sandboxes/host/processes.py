"""Find the processes of sandboxes on this host, and end them.

A process belongs to a sandbox if its environment names the sandbox, as a launcher's does, or if its mounts show the
sandbox's folder, as those of all inside do. Signals go through a pidfd, which cannot hit another process that got the
same number.

Only the standard library is used here, because the guard starts without anything else.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARKER = "ROLLOUT_SANDBOX"

_MARK = f"\0{MARKER}=".encode()

FOLDERS = re.compile(rb"/([0-9a-f]{8})/([0-9]+)/(?:pipes|sockets|overlay)\b")
"""Parts of sandboxes' folders among the mounts of a process; see `run_folders`."""

TICKS = os.sysconf("SC_CLK_TCK")

LAUNCH_SECONDS = 60.0
"""The age until which a child of this service may still become the launcher of a sandbox."""


def start_time(pid: int) -> int | None:
    """Return when a process started, in ticks since boot, or None if it is gone.

    Together with the process's number and `boot_id` it is unique.
    """
    try:
        stat = _read(f"/proc/{pid}/stat").decode(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    """Return an id that changes with every boot of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def sandbox_of(pid: int) -> str | None:
    """Return the id of the sandbox that a process belongs to; None if there is none, or if we may not look."""
    return _find_mark(pid)[0]


def _find_mark(pid: int) -> tuple[str | None, bool]:
    """Return the sandbox of a process, if any, and whether that is certain."""
    try:
        environment = b"\0" + _read(f"/proc/{pid}/environ")
    except OSError:
        return _mounted_in(pid)
    _, found, rest = environment.partition(_MARK)
    return (rest.partition(b"\0")[0].decode(errors="replace") if found else None), True


def _mounted_in(pid: int) -> tuple[str | None, bool]:
    """Do the same by the folders that a process has mounted, where its environment cannot be read."""
    with suppress(OSError):
        if os.geteuid() in (0, _user_of(pid)):
            found = FOLDERS.search(_read(f"/proc/{pid}/mountinfo"))
            return (f"{found[1].decode()}-{found[2].decode()}" if found else None), True
    return None, False


def _user_of(pid: int) -> int:
    """Return the effective user. The owner of /proc/PID does not tell: it is root for a process that hides itself."""
    found = re.search(rb"^Uid:\s+\d+\s+(\d+)", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return int(found[1]) if found else -1


def find_processes(belongs: Callable[[str], bool]) -> list[int]:
    """Return the processes of sandboxes whose id satisfies `belongs`. It lists all of /proc: call it in a thread."""
    marked = [pid for pid, mark in _MARKS.scan() if mark is not None and belongs(mark)]
    return [pid for pid in marked if start_time(pid) is not None]  # a zombie is still listed


class _Marks:
    """The sandbox of each process of the host.

    A scan reads only about processes that earlier scans have not seen, since a host may have thousands; the inode of
    /proc/PID tells whether a number is another process's by now. A process never leaves its sandbox. One without a
    sandbox may be a child of this service that has yet to become a launcher, so it is read again during its first
    minute, and as long as nobody could look.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], str | None] = {}

    def scan(self) -> list[tuple[int, str | None]]:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        found = []
        with self._lock, os.scandir("/proc") as entries:
            before, self._known = self._known, {}
            for entry in entries:
                if not entry.name.isdigit():
                    continue
                key = pid, _ = int(entry.name), entry.inode()
                if key in before:
                    mark, is_certain = before[key], True
                else:
                    mark, is_certain = _find_mark(pid)
                    is_certain = mark is not None or (is_certain and now - _since(pid, now) > LAUNCH_SECONDS)
                if is_certain:
                    self._known[key] = mark
                found.append((pid, mark))
        return found


def _since(pid: int, now: float) -> float:
    """Return when a process started, in seconds since boot."""
    ticks = start_time(pid)
    return now if ticks is None else ticks / TICKS


_MARKS = _Marks()


def processes_of(ids: set[str]) -> list[int]:
    """Return the processes of these sandboxes. It lists all of /proc: call it in a thread."""
    return find_processes(ids.__contains__)


def kill_processes(belongs: Callable[[str], bool], spared: int | None = None) -> int:
    """Kill the processes of sandboxes whose id satisfies `belongs`, except `spared`; return how many. It blocks."""

    def still(pid: int) -> bool:
        mark = sandbox_of(pid)
        return mark is not None and belongs(mark) and pid != spared

    return sum(kill_if(pid, still) for pid in find_processes(belongs))


@dataclass(frozen=True, slots=True)
class WorkDone:
    """How much work processes have done, as the kernel counts it.

    Only a change of the counts means something, not its direction: a process that ends takes its counts along, unless
    its parent collects them.
    """

    cpu_seconds: float = 0.0
    """Includes that of collected children."""
    bytes: int = 0
    """The bytes that the processes have read and written; 0 where the kernel does not tell."""


def work_of(pid: int, limit: int) -> WorkDone:
    """Return the work of a process and of at most `limit` below it. It reads /proc: call it in a thread."""
    tree = [pid, *descendants_of(pid, limit)]
    return WorkDone(sum(map(_cpu_ticks, tree)) / TICKS, sum(map(_bytes, tree)))


def _cpu_ticks(pid: int) -> int:
    with suppress(OSError):
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        return sum(map(int, fields[11:15]))
    return 0


def _bytes(pid: int) -> int:
    with suppress(OSError, IndexError):
        fields = _read(f"/proc/{pid}/io").split()
        return int(fields[1]) + int(fields[3])
    return 0


@dataclass(frozen=True, slots=True)
class FirstProcess:
    pid: int
    parent: int


def find_first_process(launcher: int) -> FirstProcess | None:
    """Return process 1 of the namespace that a launcher created; None if it has ended.

    It is the one nearest to the launcher: namespaces that code inside created are further down.
    """
    parents = [launcher]
    for parent in parents:
        for pid in children_of(parent):
            if _number_inside(pid) == 1:
                return FirstProcess(pid, parent)
            parents.append(pid)
    return None


def children_of(pid: int) -> list[int]:
    """Include children of its threads, and zombies."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - as in `_read`
            with suppress(OSError):
                found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def descendants_of(pid: int, limit: int) -> list[int]:
    """Return processes below a process, the nearest first, including zombies; it stops once it has `limit`."""
    found = children_of(pid)[:limit]
    for one in found:
        found += children_of(one)[: limit - len(found)]
    return found


def command_line(pid: int) -> str:
    """Return a process's command line with spaces; empty for a zombie or one that has ended."""
    with suppress(OSError):
        return _read(f"/proc/{pid}/cmdline").rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return ""


def _number_inside(pid: int) -> int | None:
    """Return the number of a process in its own namespace; None if that is the host's, or if it has ended."""
    with suppress(OSError):
        found = re.search(rb"^NSpid:((?:\s+\d+)+)$", _read(f"/proc/{pid}/status"), re.MULTILINE)
        numbers = found[1].split() if found else []
        return int(numbers[-1]) if len(numbers) > 1 else None
    return None


def kill_if(pid: int, is_it: Callable[[int], bool]) -> bool:
    """Send SIGKILL to a process if `is_it` still holds once a pidfd pins its number; return whether it was sent."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not is_it(pid):
            return False
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            return True
        return False
    finally:
        os.close(fd)


def _read(path: str) -> bytes:
    # A scan calls this for each process of the host; a Path and a buffer for each would cost half as much again.
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return file.readall()
