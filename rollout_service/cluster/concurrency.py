"""How much of everything is done at once on this node, changed while it works.

Guarantees: a larger figure takes effect at once; a smaller one ends nothing, and is reached as what is under way ends;
a change is whole: one that is refused changes nothing. The settings file stays as it is, and counts at the next start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from socket import gethostname

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
    """The stages and sandboxes of this node, and what they were set to."""

    stages: Stages
    node: Node
    settings: Settings
    on_change: Callable[[PipelineSettings], None]
    """Told of the stages' figures after a change."""

    def view(self) -> NodeConcurrency:
        """Return the figures that hold now."""
        admission = self.node.admission
        return NodeConcurrency(
            node=gethostname(),
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
        """Change what the patch names, and return the figures that hold then.

        A ceiling that was never set follows what the stages can hold.
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
