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
    """The parts that an episode passes its stages with."""

    stages: Stages
    sandboxes: SandboxSource
    admission: AdmissionController
    metrics: Metrics
    max_attempts: int
    setups: SharedSetups | None = None
    """The setups that rollouts share; None if each prepares its own, as in a trial."""
    pauser: Pauser | None = None
    """Pauses sandboxes; None if they always run, as in a trial."""
    saved_sandboxes: SavedSandboxes | None = None
    """Saves sandboxes; None if interrupted rollouts run their tools again, and in a trial."""
    policies: PolicyServing | None = None
    """Opens the conversations of sub-agents; None in a trial without engines."""
    judge: Judge | None = None
    """Judges answers; None if there is none, as in a trial."""
    sampler: TextSampler | None = None
    """Samples from other pools; None if there is none, as in a trial."""
    subagent_slots: FairSlots = field(default_factory=lambda: FairSlots(DEFAULT_SUBAGENT_SLOTS))
    """The places of sub-agents at work, over all episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptContext(EpisodeContext):
    """The parts of the service that every attempt shares."""

    owner: str
    store: Store
    environments: EnvironmentRegistry
    policies: PolicyServing
    turn_writer: TurnWriter | None = None
    """Saves turns; None if interrupted rollouts begin anew."""
    gateway: Gateway | None = None
    """Lets programs drive the policy; None if there is none."""
    external: ExternalAgents = field(default_factory=ExternalAgents)
    """The agents that run elsewhere."""
    activities: ActivityBoard = field(default_factory=ActivityBoard)
    """The steps of the attempts under way."""
    is_stopping: Callable[[], bool] = lambda: False
    """Whether the service has begun to end."""
