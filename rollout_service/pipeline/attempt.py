"""One attempt at a rollout: through init, rollout and evaluate, holding a sandbox only while a stage needs it.

Guarantees: the agent's sandbox is closed before the evaluation queues up, unless the evaluation happens in it;
whatever ends the attempt (success, failure, deadline, cancellation), `release` closes what is still open; every
stage that was entered leaves a span; the trajectory is kept, however the attempt ends.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

import anyio

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Span, Stage, StopReason
from rollout_service.environments.contract import Environment, EnvironmentSpec, EvaluateIn
from rollout_service.episodes import SANDBOX_ENDED_SCORE, Episode, Policy, Score
from rollout_service.errors import RequestError, describe
from rollout_service.pipeline.artifacts import Artifacts
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.stage import Slot, StageLimiter, Timer
from rollout_service.store.contract import Lease, Store
from rollout_service.telemetry.metrics import Metrics
from rollout_service.tokens import ToolSpec
from sandboxes import Sandbox, SessionName
from sandboxes.scheduling.admission import AdmissionController, Purpose, Ticket
from sandboxes.sessions.opening import open_sessions


class LeaseLostError(Exception):
    """Another worker holds this rollout now, or it has ended; nothing that is done here counts any more."""


class NotServedError(Exception):
    """The rollout's pool went out of service before the attempt began; it waits in the store for that to change."""


class PromptTooLongError(RequestError):
    """The first prompt of a task does not fit the model's context."""

    code = "prompt_too_long"


class EnvironmentSource(Protocol):
    """Knows the environments; `environments.registry.EnvironmentRegistry` is one."""

    def get(self, name: str) -> Environment:
        """The environment of that name; raises InvalidFieldError."""
        ...


