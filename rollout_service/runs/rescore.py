"""Scores finished rollouts again, without inference of their policy.

No engine is called, unless the environment asks a judge; if the evaluation looks at a sandbox, the recorded tool calls
recreate it in the pipeline's own stages, within their limits and workers; sub-agents are those that were recorded and
never run again; a failure is reported with its rollout and stops no other. The store is not changed: the response has
the new reward next to the recorded one.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import anyio
import anyio.to_thread

from api_schemas.errors import ErrorInfo, FieldError
from api_schemas.exports import RecordedRollout, Rescored, RescoreOptions, RescoreRollouts, RescoreRun
from api_schemas.external import AgentKind
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Stage
from api_schemas.trajectories import Trajectory
from rollout_service.agents.parallel.tools import ASSIGN
from rollout_service.agents.tool_calling.agent import final_answer
from rollout_service.base.errors import InvalidFieldError, describe, prefix_field_paths
from rollout_service.base.masking import mask_info
from rollout_service.engines.serving.replay import NotReplayableError, RecordedPolicy
from rollout_service.engines.serving.session import without_secrets
from rollout_service.environments.contract import Environment, Replayable
from rollout_service.episodes import Episode, GatewayAccess, Policy, Score
from rollout_service.groups.auxiliary import rescored_parts
from rollout_service.judging.contract import Judge
from rollout_service.pipeline.context import AttemptContext
from rollout_service.pipeline.stage import ResizableSemaphore, Slot
from rollout_service.pipeline.stage_runner import StageRunner
from rollout_service.tokens import ToolSpec

T = TypeVar("T")
Load = Callable[[Sequence[T]], Awaitable[Sequence[RecordedRollout]]]

MAX_CONCURRENT = 16
"""Rollouts that are scored at once; the stages have limits of their own."""


class Rescorer:
    def __init__(self, context: AttemptContext, check_environment: Callable[[str], Awaitable[object]]) -> None:
        """`check_environment` raises InvalidFieldError if the named environment cannot be used."""
        self._context = context
        self._check_environment = check_environment
        self._places = ResizableSemaphore(MAX_CONCURRENT)
        """Places for replays, since the pipeline holds all its own before the init stage while it waits for work."""

    async def rescore_rollouts(self, order: RescoreRollouts) -> AsyncIterator[Rescored]:
        """Score the rollouts in the request, in their order.

        Raises:
            InvalidFieldError: The environment cannot be used; raised before the first rollout.
        """
        await self._check(order)
        return self._rescore_in_batches(order.rollouts, _return_given, order)

    async def rescore_run(self, run_id: str, order: RescoreRun) -> AsyncIterator[Rescored]:
        """Score rollouts of a run, in the order of their groups. Errors are raised before the first rollout.

        Raises:
            NotFoundError: There is no such run.
            InvalidFieldError: The run lacks a rollout that is asked for, or the environment cannot be used.
        """
        known = await self._context.store.runs.rollout_ids(run_id)
        available = set(known)
        chosen = known if order.rollout_ids is None else order.rollout_ids
        missing = [
            FieldError(path=f"body.rollout_ids.{index}", message=f"{rollout_id} is not in a closed group of {run_id}")
            for index, rollout_id in enumerate(chosen)
            if rollout_id not in available
        ]
        if missing:
            raise InvalidFieldError(missing, hint=f"List its rollouts with GET /v1/runs/{run_id}/export.")
        await self._check(order)
        return self._rescore_in_batches(chosen, self._context.store.runs.recorded_rollouts, order)

    async def _check(self, options: RescoreOptions) -> None:
        if options.environment is None:
            return
        with prefix_field_paths("body"):
            await self._check_environment(options.environment)

    async def _rescore_in_batches(
        self, chosen: Sequence[T], load: Load[T], options: RescoreOptions
    ) -> AsyncIterator[Rescored]:
        for first in range(0, len(chosen), MAX_CONCURRENT):
            recorded = await load(chosen[first : first + MAX_CONCURRENT])
            for rescored in await self._rescore_batch(recorded, options):
                yield rescored

    async def _rescore_batch(self, recorded: Sequence[RecordedRollout], options: RescoreOptions) -> list[Rescored]:
        results: dict[int, Rescored] = {}

        async def one(index: int) -> None:
            results[index] = await self._rescore(recorded[index], options)

        async with anyio.create_task_group() as tasks:
            for index in range(len(recorded)):
                tasks.start_soon(one, index)
        return [results[index] for index in range(len(recorded))]

    async def _rescore(self, recorded: RecordedRollout, options: RescoreOptions) -> Rescored:
        rollout = recorded.rollout
        name = options.environment or rollout.task.environment
        task = rollout.task.model_copy(update={"environment": name})
        request = recorded.request.model_copy(update={"task": task, "rollout_id": rollout.rollout_id})
        replay: Replay | None = None
        try:
            environment = self._context.environments.get(name)
            if environment.recorded is None:
                environment.check(request.task.instance)
            environment = environment.for_instance(request.task.instance)
            trajectory = require_trajectory(rollout)
            policy = await anyio.to_thread.run_sync(RecordedPolicy, recorded, trajectory)
            with_tools = must_replay_tools(environment, options, request.agent)
            if with_tools:
                policy.check()
                check_no_subagents(rollout)
            await self._places.acquire()
            runner = StageRunner(
                self._context,
                environment,
                request,
                _RecordedSource(policy),
                slot=Slot(self._places),
                queued_at=time.perf_counter(),
            )
            replay = Replay(runner, policy, request, rollout, self._context.judge, with_tools)
            return _rescored(name, rollout, replay, await replay.run(), None)
        except Exception as failure:  # noqa: BLE001 - reported with its rollout; it must not stop the others
            error = describe(failure, stage=replay.runner.stage if replay else None)
            if replay is not None:
                error = mask_info(error, replay.runner.hidden)
            return _rescored(name, rollout, replay, None, error)
        finally:
            if replay is not None:
                await replay.runner.release()


@dataclass(frozen=True, slots=True)
class Replay:
    """A finished rollout that passes the stages again, with a policy that repeats itself."""

    runner: StageRunner
    """Gives back the place that it was begun with."""
    policy: RecordedPolicy
    request: RolloutRequest
    rollout: Rollout
    judge: Judge | None
    with_tools: bool
    """Whether the recorded tool calls run again; if not, the recorded answer alone is scored."""

    async def run(self) -> Score:
        if self.with_tools:
            return await self.runner.run()
        answer = final_answer(self.policy.trajectory().messages)
        return await self.runner.evaluate(
            Episode(
                request=self.request,
                attempt=1,
                limits=self.runner.limits,
                policy=self.policy,
                answer=answer,
                judge=self.judge,
                nodes=list(self.rollout.nodes),
                work=self.rollout.work,
                session=self.rollout.session,
                turn_marks=list(self.rollout.turn_marks),
            )
        )


@dataclass(frozen=True, slots=True)
class _RecordedSource:
    """Opens a recorded policy; implements `stage_runner.PolicySource`."""

    policy: RecordedPolicy
    gateway: GatewayAccess | None = None

    async def open(
        self,
        tools: list[ToolSpec],  # noqa: ARG002 - the recorded turns stay as they were
        hidden: Collection[str],
    ) -> Policy:
        return without_secrets(self.policy, hidden)

    async def end(self) -> None:
        """Do nothing: a recorded policy records nothing."""

    def close(self) -> None:
        """Do nothing: a recorded policy holds nothing."""


async def _return_given(recorded: Sequence[RecordedRollout]) -> Sequence[RecordedRollout]:
    return recorded


def must_replay_tools(
    environment: Environment, options: RescoreOptions, agent: AgentKind = AgentKind.ENVIRONMENT
) -> bool:
    """Return whether the recorded tool calls must run again before the evaluation.

    Raises:
        NotReplayableError: The environment cannot score a finished rollout at all.
    """
    replayable: Replayable = environment.replayable
    is_needed = options.replay == "always" or replayable != "answer"
    if is_needed and (agent is AgentKind.EXTERNAL or environment.uses_gateway):
        raise NotReplayableError(
            "a program of its own worked on this rollout, and what it did cannot be replayed",
            hint="Name an environment that scores the answer alone in `environment`, or roll the task out again.",
        )
    if is_needed and environment.recorded is not None:
        raise NotReplayableError(
            "this rollout is a part of a session that was served, and what its client did cannot be replayed",
            hint="Leave `replay` at its default, which scores the recorded values again.",
        )
    if replayable == "never":
        raise NotReplayableError(
            f"the environment {environment.spec.name!r} cannot score a finished rollout: it declares "
            "`replayable` as 'never'",
            hint="Name another environment in `environment`, or roll the task out again.",
        )
    return is_needed


def check_no_subagents(rollout: Rollout) -> None:
    """
    Raises:
        NotReplayableError: A sub-agent worked on the rollout; to run it again would call an engine, and it would do
            something else.
    """
    messages = rollout.trajectory.messages if rollout.trajectory else []
    calls = (call for message in messages for call in message.tool_calls)
    # A rollout that did not ask for sub-agents tells only what it called, if it comes from an export.
    may_have_worked = rollout.work is None and any(call.name == ASSIGN and call.error is None for call in calls)
    if rollout.nodes or may_have_worked:
        raise NotReplayableError(
            "sub-agents worked on this rollout, and what they did cannot be replayed",
            hint="Name an environment that scores the answer alone in `environment`, or roll the task out again.",
        )


def require_trajectory(rollout: Rollout) -> Trajectory:
    """
    Raises:
        NotReplayableError: The agent did not run to its end, or the trajectory is no longer stored.
    """
    failed_late = rollout.error is not None and rollout.error.stage == Stage.EVALUATE
    if rollout.state is not RolloutState.COMPLETED and not failed_late:
        raise NotReplayableError(
            f"the rollout {rollout.rollout_id} is {rollout.state}, and its agent did not run to its end",
            hint="Only completed rollouts, and those whose evaluation failed, can be scored again.",
        )
    if rollout.trajectory is None:
        raise NotReplayableError(
            f"the rollout {rollout.rollout_id} no longer has a trajectory",
            hint="Its tokens were pruned. Raise `retention`, or score an export that was made before.",
        )
    return rollout.trajectory


def _rescored(
    environment: str,
    rollout: Rollout,
    replay: Replay | None,
    score: Score | None,
    error: ErrorInfo | None,
) -> Rescored:
    return Rescored(
        rollout_id=rollout.rollout_id,
        environment=environment,
        recorded_reward=rollout.reward,
        reward=score.reward if score else None,
        reward_parts=score.parts | rescored_parts(rollout.reward_parts, score.reward) if score else {},
        error=error,
        stop_reason=rollout.stop_reason,
        replayed=replay is not None and replay.with_tools,
        turns_recorded=replay.policy.turns_recorded if replay else 0,
        turns_replayed=replay.policy.usage.turns if replay else 0,
        differences=replay.policy.differences if replay else [],
    )
