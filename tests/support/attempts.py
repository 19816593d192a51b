"""The context of attempts, as the service makes it, but with parts that a test chooses."""

from collections.abc import Callable

import anyio

from api_schemas.rollouts import RolloutRequest
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.engines.serving.turn_log import TurnLog
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.episodes import Policy
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.pipeline.context import AttemptContext
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.server.lifecycle.startup import make_stages
from rollout_service.settings import PipelineSettings
from rollout_service.store import Store
from rollout_service.tokens import ToolSpec
from sandboxes import SandboxProvider
from sandboxes.config import PressureConfig
from sandboxes.scheduling.admission import AdmissionController
from sandboxes.scheduling.host_metrics import HostReader
from sandboxes.scheduling.pressure import PressureController


def unlimited_admission(ceiling: int) -> AdmissionController:
    """Return an admission controller that considers only its ceiling."""
    controller = PressureController(PressureConfig(enabled=False), ceiling, cpus=1)
    return AdmissionController(controller, HostReader().read, ceiling=ceiling)


class OpenedPolicies:
    """Policies that a function opens for their tools and saved turns, with a record of those that are open."""

    def __init__(self, opens: Callable[[list[ToolSpec], TurnLog | None], Policy], *pools: str) -> None:
        self.opens = opens
        self.open_ids: set[str] = set()
        self._pools = frozenset(pools or ("policy",))
        self._changed = anyio.Event()

    def in_service(self) -> tuple[frozenset[str], anyio.Event]:
        return self._pools, self._changed

    def serve(self, *pools: str) -> None:
        """Put exactly these pools in service."""
        self._pools = frozenset(pools)
        self._changed.set()
        self._changed = anyio.Event()

    async def open(self, request: RolloutRequest, tools: list[ToolSpec], turns: TurnLog | None = None) -> Policy:
        policy = self.opens(tools, turns)
        self.open_ids.add(request.rollout_id)
        return policy

    def model(self, pool: str) -> str:
        return pool

    def close(self, request: RolloutRequest) -> None:
        self.open_ids.discard(request.rollout_id)


def attempt_context(
    store: Store,
    provider: SandboxProvider,
    environments: EnvironmentRegistry,
    policies: PolicyServing,
    settings: PipelineSettings,
    admission: AdmissionController | None = None,
) -> AttemptContext:
    """Return a context without engines."""
    metrics = Metrics()
    return AttemptContext(
        owner="here",
        store=store,
        stages=make_stages(settings, metrics),
        environments=environments,
        sandboxes=SandboxSource(provider),
        policies=policies,
        admission=admission or unlimited_admission(1_000),
        metrics=metrics,
        max_attempts=settings.max_attempts,
    )
