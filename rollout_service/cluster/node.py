"""This host as the service uses it: its sandboxes, in use and warm, and how many it can bear.

Guarantees: within `running`, the admission controller follows the host's pressure, the pool refills itself, and the
traffic that leaves sandboxes is counted. No warm sandbox outlives the block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from api_schemas.nodes import EgressView, HoldView, NodeView, PressureView
from rollout_service.observability.telemetry.egress import EgressMeter
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.settings import Settings
from sandboxes import SandboxProvider
from sandboxes.scheduling.admission import AdmissionController
from sandboxes.scheduling.host_metrics import HostReader
from sandboxes.scheduling.pressure import HostMetrics, PressureController
from sandboxes.scheduling.warm_pool import WarmPool


@dataclass(frozen=True, slots=True)
class Node:
    """The sandboxes of this host."""

    name: str
    """Unique among the nodes that share the store."""
    cpus: int
    admission: AdmissionController
    pool: WarmPool
    egress: EgressMeter

    @classmethod
    def make(cls, provider: SandboxProvider, settings: Settings, metrics: Metrics) -> Self:
        """Return a node with a warm pool and an admission controller in front of a provider. Nothing is started."""
        ceiling, wanted = settings.sandbox_ceiling, settings.sandboxes
        folders = [settings.state_dir, settings.sandbox.run_dir or Path("/tmp")]  # noqa: S108 - its space is read
        reader = HostReader([folder.expanduser().absolute() for folder in folders])
        admission = AdmissionController(
            PressureController(wanted.pressure, ceiling, reader.cpus),
            reader.read,
            ceiling=ceiling,
            on_held_back=metrics.held_back,
        )
        pool = WarmPool(
            provider,
            wanted.warm,
            ceiling=ceiling,
            headroom=admission.headroom,
            promised=lambda: admission.used,
            observer=metrics,
        )
        metrics.watch_sandboxes(
            {
                "in_use": lambda: admission.used,
                "warm": lambda: pool.warm,
                "waiting": lambda: admission.waiting,
                "target": lambda: admission.target,
                "ceiling": lambda: admission.ceiling,
                "lingering": lambda: pool.lingering,
            }
        )
        egress = EgressMeter(provider)
        metrics.watch_egress(lambda: egress.counts)
        return cls(settings.node_name, reader.cpus, admission, pool, egress)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the host's pressure and keep sandboxes warm until the block is left."""
        async with self.admission.running(), self.pool.running(), self.egress.running():
            yield

    def resize(self, ceiling: int) -> None:
        """Change how many sandboxes may be alive; only warm ones are ended for it."""
        self.admission.resize(ceiling)
        self.pool.resize(ceiling)

    def free_bytes(self) -> dict[str, int]:
        """Return the free space, as last read, of the file systems with the sandboxes and the state."""
        metrics = self.admission.host_metrics
        return {disk.path: disk.free_bytes for disk in metrics.disks} if metrics else {}

    def view(self) -> NodeView:
        """Return the node's present state."""
        admission, metrics = self.admission, self.admission.host_metrics
        return NodeView(
            node=self.name,
            cpus=self.cpus,
            memory_bytes=metrics.memory_total if metrics else None,
            provider=self.pool.name,
            enforced=sorted(self.pool.enforced),
            live=len(self.pool.live()),
            in_use=admission.used,
            warm=self.pool.warm,
            waiting=admission.waiting,
            target=admission.target,
            ceiling=admission.ceiling,
            holds=[
                HoldView(resource=reason.resource, reason=reason.text) for reason in admission.hold_reasons
            ],
            pressure=_pressure(metrics) if metrics else None,
            breaches=dict(self.pool.limit_violations),
            egress=EgressView(**asdict(self.egress.counts)),
        )


def _pressure(metrics: HostMetrics) -> PressureView:
    return PressureView(
        load=metrics.load,
        cpu_percent=metrics.cpu_stall,
        memory_percent=metrics.memory_stall,
        io_percent=metrics.io_stall,
        memory_available_bytes=metrics.memory_available,
        disk_free_bytes={disk.path: disk.free_bytes for disk in metrics.disks},
        descriptors_free=metrics.descriptors_free,
        processes_free=metrics.processes_free,
    )
