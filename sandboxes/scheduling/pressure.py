"""How many sandboxes this host bears: a controller that looks at its pressure and says how many, and why.

Guarantees, whatever the readings are:
- the target is between one and the ceiling;
- a resource holds sandboxes back from the first reading over its mark until one well below it, so that the
  decision does not flutter;
- while one does, the target does not grow, and no sandbox is ended. Where something runs out (memory, space,
  descriptors, processes) none is started, down to the last one: what ends is not replaced. Busy processors and
  disks only make things slow, which passes: there the target is cut step by step, down to a floor;
- when none does, the target grows by a step with each reading as long as it is made use of.

Pure: no clock, no files. One reading a second is what the constants are meant for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sandboxes.config import GIB, PressureConfig

Resource = Literal["cpu", "memory", "io", "disk", "descriptors", "processes"]

RELEASE = 0.8
"""The share of its mark to which a resource must come down."""
PATIENCE = 5
"""Readings between two cuts: as long as it takes a cut to show in averages over 10 s."""
DECREASE = 0.75
FIRST_PER_CPU = 8
STEP_PER_CPU = 2
FLOOR_PER_CPU = 4
MEMORY_SHARE = 0.1
MEMORY_MOST = 4 * GIB
SLOW: frozenset[Resource] = frozenset({"cpu", "io"})
"""What makes things slow and does not run out."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The file system of one folder."""

    path: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class HostMetrics:
    """What a host says of itself at one moment. None is what it does not tell; stalls are in percent of 10 s."""

    cpus: int
    load: float | None = None
    """The load average of one minute."""
    cpu_stall: float | None = None
    memory_stall: float | None = None
    io_stall: float | None = None
    memory_available: int | None = None
    """Bytes that can be used without swapping: of the host, or of the service's control group if that is less."""
    memory_total: int | None = None
    disks: tuple[DiskSpace, ...] = ()
    descriptors_free: int | None = None
    processes_free: int | None = None


@dataclass(frozen=True, slots=True)
class ResourcePressure:
    """How near a resource is to its mark: at 1 it holds sandboxes back."""

    resource: Resource
    ratio: float
    text: str
    """What it is at, over its mark."""
    easing: str
    """The same for when it is below the mark again, and not yet far enough."""

    @property
    def hold_reason(self) -> "HoldReason":
        """Why this holds sandboxes back."""
        return HoldReason(self.resource, self.text if self.ratio >= 1.0 else self.easing)


@dataclass(frozen=True, slots=True)
class HoldReason:
    """Why no further sandbox is started."""

    resource: str
    """A resource of the host, "ceiling", or "growth" while the target is still rising to what is asked for."""
    text: str


@dataclass(frozen=True, slots=True)
class ConcurrencyDecision:
    """How many sandboxes there may be, and what keeps it from being more."""

    target: int
    hold_reasons: tuple[HoldReason, ...] = ()


class PressureController:
    """Turns readings into decisions."""

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
        """Change the ceiling; a larger one is grown into as it is asked for."""
        self._ceiling = ceiling
        self._floor = min(ceiling, FLOOR_PER_CPU * self._cpus)
        target = min(self.decision.target, ceiling) if self._config.enabled else ceiling
        self.decision = ConcurrencyDecision(target, self.decision.hold_reasons)

    def update(self, metrics: HostMetrics, *, used: int, waiting: int) -> ConcurrencyDecision:
        """Take in a reading; `used` sandboxes are in use, `waiting` are asked for beyond those."""
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
    """How near each resource that the host tells of is to its mark."""
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
        found.append(
            _measure_scarcity("processes", metrics.processes_free, config.processes_free, "free", str)
        )
    return found


def memory_reserve(total: int | None) -> int:
    """The memory that is kept free where nothing is configured: bytes."""
    return MEMORY_MOST if total is None else min(MEMORY_MOST, int(total * MEMORY_SHARE))


def _measure_cpu(metrics: HostMetrics, config: PressureConfig) -> list[ResourcePressure]:
    if metrics.cpu_stall is not None or metrics.load is None:
        return _measure_stall("cpu", "some", metrics.cpu_stall, config.cpu_percent)
    load, mark = metrics.load / metrics.cpus, config.load_per_cpu
    text = f"cpu: load {load:.1f} for each processor"
    return [
        ResourcePressure(
            "cpu", load / mark, f"{text} > {mark:.1f}", f"{text}, not yet below {mark * RELEASE:.1f}"
        )
    ]


def _measure_stall(
    resource: Resource, kind: str, percent: float | None, mark: float
) -> list[ResourcePressure]:
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
