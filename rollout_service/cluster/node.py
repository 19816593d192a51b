"""This host as the service uses it: its sandboxes, in use and warm, and how much it does at once.

Within `running`, the admission controller follows the host's pressure, the pool refills itself, and the traffic that
leaves sandboxes is counted. No warm sandbox outlives the block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import structlog

from api_schemas.nodes import (
    EgressView,
    HoldView,
    NodeConcurrency,
    NodePatch,
    NodeView,
    PressureView,
    SandboxCeiling,
    StageConcurrency,
)
from api_schemas.rollouts import Stage
from rollout_service.observability.telemetry.egress import EgressMeter
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.pipeline.context import Stages
from rollout_service.pipeline.stage import StageLimiter
from rollout_service.settings import PipelineSettings, Settings
from sandboxes import SandboxProvider
from sandboxes.scheduling.admission import AdmissionController
from sandboxes.scheduling.host_metrics import HostReader
from sandboxes.scheduling.pressure import HostMetrics, PressureController
from sandboxes.scheduling.warm_pool import WarmPool

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    """Unique among the nodes that share the store."""
    cpus: int
    admission: AdmissionController
    pool: WarmPool
    egress: EgressMeter

    @classmethod
    def make(cls, provider: SandboxProvider, settings: Settings, metrics: Metrics) -> Self:
        """Make a node, without starting anything."""
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
                "paused": lambda: sum(info.state == "paused" for info in provider.live()),
                "warm": lambda: pool.warm,
                "waiting": lambda: admission.waiting,
                "target": lambda: admission.target,
                "ceiling": lambda: admission.ceiling,
                "lingering": lambda: pool.lingering,
            }
        )
        egress = EgressMeter(provider)
        metrics.watch_egress(lambda: egress.counts)
        metrics.watch_use(lambda: pool.used_seconds)
        return cls(settings.node_name, reader.cpus, admission, pool, egress)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.admission.running(), self.pool.running(), self.egress.running():
            yield

    def resize(self, ceiling: int) -> None:
        """Change how many sandboxes may be alive; only warm ones are ended for it."""
        self.admission.resize(ceiling)
        self.pool.resize(ceiling)

    def free_bytes(self) -> dict[str, int]:
        """Return the space that was free when it was last read."""
        metrics = self.admission.host_metrics
        return {disk.path: disk.free_bytes for disk in metrics.disks} if metrics else {}

    def view(self) -> NodeView:
        admission, metrics = self.admission, self.admission.host_metrics
        return NodeView(
            node=self.name,
            cpus=self.cpus,
            memory_bytes=metrics.memory_total if metrics else None,
            provider=self.pool.name,
            enforced=sorted(self.pool.enforced),
            pausing=self.pool.pausing,
            live=len(self.pool.live()),
            in_use=admission.used,
            warm=self.pool.warm,
            waiting=admission.waiting,
            target=admission.target,
            ceiling=admission.ceiling,
            holds=[HoldView(resource=reason.resource, reason=reason.text) for reason in admission.hold_reasons],
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


@dataclass(slots=True)
class Concurrency:
    """The concurrency of this node, which can be changed while it works.

    An increase takes effect at once; a decrease ends nothing, and is reached as work in progress ends; a rejected
    change changes nothing. The settings file is not written, and applies again at the next start.
    """

    stages: Stages
    node: Node
    settings: Settings
    on_change: Callable[[PipelineSettings], None]

    def view(self) -> NodeConcurrency:
        admission = self.node.admission
        return NodeConcurrency(
            node=self.node.name,
            init=_view(self.stages.init),
            rollout=_view(self.stages.rollout),
            evaluate=_view(self.stages.evaluate),
            sandboxes=SandboxCeiling(
                ceiling=admission.ceiling,
                target=admission.target,
                in_use=admission.used,
                waiting=admission.waiting,
            ),
        )

    def change(self, patch: NodePatch) -> NodeConcurrency:
        """Apply a patch; a ceiling that was never set follows the number of sandboxes that the stages can hold."""
        named = {stage: getattr(patch, stage) for stage in Stage if getattr(patch, stage) is not None}
        figures = {
            f"{stage}_{name}": value
            for stage, change in named.items()
            for name, value in change.model_dump(exclude_none=True).items()
        }
        pipeline = self.settings.pipeline.model_copy(update=figures)
        sandboxes = self.settings.sandboxes
        if patch.sandboxes is not None and patch.sandboxes.ceiling is not None:
            sandboxes = sandboxes.model_copy(update={"ceiling": patch.sandboxes.ceiling})
        self.settings = self.settings.model_copy(update={"pipeline": pipeline, "sandboxes": sandboxes})
        for stage in Stage:
            limiter: StageLimiter = getattr(self.stages, stage)
            limiter.resize(places=getattr(pipeline, f"{stage}_queue"), workers=getattr(pipeline, f"{stage}_workers"))
        self.node.resize(self.settings.sandbox_ceiling)
        self.on_change(pipeline)
        log.info("concurrency changed", **figures, sandbox_ceiling=self.settings.sandbox_ceiling)
        return self.view()


def _view(limiter: StageLimiter) -> StageConcurrency:
    return StageConcurrency(
        workers=limiter.workers.size,
        queue=limiter.places.size,
        working=limiter.workers.in_use,
    )
