"""End the processes and remove the files that dead services left on this host.

Every service has one folder (`run_folders.ServiceFolder`), created before anything else and removed last. Sandbox ids,
process marks and control groups begin with its name. The kernel releases the service's lock on it when the service ends
and for no other reason: not while it is stopped, and not because its pid is reused. A process that gets the lock alone
removes the leftovers, so any number of services and guards may sweep at once.

Folders of other users, of other hosts and with other names are not touched.

Only the standard library is used here, because the guard starts without anything else.
"""

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from sandboxes.host.locks import try_lock
from sandboxes.host.processes import kill_if, kill_processes
from sandboxes.limits.cgroups import group_members, remove_groups
from sandboxes.reclaim.rmtree import remove_tree

OWNER = "owner"
"""The file with the facts that the folder's name lacks: the host, the pid and the control groups. It may be missing."""
NAME = re.compile("[0-9a-f]{8}")
CGROUPS = "/sys/fs/cgroup/"
RECLAIM_SECONDS = 30.0
QUIET_ROUNDS = 2
"""Looks that must find nothing: a process may have been too young to be seen when /proc was read."""
PAUSE = 0.02


class SweepReport(NamedTuple):
    """Counts of the things that were removed, and each that could not be, with the reason."""

    sandboxes: int = 0
    processes: int = 0
    failures: tuple[str, ...] = ()

    def __add__(self, other: object) -> "SweepReport":
        if not isinstance(other, SweepReport):
            return NotImplemented
        return SweepReport(
            self.sandboxes + other.sandboxes,
            self.processes + other.processes,
            (*self.failures, *other.failures),
        )


def write_owner(folder: Path, groups: Iterable[str]) -> None:
    """Write whose folder it is; `groups` are path prefixes of control groups."""
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "groups": list(groups)}
    (folder / OWNER).write_text(json.dumps(owner))


def sweep(base: Path, groups: Iterable[str] = ()) -> SweepReport:
    """Reclaim the remains below a folder. It blocks for as long as the kernel needs.

    `groups` are the parents of control groups, for folders that do not say where theirs are.
    """
    total = SweepReport()
    with suppress(OSError):
        for folder in sorted(base.iterdir()):
            if NAME.fullmatch(folder.name):
                guesses = [f"{parent}/rollout-{folder.name}" for parent in groups]
                total += sweep_service(folder, guesses) or SweepReport()
    return total


def sweep_service(folder: Path, groups: Iterable[str] = ()) -> SweepReport | None:
    """Reclaim the remains of one service; return None if it lives, is not ours, or another process is reclaiming it."""
    with claim(folder) as owner:
        if owner is None:
            return None
        return reclaim(folder, {*_groups_of(owner), *groups})


@contextmanager
def claim(folder: Path) -> Iterator[dict[str, object] | None]:
    """Hold a dead service's folder and yield its owner file: `{}` if either is missing, None if not claimed."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield {}
        return
    except OSError:
        yield None
        return
    try:
        yield _read_owner(folder) if os.fstat(handle).st_uid == os.geteuid() and try_lock(handle) else None
    finally:
        os.close(handle)


def is_dead(folder: Path) -> bool:
    """Return whether nobody holds a service's folder."""
    with claim(folder) as owner:
        return owner is not None


def reclaim(
    folder: Path, groups: Iterable[str], seconds: float = RECLAIM_SECONDS, rounds: int = QUIET_ROUNDS
) -> SweepReport:
    """End the processes that a service started and remove the files that it created; the caller holds its lock.

    It is done once nothing was found `rounds` times. One round is enough for a service that starts nothing more.
    """
    deadline = time.monotonic() + seconds
    prefix = f"{folder.name}-"
    sandboxes = sum(1 for _ in folder.glob("[0-9]*"))
    killed = quiet = 0
    while time.monotonic() < deadline:
        paths = [path for group in groups for path in _groups_like(group)]
        found = kill_processes(lambda mark: mark.startswith(prefix)) + kill_groups(paths)
        killed += found
        quiet = 0 if found or not remove_groups(paths, 0) else quiet + 1
        if quiet >= rounds:
            break
        time.sleep(PAUSE)
    failures = [] if quiet >= rounds else ["processes or control groups are still in use"]
    if not failures and (problem := remove_tree(folder, deadline)):
        failures.append(problem)
    return SweepReport(sandboxes if not failures else 0, killed, tuple(f"{folder}: {what}" for what in failures))


def kill_groups(paths: Iterable[Path]) -> int:
    killed = 0
    for path in paths:
        killed += sum(kill_if(pid, _is_member(path)) for pid in group_members(path))
        with suppress(OSError):  # ends what forks faster than it is counted; only version 2 has it
            (path / "cgroup.kill").write_text("1")
    return killed


def _is_member(path: Path) -> Callable[[int], bool]:
    return lambda pid: pid in group_members(path)


def _groups_like(group: str) -> list[Path]:
    """Return control groups whose path begins with `group`; nothing else."""
    path = Path(group)
    if not group.startswith(CGROUPS) or ".." in path.parts or not NAME.search(path.name):
        return []
    return list(path.parent.glob(f"{path.name}-*"))


def _groups_of(owner: dict[str, object]) -> list[str]:
    groups = owner.get("groups")
    return [group for group in groups if isinstance(group, str)] if isinstance(groups, list) else []


def _read_owner(folder: Path) -> dict[str, object] | None:
    """Return `{}` if the file is missing or damaged, and None if the owner is on another host."""
    try:
        found = json.loads((folder / OWNER).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or found.get("host", socket.gethostname()) != socket.gethostname():
        return None if isinstance(found, dict) else {}
    return found
