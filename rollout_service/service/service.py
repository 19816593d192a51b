"""The running service, as the routes see it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio

from api_schemas.errors import FieldError, sentences
from api_schemas.inference import BackendState
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from rollout_service.cluster.concurrency import Concurrency
from rollout_service.cluster.node import Node
from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.errors import InvalidFieldError, NotFoundError, prefix_field_paths
from rollout_service.pipeline.pipeline import Pipeline
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.policies.serving import PolicyServing
from rollout_service.runs import Delivery
from rollout_service.runs.api import RunService
from rollout_service.runs.export import RunExporter
from rollout_service.runs.rescore import Rescorer
from rollout_service.settings import Settings
from rollout_service.shutdown import Shutdown
from rollout_service.store.contract import Store
from rollout_service.telemetry.metrics import Metrics
from sandboxes.errors import ImageError, SandboxConfigError


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of the service that the routes use, and the operations that span several of them."""

    settings: Settings
    store: Store
    pipeline: Pipeline
    environments: EnvironmentRegistry
    sandboxes: SandboxSource
    node: Node
    concurrency: Concurrency
    serving: PolicyServing
    metrics: Metrics
    run_service: RunService
    delivery: Delivery
    run_exporter: RunExporter
    rescorer: Rescorer
    shutdown: Shutdown

    async def submit(self, request: RolloutRequest) -> Rollout:
        """Check a request and store it, which makes it durable.

        Raises:
            InvalidFieldError: A field cannot be used.
            NoBackendError: The pool has no backend and expects none.
            ConflictError: Another request has the same id.
            StoreError: The store cannot be written.
        """
        with prefix_field_paths("body.task"):
            environment = self.environments.get(request.task.environment)
            environment.check(request.task.instance)
            await check_image(self.sandboxes, environment.spec)
        self.serving.check(request.pool)
        rollout, _ = await self.store.submit(request)
        return rollout

    async def get(self, rollout_id: str, *, trajectory: bool = False) -> Rollout:
        """Return a rollout in its present state.

        Raises:
            NotFoundError: There is no rollout with this id.
        """
        rollout = await self.store.get(rollout_id)
        if rollout is None:
            raise NotFoundError(
                f"there is no rollout {rollout_id}", hint="List the known rollouts with GET /v1/rollouts."
            )
        if trajectory and rollout.state.terminal:
            rollout = rollout.model_copy(update={"trajectory": await self.store.trajectory(rollout_id)})
        return rollout

    async def wait(self, rollout_id: str, seconds: float) -> Rollout | None:
        """Return the whole result once the rollout has ended, or None if that takes longer.

        Raises:
            ShuttingDownError: The shutdown began first.
        """

        async def ended() -> Rollout:
            await self.store.wait_for_result(rollout_id)
            return await self.get(rollout_id, trajectory=True)

        with anyio.move_on_after(seconds):
            return await self.shutdown.until_begun(ended)
        return None

    async def abort(self, rollout_ids: list[str] | None) -> list[str]:
        """Cancel these rollouts, or all that have not ended; return the ids of those to be cancelled."""
        if rollout_ids is None:
            rollout_ids = [rollout_id async for rollout_id in self._unfinished()]
        for rollout_id in rollout_ids:
            await self.store.cancel(rollout_id)
        return rollout_ids

    async def _unfinished(self) -> AsyncIterator[str]:
        for state in [state for state in RolloutState if not state.terminal]:
            cursor: str | None = None
            while True:
                page = await self.store.list(state=state, cursor=cursor, limit=1_000)
                for rollout in page.rollouts:
                    yield rollout.rollout_id
                if (cursor := page.next_cursor) is None:
                    break

    def warnings(self) -> list[str]:
        """Return the problems that do not keep the service from working."""
        problems = self.environments.problems.items()
        return [f"an environment cannot be used: {where}: {problem}" for where, problem in problems]

    def unready(self) -> list[str]:
        """Return the reasons why the service cannot take work, each with a remedy; empty if it can."""
        reasons = [f"the service is shutting down: {self.shutdown.reason}"] if self.shutdown.begun else []
        if not any(view.state is BackendState.READY for view in self.serving.views()):
            reasons.append(
                "no backend is in service; register one with POST /v1/backends or resume its pool."
                + "".join(f" {sentence}" for sentence in self.serving.absences())
            )
        if (problem := self.store.problem) is not None:
            reasons.append(sentences(str(problem), problem.hint))
        if not self.pipeline.started:
            reasons.append("the pipeline is stopped; POST /start begins rollouts again")
        return reasons


async def check_image(sandboxes: SandboxSource, spec: EnvironmentSpec) -> None:
    """Check that the image of an environment can be used.

    Raises:
        InvalidFieldError: The image cannot be used.
    """
    try:
        await sandboxes.check(spec)
    except (ImageError, SandboxConfigError) as error:
        raise InvalidFieldError(
            [FieldError(path="environment", message=f"its image cannot be used: {error}")],
            hint=error.hint,
        ) from error
