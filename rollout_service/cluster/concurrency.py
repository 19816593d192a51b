"""The concurrency of this node, which can be changed while it works.

Guarantees: an increase takes effect at once; a decrease ends nothing, and is reached as work in progress ends; a
rejected change changes nothing. The settings file is not written, and applies again at the next start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from api_schemas.nodes import NodeConcurrency, NodePatch, SandboxCeiling, StageConcurrency
from api_schemas.rollouts import Stage
from rollout_service.cluster.node import Node
from rollout_service.pipeline.context import Stages
from rollout_service.pipeline.stage import StageLimiter
from rollout_service.settings import PipelineSettings, Settings

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Concurrency:
    """The stages and sandboxes of this node, and their settings."""

    stages: Stages
    node: Node
    settings: Settings
    on_change: Callable[[PipelineSettings], None]
    """Called with the stages' settings after a change."""

    def view(self) -> NodeConcurrency:
        """Return the present concurrency."""
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
        """Apply a patch, and return the resulting concurrency.

        A ceiling that was never set follows the number of sandboxes that the stages can hold.
        """
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
            limiter.resize(
                places=getattr(pipeline, f"{stage}_queue"), workers=getattr(pipeline, f"{stage}_workers")
            )
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
