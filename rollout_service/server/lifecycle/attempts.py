"""Opens what attempts work with, and what records them: their steps, their turns, and traces."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

from api_schemas.rollouts import Stage
from rollout_service.activity import ActivityBoard
from rollout_service.base.shutdown import Shutdown
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.observability.telemetry.parallel import SlotMetrics
from rollout_service.observability.tracing.otel.opening import tracing
from rollout_service.observability.tracing.steps import StepArchive, StepWriter
from rollout_service.pipeline.context import AttemptContext, Stages
from rollout_service.pipeline.stage import StageLimiter
from rollout_service.pipeline.subagents.fair_slots import FairSlots
from rollout_service.pipeline.turns.writer import TurnWriter
from rollout_service.server.lifecycle.engines import EngineContext
from rollout_service.server.lifecycle.foundation import Foundation
from rollout_service.settings import PipelineSettings


@dataclass(frozen=True, slots=True)
class Attempts:
    """What attempts work with, and the record of what they did."""

    context: AttemptContext
    steps: StepArchive


async def open_attempts(
    stack: AsyncExitStack, foundation: Foundation, engines: EngineContext, shutdown: Shutdown
) -> Attempts:
    """Open what attempts work with.

    Raises:
        ConfigurationError: The environment's variables ask for traces that cannot be exported.
    """
    settings, store, metrics = foundation.settings, foundation.store, foundation.metrics
    activities, step_writer = ActivityBoard(), StepWriter(store)
    activities.observe(step_writer)
    await stack.enter_async_context(step_writer.running())
    slots = FairSlots(settings.pipeline.subagent_slots)
    metrics.registry.register(SlotMetrics(lambda: slots.held, lambda: slots.waiting, slots.total))
    await stack.enter_async_context(
        tracing(activities, metrics.registry, settings.node_name, engines.serving.views)
    )
    context = AttemptContext(
        owner=foundation.owner,
        store=store,
        stages=make_stages(settings.pipeline, metrics),
        environments=foundation.environments,
        sandboxes=foundation.sandboxes,
        policies=engines.serving,
        admission=foundation.node.admission,
        metrics=metrics,
        max_attempts=settings.pipeline.max_attempts,
        turn_writer=await _open_turn_writer(stack, foundation) if settings.pipeline.resume else None,
        gateway=engines.gateway,
        judge=engines.judge,
        sampler=engines.sampler,
        subagent_slots=slots,
        activities=activities,
        is_stopping=lambda: shutdown.begun,
    )
    return Attempts(context, StepArchive(store, activities, step_writer))


def make_stages(settings: PipelineSettings, metrics: Metrics) -> Stages:
    """Make the limiters of the three stages."""
    limiters = {
        stage: StageLimiter(
            stage,
            places=getattr(settings, f"{stage}_queue"),
            workers=getattr(settings, f"{stage}_workers"),
            metrics=metrics,
        )
        for stage in Stage
    }
    return Stages(
        init=limiters[Stage.INIT], rollout=limiters[Stage.ROLLOUT], evaluate=limiters[Stage.EVALUATE]
    )


async def _open_turn_writer(stack: AsyncExitStack, foundation: Foundation) -> TurnWriter:
    writer = TurnWriter(foundation.store, foundation.owner, foundation.metrics)
    await stack.enter_async_context(writer.running())
    return writer
