"""This host as the service uses it: its sandboxes, those kept warm, and how many of them it bears.

Guarantees: within `running` the governor follows the host's pressure, the pool refills itself, and what goes out of
sandboxes is counted; when it is left no warm sandbox lives on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from socket import gethostname
from typing import Self

from api_schemas.nodes import EgressView, HoldView, NodeView, PressureView
from rollout_service.settings import Settings
from rollout_service.telemetry.egress import EgressMeter
from rollout_service.telemetry.metrics import Metrics
from sandboxes import SandboxProvider
from sandboxes.scheduling.admission import Governor
from sandboxes.scheduling.host_metrics import HostReader
from sandboxes.scheduling.pressure import Controller, Reading
from sandboxes.scheduling.warm_pool import WarmPool


@dataclass(frozen=True, slots=True)
class Node:
    """The sandboxes of this host."""

    cpus: int
    governor: Governor
    pool: WarmPool
    egress: EgressMeter

    @classmethod
    def make(cls, provider: SandboxProvider, settings: Settings, metrics: Metrics) -> Self:
        """Put a pool and a governor before a provider. Nothing is started."""
        ceiling, wanted = settings.sandbox_ceiling, settings.sandboxes
        folders = [settings.state_dir, settings.sandbox.run_dir or Path("/tmp")]  # noqa: S108 - its space is read
        reader = HostReader([folder.expanduser().absolute() for folder in folders])
        governor = Governor(
            Controller(wanted.pressure, ceiling, reader.cpus), reader.read, ceiling=ceiling, observer=metrics
        )
        pool = WarmPool(
            provider,
            wanted.warm,
            ceiling=ceiling,
            room=governor.room,
            promised=lambda: governor.used,
            observer=metrics,
        )
        metrics.watch_sandboxes(
            {
                "in_use": lambda: governor.used,
                "warm": lambda: pool.warm,
                "waiting": lambda: governor.waiting,
                "target": lambda: governor.target,
                "ceiling": lambda: governor.ceiling,
                "lingering": lambda: pool.lingering,
            }
        )
        egress = EgressMeter(provider)
        metrics.watch_egress(lambda: egress.counts)
        return cls(reader.cpus, governor, pool, egress)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the pressure and keep sandboxes warm until the block is left."""
        async with self.governor.running(), self.pool.running(), self.egress.running():
            yield

    def resize(self, ceiling: int) -> None:
        """Change how many sandboxes may be alive; none is ended for it but warm ones."""
        self.governor.resize(ceiling)
        self.pool.resize(ceiling)

    def free_bytes(self) -> dict[str, int]:
        """Return the free space, as last read, of the file systems with the sandboxes and the state."""
        reading = self.governor.reading
        return {disk.path: disk.free_bytes for disk in reading.disks} if reading else {}

    def view(self) -> NodeView:
        """How it stands."""
        governor, reading = self.governor, self.governor.reading
        return NodeView(
            node=gethostname(),
            cpus=self.cpus,
            memory_bytes=reading.memory_total if reading else None,
            provider=self.pool.name,
            enforced=sorted(self.pool.enforced),
            live=len(self.pool.live()),
            in_use=governor.used,
            warm=self.pool.warm,
            waiting=governor.waiting,
            target=governor.target,
            ceiling=governor.ceiling,
            holds=[HoldView(resource=hold.resource, reason=hold.text) for hold in governor.holds],
            pressure=_pressure(reading) if reading else None,
            breaches=dict(self.pool.limit_violations),
            egress=EgressView(**asdict(self.egress.counts)),
        )


def _pressure(reading: Reading) -> PressureView:
    return PressureView(
        load=reading.load,
        cpu_percent=reading.cpu_stall,
        memory_percent=reading.memory_stall,
        io_percent=reading.io_stall,
        memory_available_bytes=reading.memory_available,
        disk_free_bytes={disk.path: disk.free_bytes for disk in reading.disks},
        descriptors_free=reading.descriptors_free,
        processes_free=reading.processes_free,
    )
