"""The running service, as the routes see it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import anyio

from api_schemas.errors import sentences
from api_schemas.external import RolloutEnd
from api_schemas.inference import BackendState
from api_schemas.rollouts import BranchPoint, Rollout, RolloutRequest, RolloutState
from api_schemas.rollouts.trees import RolloutNodes
from api_schemas.tasks import Task
from rollout_service.base.errors import (
    ConflictError,
    InvalidFieldError,
    NotFoundError,
    ServiceError,
    StoreError,
    prefix_field_paths,
)
from rollout_service.base.shutdown import Shutdown
from rollout_service.base.signals import first_of
from rollout_service.cluster.membership import ClusterNodes
from rollout_service.cluster.node import Concurrency, Node
from rollout_service.engines.pool.pools import DEFAULT_POOL
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.engines.serving.subagent_pools import check_own_pool, check_subagent_pool, subagent_pools
from rollout_service.environments.contract import Environment, EnvironmentSpec
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.gateway.bounds import check_sampling
from rollout_service.gateway.external import ExternalAgents
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.observability.tracing.steps import StepArchive
from rollout_service.pipeline.branching import BranchError, check_branch, earlier_turns
from rollout_service.pipeline.pipeline import Pipeline
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.settlement import ClaimRules
from rollout_service.runs import Delivery
from rollout_service.runs.api import RunExporter, RunService
from rollout_service.runs.rescore import Rescorer
from rollout_service.server.events import EventTail
from rollout_service.server.hangs import HangWatch
from rollout_service.server.lifecycle.engines import Live
from rollout_service.server.lifecycle.foundation import ServiceClock
from rollout_service.server.lifecycle.membership import Suitability
from rollout_service.server.overview import OverviewFeed
from rollout_service.server.trajectories import TrajectoryViewer
from rollout_service.settings import Settings
from rollout_service.store.contract import Store, cancel_unfinished
from sandboxes.errors import ImageError, SandboxConfigError

COUNT_SECONDS = 1.0
"""A scrape waits for so long for a count of the store."""


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of the service that the routes use, and the operations that span several of them.

    Methods with a rollout's id raise `NotFoundError` if there is none.
    """

    settings: Settings
    store: Store
    pipeline: Pipeline
    environments: EnvironmentRegistry
    sandboxes: SandboxSource
    node: Node
    nodes: ClusterNodes
    suitability: Suitability
    claims: ClaimRules
    concurrency: Concurrency
    serving: PolicyServing
    external: ExternalAgents
    live: Live
    overview: OverviewFeed
    event_tails: Sequence[EventTail]
    trajectories: TrajectoryViewer
    hangs: HangWatch
    metrics: Metrics
    run_service: RunService
    delivery: Delivery
    run_exporter: RunExporter
    rescorer: Rescorer
    steps: StepArchive
    clock: ServiceClock
    shutdown: Shutdown

    async def submit(self, request: RolloutRequest) -> Rollout:
        """Store a request durably, whose `rollout_id` must be set; check it first, unless it is stored already.

        Raises:
            InvalidFieldError: A field cannot be used.
            NoBackendError: The pool has no backend and expects none.
            ConflictError: Another request has the same id.
            StoreError: The store cannot be written.
        """
        try:
            await self._check(request)
        except ServiceError:  # what it needs may be gone since it was submitted
            if await self.store.get(request.rollout_id or "") is None:
                raise
        rollout, _ = await self.store.submit(request)
        return rollout

    async def _check(self, request: RolloutRequest) -> None:
        check_sampling(request.sampling)
        with prefix_field_paths("body.task"):
            environment = await self._check_task(request.task)
        if environment is not None:
            check_own_pool(environment.spec, request.pool)
        self.serving.check(request.pool)
        if request.branch_of is not None:
            await self._check_branch(request, request.branch_of, environment)

    async def _check_branch(
        self, request: RolloutRequest, branch: BranchPoint, environment: Environment | None
    ) -> None:
        try:
            if environment is not None:
                check_branch(request, environment)
            await earlier_turns(self.store, request, branch)
        except BranchError as error:
            field = ".".join(["body.branch_of", *filter(None, [error.field])])
            raise InvalidFieldError.at(field, str(error), hint=error.hint) from error

    async def _check_task(self, task: Task) -> Environment | None:
        """Check a task, and return its environment; None if only other nodes have that, which then check it."""
        if task.environment not in self.environments and self.suitability.runs_elsewhere(task.environment):
            return None
        environment = await check_environment_here(
            self.environments, self.sandboxes, self.suitability, task.environment
        )
        environment.check(task.instance)
        specific = environment.for_instance(task.instance)
        if specific is not environment and not self.suitability.runs_elsewhere(task.environment):
            await check_image(self.sandboxes, specific.spec)
        check_subagent_pool(specific.spec, self.serving.check)
        return specific

    async def get(self, rollout_id: str, *, trajectory: bool = False) -> Rollout:
        rollout = await self.store.get(rollout_id)
        if rollout is None:
            raise NotFoundError(
                f"there is no rollout {rollout_id}", hint="List the known rollouts with GET /v1/rollouts."
            )
        if trajectory and rollout.state.terminal:
            rollout = rollout.model_copy(update={"trajectory": await self.store.trajectory(rollout_id)})
            if rollout.nodes and (tree := await self.store.tree(rollout_id, trajectories=True)):
                rollout = rollout.model_copy(update={"nodes": tree.nodes})
        access = self.external.access(rollout_id)
        return rollout.model_copy(update={"access": access}) if access is not None else rollout

    async def tree(self, rollout_id: str, *, trajectories: bool = False) -> RolloutNodes:
        """Return the sub-agents of a rollout that has ended.

        Raises:
            NotFoundError: It has not ended.
        """
        tree = await self.store.tree(rollout_id, trajectories=trajectories)
        if tree is None:
            rollout = await self.get(rollout_id)
            if rollout.state.terminal:  # cancelled before it began
                return RolloutNodes(rollout_id=rollout_id, nodes=[])
            raise NotFoundError(
                f"rollout {rollout_id} has no record of sub-agents yet; its state is {rollout.state}",
                hint="Wait until the rollout has ended.",
            )
        return tree

    async def wait(self, rollout_id: str, seconds: float, *, trajectory: bool = True) -> Rollout | None:
        """Return the result; None if the rollout does not end in time.

        Raises:
            ShuttingDownError: The shutdown began first.
        """

        async def ended() -> Rollout:
            await self.store.wait_for_result(rollout_id)
            return await self.get(rollout_id, trajectory=trajectory)

        with anyio.move_on_after(seconds):
            return await self.shutdown.until_begun(ended)
        return None

    async def wait_for_access(self, rollout_id: str, seconds: float) -> Rollout:
        """Return a rollout once its program may begin, it has ended, or the time is over.

        Raises:
            ShuttingDownError: The shutdown began first.
        """

        async def may_begin() -> None:
            changed = self.external.changed.next
            while (rollout := await self.get(rollout_id)).access is None and not rollout.state.terminal:
                await first_of(changed.wait, partial(self.store.wait_for_result, rollout_id))
                changed = self.external.changed.next

        with anyio.move_on_after(seconds):
            await self.shutdown.until_begun(may_begin)
        return await self.get(rollout_id)

    async def end(self, rollout_id: str, end: RolloutEnd) -> Rollout:
        """Accept the report of a rollout's external agent, and return the rollout.

        Raises:
            NotFoundError: No program works on it at this service.
            ConflictError: The rollout or the attempt is over, or another end was reported before.
        """
        rollout = await self.get(rollout_id)
        if rollout.state.terminal and not self.external.has_accepted(rollout_id, end):
            raise ConflictError(
                f"rollout {rollout_id} has ended: it is {rollout.state}", hint="Read its result instead."
            )
        self.external.report(rollout_id, end)
        return rollout

    async def abort(self, rollout_ids: list[str] | None) -> list[str]:
        """Cancel these rollouts, or all that have not ended; return the ids of those to be cancelled."""
        if rollout_ids is None:
            return await cancel_unfinished(self.store)
        for rollout_id in rollout_ids:
            await self.store.cancel(rollout_id)
        return rollout_ids

    def warnings(self) -> list[str]:
        """Return problems that do not keep the service from working."""
        problems = self.environments.problems.items()
        unusable = [f"an environment cannot be used: {where}: {problem}" for where, problem in problems]
        lacking = [f"some rollouts will fail here: {why}" for why in self.sandboxes.secrets.lacking]
        waiting = self._default_pool() + self._waiting_for_subagents()
        return [
            *unusable,
            *lacking,
            *waiting,
            *self._missing_engines(),
            *self._failing_shards(),
            *self.live.training.delivery.warnings(),
            *self.clock.warnings(),
        ]

    def _missing_engines(self) -> list[str]:
        """Return a sentence per engine that was never in service, of the pools that others serve."""
        in_service, _ = self.serving.in_service()
        why = self.serving.waiting
        return [
            f"the engine {backend_id} could not be registered: {why[backend_id]}"
            for pool, backend_id in self.serving.awaited()
            if pool in in_service
        ]

    def _failing_shards(self) -> list[str]:
        """Return a sentence per failing shard; none if all fail, which is a reason."""
        failing, shards = self.store.failing, len(self.store.shards)
        if len(failing) == shards:
            return []
        return [
            f"the runs of shard {number} of {shards} wait: " + sentences(str(problem), problem.hint)
            for number, problem in failing.items()
        ]

    def _default_pool(self) -> list[str]:
        """Return a sentence if the default pool is out of service; no pool at all is a reason."""
        in_service, _ = self.serving.in_service()
        if not in_service or DEFAULT_POOL in in_service:
            return []
        return [
            f"rollouts and runs that name no pool wait: no backend of pool {DEFAULT_POOL!r} is in service; register "
            "one with POST /v1/backends." + "".join(f" {sentence}" for sentence in self.serving.absences(DEFAULT_POOL))
        ]

    def _waiting_for_subagents(self) -> list[str]:
        """Return a sentence per pool of sub-agents that was served, or will be, and is out of service."""
        in_service, _ = self.serving.in_service()
        waiting: dict[str, list[str]] = {}
        for name, pool in subagent_pools(self.environments.list()).items():
            if pool is not None and pool not in in_service and self.serving.expects(pool):
                waiting.setdefault(pool, []).append(name)
        return [
            f"rollouts of {', '.join(names)} wait: no backend of pool {pool!r}, which serves their sub-agents, is in "
            "service; register one with POST /v1/backends"
            for pool, names in waiting.items()
        ]

    async def count_queued(self) -> None:
        """Let a scrape show what waits in the store."""
        queued = math.nan
        with suppress(StoreError), anyio.move_on_after(COUNT_SECONDS):
            queued = (await self.store.counts()).get(RolloutState.QUEUED, 0)
        self.metrics.set_queued(queued)

    def unready(self) -> list[str]:
        """Return why the service cannot take work, with remedies; empty if it can."""
        reasons = [f"the service is shutting down: {self.shutdown.reason}"] if self.shutdown.begun else []
        pools, _ = self.serving.in_service()  # without those whose chat format is still being loaded
        views = self.serving.views()
        if not any(view.state is BackendState.READY and view.pool in pools for view in views):
            reasons.append(
                "no backend is in service; register one with POST /v1/backends or resume its pool."
                + "".join(f" {sentence}" for sentence in self.serving.absences())
            )
        problems = filter(None, (self.store.problem, self.live.store.problem))
        reasons += [sentences(str(problem), problem.hint) for problem in problems]
        if not self.pipeline.started:
            reasons.append("the pipeline is stopped; POST /start begins rollouts again")
        if not self.claims.is_open:
            name = self.node.name
            reasons.append(f"the node {name} is draining; POST /v1/nodes/{name}/resume ends that")
        return reasons


async def check_environment_here(
    environments: EnvironmentRegistry, sandboxes: SandboxSource, suitability: Suitability, name: str
) -> Environment:
    """Return an environment of this node if its rollouts can run here or at another node.

    Raises:
        InvalidFieldError: There is no such environment, its image cannot be used, or no node has its labels.
    """
    environment = environments.get(name)
    suitability.check(environment.spec)
    if not suitability.has_image_elsewhere(name):
        await check_image(sandboxes, environment.spec)
    return environment


async def check_image(sandboxes: SandboxSource, spec: EnvironmentSpec) -> None:
    try:
        await sandboxes.check(spec)
    except (ImageError, SandboxConfigError) as error:
        subject = "image cannot be used" if isinstance(error, ImageError) else "sandbox cannot be had here"
        raise InvalidFieldError.at("environment", f"its {subject}: {error}", hint=error.hint) from error
