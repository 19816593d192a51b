"""Limit memory, processes and processor time by control groups, version 1 or 2, if this process may make them.

`ControlGroups.enforced` names the limits that hold. A group contains the launcher, its helpers and everything inside,
and is removed with the sandbox. Each has the weight of an ordinary process: with less, a short command would wait for
everything else on the host. Sandboxes that never rest yield instead (see `watchdog`).
"""

import os
import resource
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sandboxes.errors import SandboxStartError

Pausing = Literal["none", "processes", "files", "memory"]
""""none": not at all. "processes": everything inside stops. "files": the host also gets back the memory that caches
files. "memory": it gets back all of the memory, since it has swap.
"""

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
LAUNCHER_PROCESSES = 64
"""Allowed above the sandbox's limit during the start, for the launcher's threads and helpers."""
SPARE_PROCESSES = 16
"""Allowed above the limit after the start, so that the control shell can fork despite a fork bomb."""
REMOVE_SECONDS = 2.0
READ_SIZE = 4096
SWAPS = Path("/proc/swaps")
RECLAIMS = ("memory.reclaim", "memory.force_empty")
"""Files that take memory from a group: in version 2 as much as is written, in version 1 all they can."""
RECLAIM_BYTES = 64 << 20
"""Taken at once; in between, the sandbox may be used again."""


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """None means no limit."""

    memory_bytes: int | None
    max_processes: int | None
    cpus: float | None
    disk_bytes: int | None = None


class ControlGroup:
    """The control groups of one sandbox: one folder in version 2, one per controller in version 1."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders

    @property
    def paths(self) -> list[Path]:
        return list(dict.fromkeys(self.folders.values()))

    def apply(self, limits: ResourceLimits) -> None:
        if limits.memory_bytes is not None and (memory := self.folders.get("memory")):
            swap = "memory.swap.max" if (memory / "memory.max").exists() else "memory.memsw.limit_in_bytes"
            _write(_first_existing(memory, "memory.max", "memory.limit_in_bytes"), limits.memory_bytes)
            with suppress(OSError):  # exists only if the kernel counts swap
                _write(memory / swap, 0 if swap == "memory.swap.max" else limits.memory_bytes)
        if limits.max_processes is not None and (pids := self.folders.get("pids")):
            _write(pids / "pids.max", limits.max_processes + LAUNCHER_PROCESSES)
        if limits.cpus is not None and (cpu := self.folders.get("cpu")):
            quota = max(1000, int(limits.cpus * PERIOD_US))
            if (cpu / "cpu.max").exists():
                _write(cpu / "cpu.max", f"{quota} {PERIOD_US}")
            else:
                _write(cpu / "cpu.cfs_quota_us", quota)

    def join(self, pid: int) -> None:
        """Move a process into the group. Blocks for 10 to 20 ms, for which the kernel waits.

        Raises:
            OSError: The process has ended, or the kernel refuses.
        """
        for path in self.paths:
            _write(path / "cgroup.procs", pid)

    def settle(self, max_processes: int | None) -> int:
        """Count the launcher's tasks once the sandbox is ready, so that the process limit applies to the inside only.

        Raises:
            OSError: The group is gone.
        """
        if (pids := self.folders.get("pids")) is None:
            return 0
        launcher = max(0, int((pids / "pids.current").read_text()) - 1)  # without the control shell
        if max_processes is not None:
            _write(pids / "pids.max", launcher + max_processes + SPARE_PROCESSES)
        return launcher

    def yield_processor(self, yields: bool) -> None:
        """Let the processes inside run only when nothing else wants to.

        Raises:
            OSError: The kernel does not support this (before 5.15), or the group is gone.
        """
        if cpu := self.folders.get("cpu"):
            _write(cpu / "cpu.idle", int(yields))

    def reclaim(self, goes_on: Callable[[], bool]) -> int:
        """Give back memory for as long as `goes_on`; return how many bytes. It blocks.

        Raises:
            OSError: The group is gone.
        """
        memory = self.folders["memory"]
        usage = _first_existing(memory, "memory.current", "memory.usage_in_bytes")
        taker, swap = _first_existing(memory, *RECLAIMS), memory / "memory.swap.max"
        before = left = int(usage.read_text())
        allowed = swap.read_text().strip() if swap.exists() else ""
        if allowed:  # while it runs, a sandbox may use no swap
            _write(swap, (memory / "memory.max").read_text().strip())
        with suppress(OSError):  # less than that could be taken
            while goes_on():
                _write(taker, RECLAIM_BYTES)
                left, last = int(usage.read_text()), left
                if left >= last:
                    break
        if allowed:
            _write(swap, allowed)
        return max(0, before - int(usage.read_text()))

    def file(self, controller: str, *names: str) -> "ControlGroupFile | None":
        """Open the first of a controller's files that exists, if any."""
        folder = self.folders.get(controller)
        if folder is not None:
            for name in names:
                with suppress(OSError):
                    return ControlGroupFile(folder / name)
        return None

    def remove(self) -> bool:
        """Return whether all folders are gone. Blocks for at most `REMOVE_SECONDS`."""
        return remove_groups(self.paths, REMOVE_SECONDS)


