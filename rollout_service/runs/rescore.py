"""Finished rollouts are evaluated again, without inference.

Guarantees: no engine is asked; what the evaluation looks at in a sandbox is made anew by the recorded tool calls, in
the pipeline's own stages, within their limits and places; a failure is told with its rollout and stops no other. The
store is not changed: the new reward stands beside the old one in the answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar

import anyio
import anyio.to_thread

from api_schemas.errors import ErrorInfo, FieldError
from api_schemas.exports import RecordedRollout, Rescored, RescoreOptions, RescoreRollouts, RescoreRun
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Stage
from api_schemas.trajectories import Trajectory
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.contract import Environment, EvaluateIn
from rollout_service.episodes import Episode, Policy, Score
from rollout_service.errors import InvalidFieldError, describe, prefix_field_paths
from rollout_service.pipeline.attempt import Attempt, AttemptContext
from rollout_service.pipeline.stage import Slot
from rollout_service.policies.replay import NotReplayableError, RecordedPolicy, final_answer
from rollout_service.store.contract import Lease
from rollout_service.tokens import ToolSpec

T = TypeVar("T")
Load = Callable[[Sequence[T]], Awaitable[Sequence[RecordedRollout]]]

MAX_CONCURRENT = 16
"""Rollouts that are evaluated at once; the stages have limits of their own."""


class Rescorer:
    """Evaluates rollouts again."""

    def __init__(
        self, context: AttemptContext, check_environment: Callable[[str], Awaitable[object]]
    ) -> None:
        """`check_environment` raises InvalidFieldError when the one of that name cannot be used."""
        self._context = context
        self._check_environment = check_environment
        self._places = anyio.Semaphore(MAX_CONCURRENT, max_value=MAX_CONCURRENT)
        """Those before the init stage belong to the pipeline, which takes all of them while it waits for work."""

    async def rescore_rollouts(self, order: RescoreRollouts) -> AsyncIterator[Rescored]:
        """Rollouts that the caller holds, in their order; raises InvalidFieldError before the first."""
        await self._check(order)
        return self._rescore_in_batches(order.rollouts, _return_given, order)

    async def rescore_run(self, run_id: str, order: RescoreRun) -> AsyncIterator[Rescored]:
        """Rollouts of a run, by their groups; raises NotFoundError, InvalidFieldError before the first."""
        known = await self._context.store.runs.rollout_ids(run_id)
        there = set(known)
        chosen = known if order.rollout_ids is None else order.rollout_ids
        missing = [
            FieldError(path=f"body.rollout_ids.{index}", message=f"{one} is in no closed group of {run_id}")
            for index, one in enumerate(chosen)
            if one not in there
        ]
        if missing:
            raise InvalidFieldError(missing, hint=f"GET /v1/runs/{run_id}/export lists those there are.")
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

    async def _rescore_batch(
        self, recorded: Sequence[RecordedRollout], options: RescoreOptions
    ) -> list[Rescored]:
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
        attempt: ReplayAttempt | None = None
        try:
            environment = self._context.environments.get(name)
            environment.check(request.task.instance)
            trajectory = require_trajectory(rollout)
            policy = await anyio.to_thread.run_sync(RecordedPolicy, recorded, trajectory)
            replays = options.replay == "always" or needs_replay(environment)
            if replays:
                policy.check()
            await self._places.acquire()
            attempt = ReplayAttempt(self._context, request, policy, Slot(self._places), replays=replays)
            score = await attempt.run()
            return _rescored(name, rollout, attempt, score, None)
        except Exception as failure:  # noqa: BLE001 - it is told with its rollout, and must not stop the others
            error = describe(failure, stage=attempt.stage if attempt else None)
            return _rescored(name, rollout, attempt, None, error)
        finally:
            if attempt is not None:
                await attempt.release()


class ReplayAttempt(Attempt):
    """A finished rollout that passes the stages again, with a policy that says what it said."""

    def __init__(
        self,
        context: AttemptContext,
        request: RolloutRequest,
        policy: RecordedPolicy,
        slot: Slot,
        *,
        replays: bool,
    ) -> None:
        """`slot` holds a place, which the attempt gives back."""
        now = datetime.now(UTC)
        lease = Lease(
            rollout_id=request.rollout_id or "",
            request=request,
            attempt=1,
            retries=[],
            spans=[],
            created_at=now,
            queued_at=now,
            token=0,
        )
        super().__init__(replace(context, policies=_Recorded(policy, request.pool)), lease)
        self._slot = slot
        self.policy = policy
        self.replays = replays

    async def run(self) -> Score:
        """Evaluate, after the recorded calls were carried out again where that is needed."""
        if self.replays:
            return await super().run()
        request = self.lease.request
        environment = self._context.environments.get(request.task.environment)
        limits = environment.spec.limits.model_copy(update=request.limits.model_dump(exclude_none=True))
        self._episode = Episode(
            request=request,
            attempt=1,
            limits=limits,
            policy=self.policy,
            answer=final_answer(self.policy.trajectory()),
        )
        return await self._evaluate(environment)

    async def _advance(self, state: RolloutState) -> None:
        """Nothing to record: the rollout has ended long ago."""


class _Recorded:
    """The policies of one replayed rollout."""

    def __init__(self, policy: RecordedPolicy, pool: str) -> None:
        self._policy = policy
        self._pool = pool

    def in_service(self) -> tuple[frozenset[str], anyio.Event]:
        return frozenset({self._pool}), anyio.Event()

    async def open(self, request: RolloutRequest, tools: list[ToolSpec]) -> Policy:  # noqa: ARG002
        return self._policy

    def close(self, request: RolloutRequest) -> None:
        """Nothing is held."""


async def _return_given(recorded: Sequence[RecordedRollout]) -> Sequence[RecordedRollout]:
    return recorded


def needs_replay(environment: Environment) -> bool:
    """Whether an evaluation may look at anything but the task and the answer."""
    kind = type(environment)
    plain = kind.init is Environment.init and kind.run is AgentEnvironment.run
    return environment.spec.evaluate_in is not EvaluateIn.NONE or not plain


def require_trajectory(rollout: Rollout) -> Trajectory:
    """The trajectory of a rollout whose agent came to its end; NotReplayableError for any other."""
    failed_late = rollout.error is not None and rollout.error.stage == Stage.EVALUATE
    if rollout.state is not RolloutState.COMPLETED and not failed_late:
        raise NotReplayableError(
            f"the rollout {rollout.rollout_id} is {rollout.state}, and its agent did not come to an end",
            hint="Only completed rollouts and those whose evaluation failed can be evaluated again.",
        )
    if rollout.trajectory is None:
        raise NotReplayableError(
            f"the rollout {rollout.rollout_id} has no trajectory any more",
            hint="Its tokens were pruned: raise `retention`, or evaluate an export that was made before.",
        )
    return rollout.trajectory


def _rescored(
    environment: str,
    rollout: Rollout,
    attempt: ReplayAttempt | None,
    score: Score | None,
    error: ErrorInfo | None,
) -> Rescored:
    return Rescored(
        rollout_id=rollout.rollout_id,
        environment=environment,
        recorded_reward=rollout.reward,
        reward=score.reward if score else None,
        reward_parts=score.parts if score else {},
        error=error,
        stop_reason=rollout.stop_reason,
        replayed=attempt is not None and attempt.replays,
        turns_recorded=attempt.policy.turns_recorded if attempt else 0,
        turns_replayed=attempt.policy.usage.turns if attempt else 0,
        differences=attempt.policy.differences if attempt else [],
    )
