"""Decide from the host's pressure how many sandboxes it can bear, and why no more.

Guarantees, for any readings:
- The target is between one and the ceiling.
- A resource throttles from the first reading above its threshold until one well below it, so the decision does not
  flap.
- While a resource throttles, the target does not grow, and no sandbox is ended. If something runs out (memory, disk
  space, descriptors, processes), nothing starts and sandboxes that end are not replaced, down to the last one. Busy
  processors and disks only slow things down; they cut the target step by step, down to a floor.
- While none throttles, the target grows by a step with each reading, as long as it is used.

Pure: no clock, no files. The constants assume one reading per second.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sandboxes.config import GIB, PressureConfig

Resource = Literal["cpu", "memory", "io", "disk", "descriptors", "processes"]

RELEASE = 0.8
"""A resource must fall below this share of its threshold to stop throttling."""
PATIENCE = 5
"""Readings between two cuts: a cut takes as long to show in averages over 10 s."""
DECREASE = 0.75
FIRST_PER_CPU = 8
STEP_PER_CPU = 2
FLOOR_PER_CPU = 4
MEMORY_SHARE = 0.1
MEMORY_MOST = 4 * GIB
SLOW: frozenset[Resource] = frozenset({"cpu", "io"})
"""Resources that make things slow but do not run out."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    path: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class HostMetrics:
    """None means the host does not report it; stalls are percentages of 10 s."""

    cpus: int
    load: float | None = None
    """Over one minute."""
    cpu_stall: float | None = None
    memory_stall: float | None = None
    io_stall: float | None = None
    memory_available: int | None = None
    """Bytes usable without swapping on the host, or in the service's control group if fewer."""
    memory_total: int | None = None
    disks: tuple[DiskSpace, ...] = ()
    descriptors_free: int | None = None
    processes_free: int | None = None


@dataclass(frozen=True, slots=True)
class ResourcePressure:
    """How close a resource is to its threshold; from a ratio of 1 on it throttles starts."""

    resource: Resource
    ratio: float
    text: str
    """For a resource above its threshold."""
    easing: str
    """For one below its threshold again, but not far enough."""

    @property
    def hold_reason(self) -> "HoldReason":
        return HoldReason(self.resource, self.text if self.ratio >= 1.0 else self.easing)


@dataclass(frozen=True, slots=True)
class HoldReason:
    resource: str
    """A resource, "ceiling", or "growth" while the target still rises toward the demand."""
    text: str


@dataclass(frozen=True, slots=True)
class ConcurrencyDecision:
    target: int
    hold_reasons: tuple[HoldReason, ...] = ()


class PressureController:
    def __init__(self, config: PressureConfig, ceiling: int, cpus: int) -> None:
        """`ceiling` is at least one."""
        self._config = config
        self._ceiling = ceiling
        self._step = STEP_PER_CPU * cpus
        self._cpus = cpus
        self._floor = min(ceiling, FLOOR_PER_CPU * cpus)
        self._held: frozenset[Resource] = frozenset()
        self._since_cut = 0
        first = min(ceiling, FIRST_PER_CPU * cpus) if config.enabled else ceiling
        self.decision = ConcurrencyDecision(first)

    def resize(self, ceiling: int) -> None:
        """Change the ceiling; the target grows into a larger one on demand."""
        self._ceiling = ceiling
        self._floor = min(ceiling, FLOOR_PER_CPU * self._cpus)
        target = min(self.decision.target, ceiling) if self._config.enabled else ceiling
        self.decision = ConcurrencyDecision(target, self.decision.hold_reasons)

    def update(self, metrics: HostMetrics, *, used: int, waiting: int) -> ConcurrencyDecision:
        if not self._config.enabled:
            return self.decision
        pressures = measure_pressure(metrics, self._config)
        held = [it for it in pressures if it.ratio >= (RELEASE if it.resource in self._held else 1.0)]
        target = self._shrink(used, held) if held else self._grow(used, waiting)
        self._held = frozenset(pressure.resource for pressure in held)
        self.decision = ConcurrencyDecision(target, tuple(pressure.hold_reason for pressure in held))
        return self.decision

    def _shrink(self, used: int, held: list[ResourcePressure]) -> int:
        target = self.decision.target
        if any(pressure.resource not in SLOW for pressure in held):
            return max(1, min(target, used))
        self._since_cut = self._since_cut + 1 if self._held else 0
        if self._since_cut < PATIENCE:
            return min(target, max(used, self._floor))
        self._since_cut = 0
        return min(target, max(self._floor, int(min(target, used) * DECREASE)))

    def _grow(self, used: int, waiting: int) -> int:
        target = self.decision.target
        return min(self._ceiling, target + self._step) if used + waiting >= target else target


def measure_pressure(metrics: HostMetrics, config: PressureConfig) -> list[ResourcePressure]:
    found = [
        *_measure_cpu(metrics, config),
        *_measure_stall("memory", "some", metrics.memory_stall, config.memory_percent),
        *_measure_stall("io", "full", metrics.io_stall, config.io_percent),
    ]
    if metrics.memory_available is not None:
        kept = config.memory_free_bytes or memory_reserve(metrics.memory_total)
        found.append(_measure_scarcity("memory", metrics.memory_available, kept, "available", _format_size))
    for disk in metrics.disks:
        kept = min(config.disk_free_bytes, disk.total_bytes // 2)
        found.append(_measure_scarcity("disk", disk.free_bytes, kept, f"free at {disk.path}", _format_size))
    if metrics.descriptors_free is not None:
        kept = config.descriptors_free
        found.append(_measure_scarcity("descriptors", metrics.descriptors_free, kept, "free", str))
    if metrics.processes_free is not None:
        found.append(_measure_scarcity("processes", metrics.processes_free, config.processes_free, "free", str))
    return found


def memory_reserve(total: int | None) -> int:
    """Return the bytes to keep free if nothing is configured."""
    return MEMORY_MOST if total is None else min(MEMORY_MOST, int(total * MEMORY_SHARE))


def _measure_cpu(metrics: HostMetrics, config: PressureConfig) -> list[ResourcePressure]:
    if metrics.cpu_stall is not None or metrics.load is None:
        return _measure_stall("cpu", "some", metrics.cpu_stall, config.cpu_percent)
    load, mark = metrics.load / metrics.cpus, config.load_per_cpu
    text = f"cpu: load {load:.1f} for each processor"
    return [ResourcePressure("cpu", load / mark, f"{text} > {mark:.1f}", f"{text}, not yet below {mark * RELEASE:.1f}")]


def _measure_stall(resource: Resource, kind: str, percent: float | None, mark: float) -> list[ResourcePressure]:
    if percent is None:
        return []
    text = f"{resource}: {kind} avg10 {percent:.0f} %"
    easing = f"{text}, not yet below {mark * RELEASE:.0f} %"
    return [ResourcePressure(resource, percent / mark, f"{text} > {mark:.0f} %", easing)]


def _measure_scarcity(
    resource: Resource, there: int, kept: int, what: str, show: Callable[[int], str]
) -> ResourcePressure:
    ratio = kept / there if there > 0 else math.inf
    text = f"{resource}: {show(there)} {what}"
    easing = f"{text}, not yet {show(int(kept / RELEASE))}"
    return ResourcePressure(resource, ratio, f"{text}, {show(kept)} kept free", easing)


def _format_size(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
