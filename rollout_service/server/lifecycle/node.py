"""Makes what works through rollouts and runs, and lets it begin: this node in its cluster, its pipeline, its runs.

Guarantees: the pipeline claims nothing before this node has joined, and has handed back what it held before the node
leaves; this node leads the runs only while its pipeline works.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import anyio.to_thread
import structlog

from rollout_service.cluster.concurrency import Concurrency
from rollout_service.cluster.leadership import RETENTION_ROLE, RUNS_ROLE, Leadership
from rollout_service.cluster.membership import Membership
from rollout_service.cluster.placement import Placement
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.groups import FilterRegistry
from rollout_service.observability.telemetry.nodes import NodeMetrics
from rollout_service.pipeline.claims import ClaimRules
from rollout_service.pipeline.context import AttemptContext, Stages
from rollout_service.pipeline.pipeline import Pipeline
from rollout_service.runs import RunManager
from rollout_service.runs.tasks.dataset import reopening
from rollout_service.server.events import StateWatcher
from rollout_service.server.hangs import HangWatch
from rollout_service.server.lifecycle.foundation import Foundation
from rollout_service.server.lifecycle.membership import ClusterMember
from rollout_service.settings import PipelineSettings
from rollout_service.store.runs_contract import RetentionPolicy

log = structlog.get_logger(__name__)


async def make_member(
    foundation: Foundation, serving: PolicyServing, context: AttemptContext
) -> ClusterMember:
    """Make this node's member of its cluster, with a pipeline and a run manager that have not begun.

    Raises:
        ConfigurationError: The settings name a filter that cannot be used.
    """
    settings, environments = foundation.settings, foundation.environments
    claims = ClaimRules(one.spec.name for one in environments.list())
    pipeline = Pipeline(context, settings.pipeline, claims)
    return ClusterMember(
        settings=settings,
        cluster=foundation.store.cluster,
        owner=foundation.owner,
        node=foundation.node,
        placement=Placement(environments, foundation.sandboxes, settings.cluster.labels),
        claims=claims,
        pipeline=pipeline,
        manager=await _make_run_manager(foundation, serving),
        stages=(context.stages.init, context.stages.rollout),
    )


async def _make_run_manager(foundation: Foundation, serving: PolicyServing) -> RunManager:
    """Make the run manager with all filters; log those that cannot be used."""
    filters = await anyio.to_thread.run_sync(FilterRegistry.load)
    for name, problem in filters.problems.items():
        log.error("a filter cannot be used", name=name, error=str(problem), hint=problem.hint)

    def pool_version(pool: str) -> int:
        return max((view.weight_version for view in serving.views() if view.pool == pool), default=0)

    keep = foundation.settings.retention
    return RunManager(
        foundation.store,
        filters,
        places=_places(foundation.settings.pipeline),
        reopen=reopening(foundation.environments.get),
        pool_version=pool_version,
        metrics=foundation.metrics,
        retention=RetentionPolicy(keep.ended_run_seconds, keep.settled_group_seconds, keep.rollout_seconds),
    )


def _places(stages: PipelineSettings) -> int:
    """Return how many rollouts can be in progress before their evaluation."""
    return stages.init_queue + stages.init_workers + stages.rollout_queue + stages.rollout_workers


def make_concurrency(foundation: Foundation, stages: Stages, manager: RunManager) -> Concurrency:
    """Make what changes how much this node runs at once, and tells the run manager."""

    def on_change(pipeline: PipelineSettings) -> None:
        # Of nodes that share a store, the next heartbeat tells the leader, wherever it is.
        if not foundation.store.cluster.is_shared:
            manager.resize(_places(pipeline))

    return Concurrency(stages, foundation.node, foundation.settings, on_change)


async def begin_work(
    stack: AsyncExitStack,
    foundation: Foundation,
    serving: PolicyServing,
    member: ClusterMember,
    hangs: HangWatch,
) -> Membership:
    """Join the cluster, and work until the stack is closed."""
    membership = member.membership()
    await stack.enter_async_context(membership.joined())
    await stack.enter_async_context(hangs.running())  # also while the pipeline ends
    await stack.enter_async_context(member.pipeline.running())
    claims = member.claims
    await _watch_states(
        stack,
        StateWatcher(
            foundation.announcer.announce,
            foundation.node,
            backends=serving.views,
            claims=lambda: claims.is_open,
        ),
    )
    leadership = Leadership(member.cluster, member.owner)
    foundation.metrics.registry.register(NodeMetrics(lambda: membership.beat, lambda: leadership.leases))
    manager = member.manager
    await stack.enter_async_context(
        leadership.leading({RUNS_ROLE: manager.manage, RETENTION_ROLE: manager.prune})
    )
    return membership


async def _watch_states(stack: AsyncExitStack, watcher: StateWatcher) -> None:
    tasks = await stack.enter_async_context(anyio.create_task_group())
    stack.callback(tasks.cancel_scope.cancel)
    tasks.start_soon(watcher.run)
