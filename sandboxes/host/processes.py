"""Which processes of this host belong to which sandbox, and their end.

A process belongs to a sandbox by its environment, which names it, or by its mounts, which show the sandbox's
folder: the first is what the launcher was given, the second what a process inside cannot be without. Nothing here
finds a process by its name. Signals go through a pidfd, which cannot hit another process that got the same number.

Only the standard library is used here, since the guard starts without anything else.
"""

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARKER = "ROLLOUT_SANDBOX"
"""The environment variable that says to which sandbox a process belongs."""

FOLDERS = re.compile(rb"/([0-9a-f]{8})/([0-9]+)/(?:pipes|sockets|overlay)\b")
"""Parts of sandboxes' folders among the mounts of a process, see `rundir`."""


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot: with its number and `boot_id` it is unique. None: it is gone."""
    try:
        stat = _read(f"/proc/{pid}/stat").decode(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    """Changes with every boot of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def sandbox_of(pid: int) -> str | None:
    """The sandbox that a process belongs to; None for none, or where we may not know."""
    try:
        entries = _read(f"/proc/{pid}/environ").split(b"\0")
    except OSError:
        return _mounted_in(pid)
    prefix = f"{MARKER}=".encode()
    found = (entry[len(prefix) :] for entry in entries if entry.startswith(prefix))
    return next((value.decode(errors="replace") for value in found), None)


def _mounted_in(pid: int) -> str | None:
    """The sandbox whose folder a process sees mounted: also told of processes that may not be looked into."""
    with suppress(OSError):
        if os.geteuid() in (0, _user_of(pid)):
            found = FOLDERS.search(_read(f"/proc/{pid}/mountinfo"))
            return f"{found[1].decode()}-{found[2].decode()}" if found else None
    return None


def _user_of(pid: int) -> int:
    """The effective user; the owner of /proc/PID is root for a process that may not be looked into."""
    found = re.search(rb"^Uid:\s+\d+\s+(\d+)", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return int(found[1]) if found else -1


def find_processes(belongs: Callable[[str], bool]) -> list[int]:
    """The processes of the sandboxes for whose id `belongs` holds. It reads all of /proc: call it in a thread."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if (mark := sandbox_of(pid)) is not None and belongs(mark)]


def processes_of(ids: set[str]) -> list[int]:
    """The processes of these sandboxes. It reads all of /proc: call it in a thread."""
    return find_processes(ids.__contains__)


def kill_processes(belongs: Callable[[str], bool], spared: int | None = None) -> int:
    """SIGKILL the processes of the sandboxes for whose id `belongs` holds, but `spared`; how many. It blocks."""

    def still(pid: int) -> bool:
        mark = sandbox_of(pid)
        return mark is not None and belongs(mark) and pid != spared

    return sum(kill_if(pid, still) for pid in find_processes(belongs))


@dataclass(frozen=True, slots=True)
class FirstProcess:
    """Process 1 of a sandbox and its parent, as the host numbers them."""

    pid: int
    parent: int


def find_first_process(launcher: int) -> FirstProcess | None:
    """Find the first process of the process namespace that a launcher made; None where it has ended.

    The one nearest to the launcher is meant: namespaces that code inside made are further down.
    """
    parents = [launcher]
    for parent in parents:
        for pid in children_of(parent):
            if _number_inside(pid) == 1:
                return FirstProcess(pid, parent)
            parents.append(pid)
    return None


def children_of(pid: int) -> list[int]:
    """Return the children of a process and of its threads, including those that ended uncollected."""
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, _read(f"{thread}/children").split())
    return found


def _number_inside(pid: int) -> int | None:
    """Return the number of a process in its own namespace; None if that is the host's, or it has ended."""
    with suppress(OSError):
        found = re.search(rb"^NSpid:((?:\s+\d+)+)$", _read(f"/proc/{pid}/status"), re.MULTILINE)
        numbers = found[1].split() if found else []
        return int(numbers[-1]) if len(numbers) > 1 else None
    return None


def kill_if(pid: int, is_it: Callable[[int], bool]) -> bool:
    """SIGKILL a process if `is_it` still holds once the number can no longer change its meaning."""
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
    return Path(path).read_bytes()
