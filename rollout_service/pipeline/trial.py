"""One episode of an environment outside the service: for its author's tests, and to try it out.

Guarantee: the steps are the pipeline's, in the same order, without its queues, deadlines and retries.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anyio
from pydantic import JsonValue

from api_schemas.rollouts import RolloutRequest, StopReason
from api_schemas.tasks import Task
from rollout_service.base.masking import mask_error
from rollout_service.engines.serving.masked import without_secrets
from rollout_service.environments.contract import Environment, EnvironmentSpec, EvaluateIn
from rollout_service.environments.secrets import hide, initialize, mask_score
from rollout_service.episodes import SANDBOX_ENDED_SCORE, Episode, Policy, Score
from rollout_service.judging.contract import Judge, TextSampler
from rollout_service.pipeline.artifacts import Artifacts
from rollout_service.pipeline.context import PolicyFactory
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.subagents import TrialSubagents
from sandboxes import Sandbox
from sandboxes.sessions.opening import open_sessions


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of a trial."""

    score: Score
    stop_reason: StopReason
    episode: Episode


@dataclass(frozen=True, slots=True)
class OtherModels:
    """What an environment asks besides the policy; None where there is nothing."""

    judge: Judge | None = None
    sampler: TextSampler | None = None
    policies: PolicyFactory | None = None
    """What sub-agents are sampled from."""


NO_MODELS = OtherModels()


async def play(
    environment: Environment,
    instance: dict[str, JsonValue],
    policy: Policy,
    sandboxes: SandboxSource,
    models: OtherModels = NO_MODELS,
) -> Trial:
    """Check an instance, set it up, run the agent with the policy, and score the outcome.

    Errors of the environment, the policy or a sandbox are raised as they are.
    """
    environment.check(instance)
    environment = environment.for_instance(instance)
    spec = environment.spec
    request = RolloutRequest(rollout_id="trial", task=Task(environment=spec.name, instance=instance))
    hidden = sandboxes.secrets.check(spec)
    told = without_secrets(policy, hidden)
    episode = Episode(
        request=request,
        attempt=1,
        limits=spec.limits,
        policy=told,
        judge=models.judge,
        sampler=models.sampler,
        hidden=hidden,
    )
    subagents = None
    if spec.parallel is not None and models.policies is not None:
        episode.subagents = subagents = TrialSubagents(models.policies, sandboxes, request, spec, hidden)
    try:
        trial = await _play(environment, episode, sandboxes)
        episode.note_ended(trial.score.reward)
    except BaseException as error:
        mask_error(error, hidden)
        raise
    finally:
        hide(episode)
        if subagents is not None:
            subagents.close()
    return replace(trial, score=mask_score(trial.score, hidden))


async def _play(environment: Environment, episode: Episode, sandboxes: SandboxSource) -> Trial:
    spec = environment.spec
    kept: Artifacts | None = None

    async def keep() -> None:
        nonlocal kept
        kept = await sandboxes.keep(episode.require_sandbox(), spec, kept)

    episode.checkpoint = keep if spec.evaluate_in is EvaluateIn.FRESH else None
    async with _closing_on_error(lambda: kept), _sandbox(spec, episode, sandboxes) as sandbox:
        if sandbox is not None:
            await open_sessions(sandbox, frozenset() if spec.init_secrets else spec.sessions)
        await initialize(environment, episode, sandboxes.secrets)
        if (
            sandbox is not None and spec.init_secrets
        ):  # none may be open when the init command's processes are ended
            await open_sessions(sandbox, spec.sessions)
        stop_reason = await environment.run(episode)
        if spec.evaluate_in is EvaluateIn.SAME:
            return Trial(await _score_in_place(environment, episode, sandboxes), stop_reason, episode)
        taken = spec.evaluate_in is EvaluateIn.FRESH and episode.sandbox is not None
        artifacts = await sandboxes.pack(episode.sandbox, spec, kept) if taken and episode.sandbox else None
        if artifacts is not None:
            episode.notes += artifacts.notes
            episode.ended += artifacts.ended
    episode.sandbox = None
    hide(episode)
    if spec.evaluate_in is EvaluateIn.NONE or artifacts is None:
        sandboxes.secrets.give(episode, spec, "[evaluate]")
        return Trial(await environment.evaluate(episode), stop_reason, episode)
    try:
        if spec.runs_submission:
            async with _sandbox(spec.for_grader(), episode, sandboxes, artifacts):
                await environment.execute(episode)
        sandboxes.secrets.give(episode, spec, "[evaluate]")
        for number in range(len(artifacts.checkpoints)):
            async with _sandbox(spec.for_grader(), episode, sandboxes, artifacts, number):
                if not await environment.evaluate_checkpoint(episode, number):
                    break
        async with _sandbox(spec.for_grader(), episode, sandboxes, artifacts):
            return Trial(await environment.evaluate(episode), stop_reason, episode)
    finally:
        await artifacts.close()


@asynccontextmanager
async def _closing_on_error(kept: Callable[[], Artifacts | None]) -> AsyncIterator[None]:
    """Delete the checkpoints that there are if the block fails."""
    try:
        yield
    except BaseException:
        if (artifacts := kept()) is not None:
            with anyio.CancelScope(shield=True):
                await artifacts.close()
        raise


async def _score_in_place(environment: Environment, episode: Episode, sandboxes: SandboxSource) -> Score:
    """Score in the agent's own sandbox, unless that has ended."""
    if not await sandboxes.end_agent(episode, environment.spec):
        return SANDBOX_ENDED_SCORE
    if environment.spec.runs_submission:
        await environment.execute(episode)
        if not await sandboxes.end_agent(episode, environment.spec):
            return SANDBOX_ENDED_SCORE
    return await environment.evaluate(episode)


@asynccontextmanager
async def _sandbox(
    spec: EnvironmentSpec,
    episode: Episode,
    sandboxes: SandboxSource,
    artifacts: Artifacts | None = None,
    checkpoint: int | None = None,
) -> AsyncIterator[Sandbox | None]:
    """Yield the episode's sandbox with the artifacts, or None if its environment needs no sandbox."""
    if spec.image is None:
        yield None
        return
    async with await sandboxes.start(spec, "trial") as sandbox:
        episode.sandbox = sandbox
        if artifacts is not None:
            await sandboxes.unpack(sandbox, artifacts, checkpoint)
        yield sandbox
