"""Read this host's pressure: PSI if the kernel has it, and how much is left of resources that can run out.

A reading takes about a dozen small files of /proc and of control groups, in a fraction of a millisecond. A value that
the host does not report is None, never a guess. Inside a container, the limits of its control group apply.
"""

import os
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from sandboxes.scheduling.pressure import DiskSpace, HostMetrics

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
KIB = 1024


class HostReader:
    """Blocks while the disks report how full they are."""

    def __init__(self, folders: Sequence[Path] = (), *, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        """`folders` are absolute paths of sandboxes and state that need not exist yet."""
        there = [next(path for path in (it, *it.parents) if path.exists()) for it in folders]
        self._folders = list({path.stat().st_dev: path for path in there}.values())  # one for each file system
        self._proc = proc
        self._groups = _find_own_groups(proc, cgroups)
        self.cpus = len(os.sched_getaffinity(0))

    def read(self) -> HostMetrics:
        available, total = self._read_memory()
        return HostMetrics(
            cpus=self.cpus,
            load=self._read_load(),
            cpu_stall=self._read_stall("cpu", "some"),
            memory_stall=self._read_stall("memory", "some"),
            io_stall=self._read_stall("io", "full"),
            memory_available=available,
            memory_total=total,
            disks=tuple(space for folder in self._folders if (space := _read_space(folder)) is not None),
            descriptors_free=_read_descriptors_free(),
            processes_free=self._read_processes_free(),
        )

    def _read_load(self) -> float | None:
        fields = _read_text(f"{self._proc}/loadavg").split()
        return float(fields[0]) if fields else None

    def _read_stall(self, name: str, kind: str) -> float | None:
        files = [f"{self._proc}/pressure/{name}", *(f"{group}/{name}.pressure" for group in self._groups)]
        return max((value for file in files for value in _read_averages(file, kind)), default=None)

    def _read_memory(self) -> tuple[int | None, int | None]:
        """Return available and total memory of the host or control group that has the least left."""
        lines = _read_text(f"{self._proc}/meminfo")
        available, total = (_find_kib(name, lines) for name in ("MemAvailable", "MemTotal"))
        found = [(available, total)] if available is not None and total is not None else []
        for group in self._groups:
            found += _read_group_memory(group, total)
        return min(found, default=(None, None))

    def _read_processes_free(self) -> int | None:
        """Return the fewer of those that the kernel and our control groups allow."""
        running = _read_text(f"{self._proc}/loadavg").split()
        threads = int(running[3].split("/")[1]) if len(running) > 3 else 0
        limits = [_read_number(f"{self._proc}/sys/kernel/{name}") for name in ("pid_max", "threads-max")]
        left = [limit - threads for limit in limits if limit is not None and running]
        for group in self._groups:
            limit, current = _read_number(f"{group}/pids.max"), _read_number(f"{group}/pids.current")
            if limit is not None and current is not None:
                left.append(limit - current)
        return min(left, default=None)


def _find_own_groups(proc: Path, cgroups: Path) -> list[Path]:
    found: list[Path] = []
    for line in _read_text(f"{proc}/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        root = cgroups / controllers if controllers else cgroups
        group = root / path.lstrip("/")
        found += [it for it in (group, *group.parents) if it.is_relative_to(root) and it.is_dir()]
    useful = ("memory.pressure", "memory.max", "memory.limit_in_bytes", "pids.max", "cpu.pressure")
    return [it for it in dict.fromkeys(found) if any((it / name).exists() for name in useful)]


def _read_group_memory(group: Path, total: int | None) -> Iterator[tuple[int, int]]:
    """Yield free memory, cached files included, and its limit."""
    for most, current, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read_number(f"{group}/{most}"), _read_number(f"{group}/{current}")
        if limit is None or used is None or (total is not None and limit >= total):
            continue
        stat = dict(line.split() for line in _read_text(f"{group}/memory.stat").splitlines())
        yield max(0, limit - used + int(stat.get(cache, 0))), limit


def _find_kib(name: str, lines: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", lines, re.MULTILINE)
    return int(found[1]) * KIB if found else None


def _read_averages(file: str, kind: str) -> Iterator[float]:
    for line in _read_text(file).splitlines():
        name, first, *_ = line.split()
        if name == kind:
            yield float(first.removeprefix("avg10="))


def _read_space(folder: Path) -> DiskSpace | None:
    """Use a parent if the folder was removed; return None if the disk fails."""
    for place in (folder, *folder.parents):
        try:
            found = os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        return DiskSpace(str(folder), found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
    return None


def _read_descriptors_free() -> int:
    """Estimate it: the lowest free number is roughly how many are in use."""
    try:
        probe = os.open("/", os.O_PATH | os.O_CLOEXEC)
    except OSError:  # none is left for this process, or on the host
        return 0
    os.close(probe)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - probe


def _read_number(file: str) -> int | None:
    text = _read_text(file).strip()
    return int(text) if text.isdigit() else None


def _read_text(file: str) -> str:
    """Return "" if the kernel does not have the file or denies access."""
    # Some dozens of files each second; a Path and a decoder for each would cost twice as much.
    with suppress(OSError), open(file, "rb", buffering=0) as opened:  # noqa: PTH123
        return opened.readall().decode()
    return ""