class PolicyFactory(Protocol):
    """Knows which pools are in service, and opens the conversation of one rollout with the engines of its pool."""

    def in_service(self) -> tuple[frozenset[str], anyio.Event]:
        """Return the pools with a backend in service, paused ones too, and the event of the next change."""
        ...

    async def open(self, request: RolloutRequest, tools: list[ToolSpec]) -> Policy:
        """Open it; raises NoBackendError when the pool is empty, TokenError when its tokenizer cannot be used."""
        ...

    def close(self, request: RolloutRequest) -> None:
        """Forget which backend a rollout belongs to; idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Stages:
    """The three stages."""

    init: StageLimiter
    rollout: StageLimiter
    evaluate: StageLimiter


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """What an attempt works with."""

    owner: str
    store: Store
    stages: Stages
    environments: EnvironmentSource
    sandboxes: SandboxSource
    policies: PolicyFactory
    admission: AdmissionController
    metrics: Metrics
    max_attempts: int


class Attempt:
    """One leased rollout on its way."""

    def __init__(self, context: AttemptContext, lease: Lease) -> None:
        """The lease comes with a place before the init stage, which the attempt gives back."""
        self._context = context
        self.lease = lease
        self._episode: Episode | None = None
        self._slot = Slot(context.stages.init.places)
        self._left = time.perf_counter() - (datetime.now(UTC) - lease.queued_at).total_seconds()
        self._artifacts: Artifacts | None = None
        self._ticket: Ticket | None = None
        self.stage: Stage | None = None
        """The stage that was entered last."""
        self.spans: list[Span] = list(lease.spans)
        """The spans of all attempts so far."""
        self._stop_reason: StopReason | None = None
        self._state = RolloutState.QUEUED

    async def run(self) -> Score:
        """Pass all stages; raises whatever ends the attempt early."""
        environment = self._context.environments.get(self.lease.request.task.environment)
        await self._init(environment)
        await self._rollout(environment)
        return await self._evaluate(environment)

    async def _init(self, environment: Environment) -> None:
        spec, request = environment.spec, self.lease.request
        limits = spec.limits.model_copy(update=request.limits.model_dump(exclude_none=True))
        purpose = Purpose.AGENT if spec.image is not None else None
        async with self._stage(self._context.stages.init, limits.init_seconds, purpose) as timer:
            policy = await self._context.policies.open(request, environment.tool_definitions())
            episode = Episode(request=request, attempt=self.lease.attempt, limits=limits, policy=policy)
            self._episode = episode
            if spec.image is not None:
                await self._start_sandbox(spec, timer, spec.sessions)
            await self._prepare(environment, episode, timer)

    async def _prepare(self, environment: Environment, episode: Episode, timer: Timer) -> None:
        """Set the task up, and meanwhile open the agent's sessions, so that its first call does not wait for them."""
        try:
            async with anyio.create_task_group() as tasks:
                if episode.sandbox is not None:
                    tasks.start_soon(self._open_sessions, episode.sandbox, environment.spec.sessions, timer)
                await environment.init(episode)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures  # typed, as from one of the two

    async def _open_sessions(self, sandbox: Sandbox, sessions: frozenset[SessionName], timer: Timer) -> None:
        started = time.perf_counter()
        try:
            await open_sessions(sandbox, sessions)
        finally:
            timer.sandbox_seconds += time.perf_counter() - started

    async def _rollout(self, environment: Environment) -> None:
        episode = self.episode
        async with self._stage(self._context.stages.rollout, episode.limits.rollout_seconds) as timer:
            try:
                self._stop_reason = await environment.run(episode)
            finally:
                timer.engine_seconds = episode.policy.engine_seconds
                timer.tool_seconds = episode.tool_seconds
                for violation in episode.limit_violations:
                    self._context.metrics.count_limit_violation(violation.limit)
            if self._stop_reason is StopReason.CONTEXT_FULL and episode.policy.usage.turns == 0:
                raise PromptTooLongError(
                    "the first prompt of this task does not fit the model's context",
                    hint="Shorten the prompt or the tools' descriptions, or serve the model with a longer context.",
                )
            if environment.spec.evaluate_in is EvaluateIn.FRESH and episode.sandbox is not None:
                self._artifacts = await self._context.sandboxes.pack(episode.sandbox, environment.spec)
                episode.notes += self._artifacts.notes
            if environment.spec.evaluate_in is not EvaluateIn.SAME:
                await self._close_sandbox()
            self._context.policies.close(self.lease.request)

    async def _evaluate(self, environment: Environment) -> Score:
        """Score the outcome; where it was not the agent's sandbox that failed, only this stage is tried again."""
        seconds = self.episode.limits.evaluate_seconds
        purpose = Purpose.GRADER if environment.spec.evaluate_in is EvaluateIn.FRESH else None
        for tries_left in reversed(range(self._context.max_attempts)):
            try:
                async with self._stage(self._context.stages.evaluate, seconds, purpose) as timer:
                    return await self._score(environment, timer)
            except Exception as error:
                info = describe(error, stage=Stage.EVALUATE, attempt=self.lease.attempt)
                in_place = environment.spec.evaluate_in is not EvaluateIn.SAME
                if not (info.retryable and in_place and tries_left):
                    raise
                self._context.metrics.count_retry(info)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._close_sandbox()
        raise AssertionError("the last try returns or raises")

    @asynccontextmanager
    async def _stage(
        self, limiter: StageLimiter, seconds: float, purpose: Purpose | None = None
    ) -> AsyncIterator[Timer]:
        """Work in a stage, which needs a sandbox more where it has a `purpose` for one."""
        admission = partial(self._be_admitted, purpose) if purpose is not None else None
        queued = await limiter.enter(self._slot, since=self._left, then=admission)
        if limiter.stage is Stage.INIT:
            self._check_served()
        self.stage = limiter.stage
        await self._advance(RolloutState(limiter.stage.value))
        timer = Timer(limiter.stage, self.lease.attempt, queued)
        try:
            async with limiter.deadline(seconds):
                yield timer
        except BaseException as error:
            cancelled = isinstance(error, anyio.get_cancelled_exc_class())
            timer.error = "cancelled" if cancelled else describe(error).code
            raise
        finally:
            self._left = time.perf_counter()
            self.spans.append(timer.span())

    def _check_served(self) -> None:
        pools, _ = self._context.policies.in_service()
        if self.lease.request.pool not in pools:
            raise NotServedError(self.lease.request.pool)

    async def _advance(self, state: RolloutState) -> None:
        if state is self._state:
            return
        if not await self._context.store.advance(self.lease, self._context.owner, state):
            raise LeaseLostError(self.lease.rollout_id)
        self._state = state

    async def _be_admitted(self, purpose: Purpose) -> None:
        """Wait until the host bears one more sandbox; the ticket goes when that sandbox has ended."""
        self._ticket = await self._context.admission.admit(purpose)

    async def _start_sandbox(
        self, spec: EnvironmentSpec, timer: Timer, sessions: frozenset[SessionName] = frozenset()
    ) -> None:
        started = time.perf_counter()
        try:
            self.episode.sandbox = await self._context.sandboxes.start(spec, self.lease.rollout_id, sessions)
        finally:
            timer.sandbox_seconds += time.perf_counter() - started

    async def _score(self, environment: Environment, timer: Timer) -> Score:
        """Run what the agent left, where the environment asks for that, and then score, in a clean place each."""
        spec = environment.spec
        if spec.evaluate_in is EvaluateIn.FRESH:
            if spec.runs_submission:
                await self._start_with_artifacts(spec, timer)
                await environment.execute(self.episode)
                await self._end_sandbox()
            await self._start_with_artifacts(spec, timer)
        elif not await self._end_agent(spec.evaluate_in):
            return SANDBOX_ENDED_SCORE
        elif spec.runs_submission:
            await environment.execute(self.episode)
            if not await self._end_agent(spec.evaluate_in):
                return SANDBOX_ENDED_SCORE
        return await environment.evaluate(self.episode)

    async def _start_with_artifacts(self, spec: EnvironmentSpec, timer: Timer) -> None:
        await self._start_sandbox(spec, timer)
        await self._unpack()

    async def _end_agent(self, evaluate_in: EvaluateIn) -> bool:
        """End the agent's processes where it is scored in its own sandbox; False where that has ended itself."""
        if evaluate_in is EvaluateIn.NONE or self.episode.sandbox is None:
            return True
        return await self._context.sandboxes.end_agent(self.episode.sandbox, self.episode.notes)

    async def _unpack(self) -> None:
        if self.episode.sandbox is not None and self._artifacts is not None:
            await self._context.sandboxes.unpack(self.episode.sandbox, self._artifacts)

    async def _end_sandbox(self) -> None:
        """Close it and keep the ticket, for the next one in its place."""
        if self._episode is not None and self._episode.sandbox is not None:
            sandbox, self._episode.sandbox = self._episode.sandbox, None
            await sandbox.close()

    async def _close_sandbox(self) -> None:
        await self._end_sandbox()
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.release()

    async def release(self) -> None:
        """Close what is open and give the worker back; shielded and idempotent."""
        with anyio.CancelScope(shield=True):
            try:
                await self._close_sandbox()
                if self._artifacts is not None:
                    await self._artifacts.close()
            finally:
                self._slot.free()
                self._context.policies.close(self.lease.request)

    @property
    def episode(self) -> Episode:
        """The episode, which the init stage made."""
        if self._episode is None:
            raise RuntimeError("the init stage has not run")
        return self._episode

    def result(
        self, state: RolloutState, *, score: Score | None = None, error: ErrorInfo | None = None
    ) -> Rollout:
        """The rollout in a terminal state, with all that this attempt has to show."""
        policy = self._episode.policy if self._episode else None
        usage = policy.usage if policy else None
        return Rollout(
            rollout_id=self.lease.rollout_id,
            state=state,
            task=self.lease.request.task,
            pool=self.lease.request.pool,
            attempt=self.lease.attempt,
            reward=score.reward if score else None,
            reward_parts=score.parts if score else {},
            notes=list(self._episode.notes) if self._episode else [],
            stop_reason=self._reason(state, error),
            error=error,
            retries=self.lease.retries,
            **({"usage": usage} if usage else {}),
            spans=self.spans,
            metadata=self.lease.request.metadata,
            created_at=self.lease.created_at,
            finished_at=datetime.now(UTC),
            trajectory=policy.trajectory() if policy else None,
        )

    def _reason(self, state: RolloutState, error: ErrorInfo | None) -> StopReason | None:
        if state is RolloutState.CANCELLED:
            return StopReason.CANCELLED
        if error is not None:
            return StopReason.STAGE_TIMEOUT if error.code == "stage_timeout" else StopReason.ERROR
        return self._stop_reason
