"""How much work the processes of sandboxes have done, as the kernel counts it.

Only a change of the counts means something, not its direction: a process that ends takes its counts along, unless its
parent collects them.
"""

import os
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class WorkDone:
    cpu_seconds: float = 0.0
    """The processor time, with that of collected children."""
    bytes: int = 0
    """The bytes that the processes have read and written; 0 where the kernel does not tell."""


def work_below(pids: Iterable[int]) -> dict[int, WorkDone]:
    """Return the work of each process with its descendants. It reads all of /proc: call it in a thread."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (found := _stat(entry.name)) is not None:
            parent, ticks[int(entry.name)] = found
            children[parent].append(int(entry.name))
    work: dict[int, WorkDone] = {}
    for pid in pids:
        tree, at = [pid], 0
        while at < len(tree):
            tree += children.get(tree[at], ())
            at += 1
        cpu = sum(ticks.get(each, 0) for each in tree) / TICKS
        work[pid] = WorkDone(cpu, sum(_bytes(each) for each in tree))
    return work


def _stat(name: str) -> tuple[int, int] | None:
    with suppress(OSError, ValueError):
        text = Path(f"/proc/{name}/stat").read_bytes()
        fields = text[text.rindex(b")") + 2 :].split()
        return int(fields[1]), sum(map(int, fields[11:15]))
    return None


def _bytes(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/io").read_bytes().split()
        return int(lines[1]) + int(lines[3])
    return 0
