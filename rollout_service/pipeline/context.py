"""The parts of the service that attempts work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rollout_service.activity import ActivityBoard
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.gateway.external import ExternalAgents
from rollout_service.gateway.gateway import Gateway
from rollout_service.judging.contract import Judge, TextSampler
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.pipeline.fair_slots import DEFAULT_SUBAGENT_SLOTS, FairSlots
from rollout_service.pipeline.pauses import Pauser
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.saved_sandboxes import SavedSandboxes
from rollout_service.pipeline.shared_setup import SharedSetups
from rollout_service.pipeline.stage import StageLimiter
from rollout_service.pipeline.turn_writer import TurnWriter
from rollout_service.store.contract import Store
from sandboxes.scheduling.admission import AdmissionController


@dataclass(frozen=True, slots=True)
class Stages:
    init: StageLimiter
    rollout: StageLimiter
    evaluate: StageLimiter


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    stages: Stages
    sandboxes: SandboxSource
    admission: AdmissionController
    metrics: Metrics
    max_attempts: int
    setups: SharedSetups | None = None
    """None if each rollout prepares its own, as in a trial."""
    pauser: Pauser | None = None
    """None if sandboxes always run, as in a trial."""
    saved_sandboxes: SavedSandboxes | None = None
    """None if interrupted rollouts run their tools again, and in a trial."""
    policies: PolicyServing | None = None
    """For sub-agents; None in a trial without engines."""
    judge: Judge | None = None
    """None in a trial."""
    sampler: TextSampler | None = None
    """Samples from other pools; None in a trial."""
    subagent_slots: FairSlots = field(default_factory=lambda: FairSlots(DEFAULT_SUBAGENT_SLOTS))
    """For sub-agents at work, over all episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptContext(EpisodeContext):
    owner: str
    store: Store
    environments: EnvironmentRegistry
    policies: PolicyServing
    turn_writer: TurnWriter | None = None
    """None if interrupted rollouts begin anew."""
    gateway: Gateway | None = None
    external: ExternalAgents = field(default_factory=ExternalAgents)
    activities: ActivityBoard = field(default_factory=ActivityBoard)
    is_stopping: Callable[[], bool] = lambda: False
