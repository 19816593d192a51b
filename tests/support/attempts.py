"""The context of attempts, as the service makes it, but with parts that a test chooses."""

from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.pipeline.context import AttemptContext
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.server.lifecycle.startup import make_stages
from rollout_service.settings import PipelineSettings
from rollout_service.store import Store
from sandboxes import SandboxProvider
from sandboxes.config import PressureConfig
from sandboxes.scheduling.admission import AdmissionController
from sandboxes.scheduling.host_metrics import HostReader
from sandboxes.scheduling.pressure import PressureController


def unlimited_admission(ceiling: int) -> AdmissionController:
    """Return an admission controller that considers only its ceiling."""
    controller = PressureController(PressureConfig(enabled=False), ceiling, cpus=1)
    return AdmissionController(controller, HostReader().read, ceiling=ceiling)


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
