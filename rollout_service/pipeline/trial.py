"""One episode of an environment outside the service: for its author's tests, and to try it out.

The episode passes the pipeline's own stages with its deadlines, but nothing is queued or tried again.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from pydantic import JsonValue

from api_schemas.rollouts import RolloutRequest, Stage, StopReason
from api_schemas.tasks import Task
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.engines.serving.session import without_secrets
from rollout_service.environments.contract import Environment
from rollout_service.episodes import Episode, Policy, Score
from rollout_service.judging.contract import Judge, TextSampler
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.pipeline.context import EpisodeContext, Stages
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.shared_setup import SharedSetups
from rollout_service.pipeline.stage import Slot, StageLimiter
from rollout_service.pipeline.stage_runner import StageRunner
from rollout_service.tokens import ToolSpec
from sandboxes.config import PressureConfig
from sandboxes.scheduling.admission import AdmissionController
from sandboxes.scheduling.host_metrics import HostReader
from sandboxes.scheduling.pressure import PressureController

SANDBOXES = 64
"""At once, those of sub-agents included."""


@dataclass(frozen=True, slots=True)
class Trial:
    score: Score
    stop_reason: StopReason
    episode: Episode


@dataclass(frozen=True, slots=True)
class OtherModels:
    """Models that an environment uses besides the policy."""

    judge: Judge | None = None
    sampler: TextSampler | None = None
    policies: PolicyServing | None = None
    """For sub-agents."""


NO_MODELS = OtherModels()


async def play(
    environment: Environment,
    instance: dict[str, JsonValue],
    policy: Policy,
    sandboxes: SandboxSource,
    models: OtherModels = NO_MODELS,
    setups: SharedSetups | None = None,
) -> Trial:
    """Check an instance, set it up, run the agent, and score the outcome.

    With `setups`, trials of one instance share what its environment lets them share.

    Errors of the environment, the policy or a sandbox are raised as they are.
    """
    environment.check(instance)
    environment = environment.for_instance(instance)
    request = RolloutRequest(rollout_id="trial", task=Task(environment=environment.spec.name, instance=instance))
    runner = StageRunner(
        _context(sandboxes, models, setups),
        environment,
        request,
        _OnePolicy(policy),
        slot=Slot(),
        queued_at=time.perf_counter(),
    )
    try:
        score = await runner.run()
    finally:
        await runner.release()
    if runner.episode is None or runner.stop_reason is None:
        raise AssertionError("an episode that has a score has passed all stages")
    return Trial(score, runner.stop_reason, runner.episode)


class _OnePolicy:
    """Implements `PolicySource`."""

    gateway = None

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def open(self, tools: list[ToolSpec], hidden: Collection[str]) -> Policy:
        del tools
        return without_secrets(self._policy, hidden)

    async def end(self) -> None:
        pass

    def close(self) -> None:
        pass


def _context(sandboxes: SandboxSource, models: OtherModels, setups: SharedSetups | None) -> EpisodeContext:
    """Make room for one episode and its sub-agents, which nothing holds back."""
    metrics = Metrics()
    init, rollout, evaluate = (StageLimiter(stage, places=1, workers=1, metrics=metrics) for stage in Stage)
    controller = PressureController(PressureConfig(enabled=False), SANDBOXES, cpus=1)
    return EpisodeContext(
        stages=Stages(init, rollout, evaluate),
        sandboxes=sandboxes,
        setups=setups,
        admission=AdmissionController(controller, HostReader().read, ceiling=SANDBOXES),
        metrics=metrics,
        max_attempts=1,
        policies=models.policies,
        judge=models.judge,
        sampler=models.sampler,
    )