class ControlGroupFile:
    """Takes one system call per reading."""

    __slots__ = ("_fd",)

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: There is no such file.
        """
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def number(self, key: str | None = None) -> int:
        """Return the file's only number, or that of the line starting with `key`; 0 if the group is gone or the value
        is "max".
        """
        try:
            text = os.pread(self._fd, READ_SIZE, 0).decode("ascii", "replace")
        except OSError:
            return 0
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if key is None or name == key:
                return int(value) if value.isdigit() else 0
        return 0

    def close(self) -> None:
        os.close(self._fd)


class ControlGroups:
    """The places where this process may make control groups, determined once."""

    def __init__(self, parents: dict[str, Path], pausing: Pausing = "none") -> None:
        self._parents = parents
        self.pausing = pausing

    @property
    def enforced(self) -> frozenset[str]:
        names = {"memory": "memory", "pids": "processes", "cpu": "cpus"}
        return frozenset(name for controller, name in names.items() if controller in self._parents)

    def paths_of(self, name: str) -> dict[str, Path]:
        return {controller: parent / f"rollout-{name}" for controller, parent in self._parents.items()}

    def create(self, name: str, limits: ResourceLimits) -> ControlGroup | None:
        """Return None if this host allows no groups.

        Raises:
            SandboxStartError: The kernel refuses the group or a limit.
        """
        if not self._parents:
            return None
        group = ControlGroup(self.paths_of(name))
        try:
            for path in group.paths:
                path.mkdir()
            group.apply(limits)
        except OSError as error:
            group.remove()
            raise SandboxStartError(f"cannot make a control group for the sandbox: {error}") from error
        return group


def find_control_groups(root: Path = CGROUPS, own: str | None = None) -> ControlGroups:
    """Find where groups can be made: below this process's own in version 1, below or next to it in version 2.

    `own` is the content of /proc/self/cgroup.
    """
    lines = (Path("/proc/self/cgroup").read_text() if own is None else own).splitlines()
    by_controller = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            by_controller[controller] = path.lstrip("/")
    if (root / "cgroup.controllers").exists():
        return _with_freezer(_unified_parents(root / by_controller.get("", "")), None)
    parents = {}
    for controller in ("memory", "pids", "cpu", "cpuacct"):
        folder = root / controller / by_controller.get(controller, "")
        if controller in by_controller and _can_make(folder):
            parents[controller] = folder.resolve()  # "cpu" and "cpuacct" are often links to one hierarchy
    return _with_freezer(parents, root / "unified" / by_controller.get("", ""))


def _with_freezer(parents: dict[str, Path], beside: Path | None) -> ControlGroups:
    """Add the freezer of version 2, beside version 1 if that has the other controllers.

    What the freezer of version 1 has stopped cannot be killed.
    """
    memory = parents.get("memory")
    freezer = beside or memory
    if freezer is None or "cgroup.freeze" not in (_files_of_group(freezer) or ()):
        return ControlGroups(parents)
    pausing: Pausing = "processes"
    if memory is not None and not set(RECLAIMS).isdisjoint(_files_of_group(memory) or ()):
        has_swap = SWAPS.exists() and len(SWAPS.read_text().splitlines()) > 1
        pausing = "memory" if has_swap else "files"
    return ControlGroups({**parents, "freezer": freezer.resolve()}, pausing)


def _unified_parents(own: Path) -> dict[str, Path]:
    """Find parents in version 2, which gives controllers only to children of a group without processes.

    Often that group is our parent.
    """
    for folder in (own, own.parent):
        control = folder / "cgroup.subtree_control"
        with suppress(OSError):
            if not _delegates(control):
                _write(control, "+memory +pids")
            if "cpu" in (folder / "cgroup.controllers").read_text().split() and not _delegates(control, "cpu"):
                with suppress(OSError):  # if only the first two are delegated, only they are limited
                    _write(control, "+cpu")
            if _delegates(control) and _can_make(folder):
                enabled = control.read_text().split()
                return {name: folder for name in ("memory", "pids", "cpu") if name in enabled}
    return {}


def _delegates(control: Path, *controllers: str) -> bool:
    return set(controllers or ("memory", "pids")) <= set(control.read_text().split())


def _can_make(folder: Path) -> bool:
    return _files_of_group(folder) is not None


def _files_of_group(parent: Path) -> frozenset[str] | None:
    """Return None if no group can be made below this one."""
    probe = parent / f"rollout-probe-{time.monotonic_ns()}"
    try:
        probe.mkdir()
        found = frozenset(path.name for path in probe.iterdir())
        probe.rmdir()
    except OSError:
        return None
    return found


def _first_existing(folder: Path, *names: str) -> Path:
    return next((folder / name for name in names if (folder / name).exists()), folder / names[-1])


def _write(path: Path, value: object) -> None:
    path.write_text(f"{value}\n")


def raise_open_files() -> None:
    """Raise the limit on descriptors to the hard limit: a sandbox with a shell takes four of the service's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


PAUSE = 0.02


def group_members(path: Path) -> set[int]:
    try:
        return {int(line) for line in (path / "cgroup.procs").read_text().split()}
    except OSError:
        return set()


def remove_groups(paths: Iterable[Path], seconds: float) -> bool:
    """Remove control groups, waiting for the kernel to release their last processes; return whether all are gone.

    It blocks for `seconds` at most. Only the standard library is used, because the guard starts without anything else.
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
