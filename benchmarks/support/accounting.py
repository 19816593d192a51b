"""The CPU time and memory of a benchmark and everything that it starts, including processes that have ended.

CPU time comes from a control group around the benchmark (cpuacct of version 1, cpu.stat of version 2), which includes
the kernel's work for its processes. If no group can be made, it comes from rusage, which counts a process once it has
been waited for. Neither includes work that the kernel does by itself, such as removing a namespace after its last
process has ended; `host_cpu_seconds` does, together with everything else that runs on the machine.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
LEAVE_SECONDS = 5.0
KERNEL_MEMORY = ("Slab", "KernelStack", "PageTables", "Percpu", "Shmem")
"""The fields of /proc/meminfo that sandboxes take on top of their processes' memory; Shmem is memory file systems."""


_MEASURE = """
import json, resource, subprocess, sys, time
begun = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
seconds, used = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6]))
"""


@dataclass(frozen=True, slots=True)
class Run:
    """The run of a command that has ended."""

    seconds: float
    cpu_seconds: float
    peak_mb: float


def run_measured(command: Sequence[str]) -> Run:
    """Run a command to its end.

    A small process in between starts it, since the peak memory of a process counts that of the one which started it.

    Raises:
        CalledProcessError: The command fails.
    """
    done = subprocess.run([sys.executable, "-c", _MEASURE, *command], stdout=subprocess.PIPE, check=True)
    return Run(*json.loads(done.stdout))


@dataclass(frozen=True, slots=True)
class Account:
    source: str
    """The source of CPU time: "cpuacct", "cpu.stat", or "rusage"."""
    cpu_seconds: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory at one moment, in MB (10^6 bytes)."""

    processes: float
    """Proportional set size of this process and its descendants: shared pages are divided among them."""
    kernel: float
    """The whole machine's slabs, stacks, page tables, per-CPU data and memory file systems."""
    available: float
    """The memory that the kernel could still give."""

    def growth(self, before: Memory) -> tuple[float, float]:
        """Return the growth since `before`: as counted, and as the drop in available memory."""
        counted = self.processes - before.processes + self.kernel - before.kernel
        return counted, before.available - self.available


def read_memory() -> Memory:
    """Read the current memory; this takes tens of milliseconds for a hundred processes."""
    own = psutil.Process()
    pss = 0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, OSError):
            pss += _pss(process.pid)
    fields = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    info = {line[0].rstrip(":"): int(line[1]) * 1024 for line in fields}
    return Memory(pss / 1e6, sum(info[name] for name in KERNEL_MEMORY) / 1e6, info["MemAvailable"] / 1e6)


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def host_cpu_seconds() -> float:
    """Return the busy CPU time of the whole machine, a cross-check if nothing else runs."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


@contextmanager
def account() -> Iterator[Account]:
    """Count this process, and what it starts from here on."""
    own = _own_groups()
    for source, enter in (("cpuacct", _enter_v1), ("cpu.stat", _enter_v2)):
        try:
            group, home = enter(own)
        except OSError:
            continue
        try:
            yield Account(source, partial(_group_seconds, group))
        finally:
            _leave(group, home)
        return
    yield Account("rusage", _rusage_seconds)


def _own_groups() -> dict[str, str]:
    """Return this process's control groups by controller; version 2's has no name."""
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    return {name: path.lstrip("/") for _, names, path in lines for name in names.split(",")}


def _enter_v1(own: dict[str, str]) -> tuple[Path, Path]:
    home = CGROUPS / "cpuacct" / own.get("cpuacct", "")
    if not (home / "cpuacct.usage").exists():
        raise FileNotFoundError(home)
    group = home / f"benchmark-{os.getpid()}"
    group.mkdir()
    return _join(group, group, home)


def _enter_v2(own: dict[str, str]) -> tuple[Path, Path]:
    home = CGROUPS / own.get("", "")
    if not (home / "cgroup.controllers").exists():
        raise FileNotFoundError(home)
    group = home / f"benchmark-{os.getpid()}"
    # Processes go one level down: a group with processes cannot give its children controllers, and the groups of
    # sandboxes are made next to this one.
    (group / "main").mkdir(parents=True)
    return _join(group / "main", group, home)


def _join(inner: Path, group: Path, home: Path) -> tuple[Path, Path]:
    try:
        (inner / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        _remove(group)
        raise
    return group, home


def _leave(group: Path, home: Path) -> None:
    with suppress(OSError):  # version 2 refuses processes in a group whose children have controllers
        (home / "cgroup.procs").write_text(str(os.getpid()))
    _remove(group)


def _remove(group: Path) -> None:
    """Remove the group once its last process is gone; a guard outlives its service by a moment."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while group.exists() and time.monotonic() < deadline:
        for folder in (group / "main", group):
            with suppress(OSError):
                folder.rmdir()
        time.sleep(0.02)


def _group_seconds(group: Path) -> float:
    if (group / "cpuacct.usage").exists():
        return int((group / "cpuacct.usage").read_text()) / 1e9
    fields = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(fields["usage_usec"]) / 1e6


def _rusage_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
