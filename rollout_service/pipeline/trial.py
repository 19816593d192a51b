"""One episode of an environment outside the service: for its author's tests, and to try it out.

Guarantee: the steps are the pipeline's, in the same order, without its queues, deadlines and retries.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic import JsonValue

from api_schemas.rollouts import RolloutRequest, StopReason
from api_schemas.tasks import Task
from rollout_service.environments.contract import Environment, EnvironmentSpec, EvaluateIn
from rollout_service.episodes import SANDBOX_ENDED_SCORE, Episode, Policy, Score
from rollout_service.pipeline.artifacts import Artifacts
from rollout_service.pipeline.sandbox_source import SandboxSource
from sandboxes import Sandbox
from sandboxes.sessions.opening import open_sessions


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of a trial."""

    score: Score
    stop_reason: StopReason
    episode: Episode


async def play(
    environment: Environment,
    instance: dict[str, JsonValue],
    policy: Policy,
    sandboxes: SandboxSource,
) -> Trial:
    """Check an instance, set it up, run the agent with the policy, and score the outcome.

    Errors of the environment, the policy or a sandbox are raised as they are.
    """
    environment.check(instance)
    spec = environment.spec
    request = RolloutRequest(rollout_id="trial", task=Task(environment=spec.name, instance=instance))
    episode = Episode(request=request, attempt=1, limits=spec.limits, policy=policy)
    async with _sandbox(spec, episode, sandboxes) as sandbox:
        if sandbox is not None:
            await open_sessions(sandbox, spec.sessions)
        await environment.init(episode)
        stop_reason = await environment.run(episode)
        if spec.evaluate_in is EvaluateIn.SAME:
            return Trial(await _score_in_place(environment, episode, sandboxes), stop_reason, episode)
        taken = spec.evaluate_in is EvaluateIn.FRESH and episode.sandbox is not None
        artifacts = await sandboxes.pack(episode.sandbox, spec) if taken and episode.sandbox else None
        episode.notes += artifacts.notes if artifacts else []
    episode.sandbox = None
    if spec.evaluate_in is EvaluateIn.NONE or artifacts is None:
        return Trial(await environment.evaluate(episode), stop_reason, episode)
    try:
        if spec.runs_submission:
            async with _sandbox(spec, episode, sandboxes, artifacts):
                await environment.execute(episode)
        async with _sandbox(spec, episode, sandboxes, artifacts):
            return Trial(await environment.evaluate(episode), stop_reason, episode)
    finally:
        await artifacts.close()


async def _score_in_place(environment: Environment, episode: Episode, sandboxes: SandboxSource) -> Score:
    """Score in the agent's own sandbox, unless that has ended."""
    if not await _end_agent(episode, sandboxes):
        return SANDBOX_ENDED_SCORE
    if environment.spec.runs_submission:
        await environment.execute(episode)
        if not await _end_agent(episode, sandboxes):
            return SANDBOX_ENDED_SCORE
    return await environment.evaluate(episode)


async def _end_agent(episode: Episode, sandboxes: SandboxSource) -> bool:
    return episode.sandbox is None or await sandboxes.end_agent(episode.sandbox, episode.notes)


@asynccontextmanager
async def _sandbox(
    spec: EnvironmentSpec, episode: Episode, sandboxes: SandboxSource, artifacts: Artifacts | None = None
) -> AsyncIterator[Sandbox | None]:
    """Yield the episode's sandbox with the artifacts, or None if its environment needs no sandbox."""
    if spec.image is None:
        yield None
        return
    async with await sandboxes.start(spec, "trial") as sandbox:
        episode.sandbox = sandbox
        if artifacts is not None:
            await sandboxes.unpack(sandbox, artifacts)
        yield sandbox
