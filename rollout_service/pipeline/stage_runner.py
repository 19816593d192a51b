"""One episode on its way through init, rollout and evaluate: a live attempt's, or that of a recorded rollout.

The agent's sandbox is closed before the evaluation queues up, unless it is scored there; every stage that was entered
leaves a span; `release` closes everything that is still open, however the episode ended.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Protocol

import anyio
import structlog

from api_schemas.rollouts import RolloutRequest, Span, Stage, StopReason
from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import waits_for
from rollout_service.agents.tool_calling.agent import TOOL_STATE
from rollout_service.base.errors import RequestError, describe
from rollout_service.base.masking import mask_error
from rollout_service.engines.serving.turn_log import TurnLog
from rollout_service.environments.contract import Environment, EvaluateIn
from rollout_service.environments.secrets import hide, initialize, mask_score, prepare
from rollout_service.episodes import (
    ESCAPING,
    SANDBOX_ENDED_SCORE,
    Episode,
    EpisodeLimits,
    GatewayAccess,
    Policy,
    Score,
    WorkClock,
    contain,
    require_score,
)
from rollout_service.pipeline.context import EpisodeContext
from rollout_service.pipeline.sandbox_source import EpisodeSandboxes
from rollout_service.pipeline.saved_sandboxes import SandboxSaver, SavedSandbox, may_save
from rollout_service.pipeline.shared_setup import Setup, setup_key
from rollout_service.pipeline.stage import Slot, StageLimiter, Timer
from rollout_service.pipeline.subagents import EpisodeSubagents
from rollout_service.tokens import ToolSpec
from sandboxes.errors import SandboxError
from sandboxes.scheduling.admission import Purpose
from sandboxes.task_groups import open_task_group

log = structlog.get_logger(__name__)

OnStage = Callable[[Stage], Awaitable[None]]
"""Called whenever a stage is entered; an error that it raises ends the episode."""


class PromptTooLongError(RequestError):
    """The first prompt of a task does not fit the model's context: the task is at fault, not a turn.

    `engines.errors.PromptTooLong` has the same code: an engine's own refusal of any one prompt.
    """

    code = "prompt_too_long"


class PolicySource(Protocol):
    async def open(self, tools: list[ToolSpec], hidden: Collection[str]) -> Policy:
        """Open the conversation in the init stage, with the texts of `hidden` masked."""
        ...

    @property
    def gateway(self) -> GatewayAccess | None:
        """For a program that is to drive the policy, if any."""
        ...

    async def end(self) -> None:
        """Record nothing more, since the agent has ended; idempotent."""
        ...

    def close(self) -> None:
        """Free resources as soon as the agent has ended; idempotent."""
        ...


class StageRunner:
    def __init__(
        self,
        context: EpisodeContext,
        environment: Environment,
        request: RolloutRequest,
        policy: PolicySource,
        *,
        slot: Slot,
        queued_at: float,
        attempt: int = 1,
        on_stage: OnStage | None = None,
        turns: TurnLog | None = None,
        saved: SavedSandbox | None = None,
    ) -> None:
        """`slot` has a place before the first stage, taken at `queued_at` on `time.perf_counter`.

        `turns` are those of the policy, if it has saved ones to play first; `saved` is the sandbox after some of them.
        """
        self._context = context
        self._environment = environment
        self._request = request
        self._policy = policy
        self._slot = slot
        self._attempt = attempt
        self._on_stage = on_stage
        self._turns = turns or TurnLog()
        self._saved = saved
        self._sandboxes = EpisodeSandboxes(
            context.sandboxes,
            context.admission,
            request.rollout_id or "",
            context.metrics.count_limit_violation,
        )
        self.hidden: set[str] = set()
        """Spellings of the environment's secrets so far, which are masked in whatever leaves the episode."""
        self._subagents = (
            None
            if environment.spec.parallel is None or context.policies is None
            else EpisodeSubagents(context, context.policies, request, environment.spec, self.hidden)
        )
        self._left_at = queued_at
        self.episode: Episode | None = None
        """Set once the init stage has opened its policy."""
        self.stage: Stage | None = None
        """Entered last."""
        self.spans: list[Span] = []
        self.stop_reason: StopReason | None = None

    async def run(self) -> Score:
        episode = await self._init()
        await self._rollout(episode)
        return await self.evaluate(episode)

    @property
    def limits(self) -> EpisodeLimits:
        return limits_of(self._environment, self._request)

    async def _init(self) -> Episode:
        spec, limits = self._environment.spec, self.limits
        purpose = Purpose.AGENT if spec.image is not None else None
        clock, pauser = WorkClock(), self._context.pauser
        async with self._stage(self._context.stages.init, limits.init_seconds, purpose, clock) as timer:
            self.hidden |= self._context.sandboxes.secrets.check(spec)
            policy = await self._policy.open(self._environment.tool_definitions(), self.hidden)
            episode = Episode(
                request=self._request,
                attempt=self._attempt,
                limits=limits,
                policy=policy,
                gateway=self._policy.gateway,
                judge=self._context.judge,
                sampler=self._context.sampler,
                subagents=self._subagents,
                pauses=pauser.waiting if pauser is not None and spec.sandbox.pause else nullcontext,
                clock=self._turns.clock,
                earlier_results=self._turns.earlier_results,
                hidden=self.hidden,
            )
            self.episode = episode
            if spec.evaluate_in is EvaluateIn.FRESH:
                episode.checkpoint = partial(self._sandboxes.pack, episode, spec, is_checkpoint=True)
            is_prepared = spec.image is not None and await self._start_sandbox(episode, timer, clock)
            self._prepare_saving(episode, is_prepared=is_prepared)
            if self._saved is not None:
                await self._sandboxes.open_sessions(episode, spec, timer)
                return episode
            # No session may be open when the processes of a setup are ended.
            if spec.init_secrets or (self._environment.shares_setup and not is_prepared):
                await self._set_up(episode, is_prepared)
                await self._sandboxes.open_sessions(episode, spec, timer)
                return episode
            async with open_task_group() as tasks:
                tasks.start_soon(self._sandboxes.open_sessions, episode, spec, timer)
                await self._set_up(episode, is_prepared)
        return episode

    async def _start_sandbox(self, episode: Episode, timer: Timer, clock: WorkClock) -> bool:
        """Return whether the sandbox has the files of the environment's `prepare`."""
        spec, setups = self._environment.spec, self._context.setups
        start = partial(
            self._sandboxes.start, episode, spec, timer, spec.sessions, listens=self._environment.uses_gateway
        )
        shares = self._environment.shares_setup and setups is not None
        identity = await self._context.sandboxes.snapshot_identity(spec) if shares else None
        if setups is None or identity is None:
            await self._start(start, is_prepared=False)
            return False
        key = setup_key(self._environment, episode, identity)
        async with setups.use(key, partial(self._make_setup, episode, timer), clock) as setup:
            if setup is not None:
                setup.give(episode)
                start = partial(start, snapshot=setup.snapshot)
            await self._start(start, is_prepared=setup is not None)
            return setup is not None

    async def _start(self, start: Callable[..., Awaitable[None]], *, is_prepared: bool) -> None:
        """Start from the saved sandbox; if it cannot be used, as for a new rollout."""
        saved, self._saved = self._saved, None
        store = self._context.saved_sandboxes
        if saved is None or store is None or saved.work.is_prepared is not is_prepared:
            await start()
            return
        try:
            async with store.opened(saved) as path:
                await start(saved=path)
        except (SandboxError, OSError) as error:
            log.warning("a saved sandbox is of no use", why=str(error), hint="the tools run again instead")
            await start()
        else:
            self._saved, self._turns.restored = saved, saved.work.turns

    def _prepare_saving(self, episode: Episode, *, is_prepared: bool) -> None:
        """Let the sandbox be saved after the turns that the saved one has."""
        store = self._context.saved_sandboxes
        if self._saved is not None:
            episode.state[TOOL_STATE] = self._saved.work.tool_state
            episode.known_results = self._saved.results
            episode.tool_calls = sum(map(len, self._saved.results))
            episode.tool_error_turns |= set(self._saved.work.tool_error_turns)
            episode.proposed_turns |= set(self._saved.work.proposed_turns)
        # Without a shared setup, nothing would have the state that `prepare` leaves.
        stands_alone = is_prepared or not self._environment.shares_setup
        if store is None or not stands_alone or not may_save(self._environment, self._request):
            return
        saver = SandboxSaver(store, self._context.sandboxes.provider, self._turns, episode, is_prepared=is_prepared)
        episode.save_due = saver.due

    async def _make_setup(self, episode: Episode, timer: Timer) -> Setup:
        await self._sandboxes.start(episode, self._environment.spec, timer)
        with waits_for(StepKind.SETUP, f"{self._environment.spec.name}, shared"):
            await prepare(self._environment, episode, self._context.sandboxes.secrets)
        state, episode.state = episode.state, {}
        return Setup(await self._sandboxes.snapshot(episode), state)

    async def _set_up(self, episode: Episode, is_prepared: bool) -> None:
        with waits_for(StepKind.SETUP, self._environment.spec.name):
            secrets = self._context.sandboxes.secrets
            await initialize(self._environment, episode, secrets, is_prepared=is_prepared)

    async def _rollout(self, episode: Episode) -> None:
        seconds, clock = episode.limits.rollout_seconds, episode.clock
        async with self._stage(self._context.stages.rollout, seconds, clock=clock) as timer:
            await self._run_agent(episode, timer)
            spec = self._environment.spec
            if spec.evaluate_in is EvaluateIn.FRESH:
                await self._sandboxes.pack(episode, spec)
            if spec.evaluate_in is not EvaluateIn.SAME:
                await self._sandboxes.close()
            self._policy.close()

    async def _run_agent(self, episode: Episode, timer: Timer) -> None:
        try:
            with self._turns.replay():
                try:
                    self.stop_reason = await self._environment.run(episode)
                except ESCAPING as error:
                    contain(error, f"the agent of {self._environment.spec.name!r}")
            await self._turns.finish()
        finally:
            with anyio.CancelScope(shield=True):
                await self._policy.end()
            if self._subagents is not None:
                self._subagents.close()
            timer.replay_seconds, timer.turns_replayed = self._turns.replay_seconds, self._turns.played
            timer.engine_seconds = episode.policy.engine_seconds
            timer.tool_seconds = episode.tool_seconds
            for violation in episode.limit_violations:
                self._context.metrics.count_limit_violation(violation.limit)
        if self.stop_reason is StopReason.CONTEXT_FULL and episode.policy.usage.turns == 0:
            raise PromptTooLongError(
                "the first prompt of this task does not fit the model's context",
                hint="Shorten the prompt or the tools' descriptions, or serve the model with a longer context.",
            )

    async def evaluate(self, episode: Episode) -> Score:
        """Score an episode whose agent has ended; retry this stage alone unless it needs the agent's sandbox."""
        self.episode, episode.hidden = episode, self.hidden
        evaluate_in, seconds = self._environment.spec.evaluate_in, episode.limits.evaluate_seconds
        purpose = Purpose.GRADER if evaluate_in is EvaluateIn.FRESH else None
        for tries_left in reversed(range(self._context.max_attempts)):
            try:
                async with self._stage(self._context.stages.evaluate, seconds, purpose) as timer:
                    return await self._score(episode, timer)
            except Exception as error:
                info = describe(error, stage=Stage.EVALUATE, attempt=self._attempt)
                if not (info.retryable and evaluate_in is not EvaluateIn.SAME and tries_left):
                    raise
                self._context.metrics.count_retry(info)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._sandboxes.close()
            self._slot.free()  # those who have a place wait for its worker, so it cannot wait for a place with it
        raise AssertionError("the last try returns or raises")

    async def _score(self, episode: Episode, timer: Timer) -> Score:
        """Run the agent's program if the environment asks for that, then score; each in a clean place."""
        environment, spec = self._environment, self._environment.spec
        secrets = self._context.sandboxes.secrets
        self.hidden |= secrets.check(spec)
        if spec.evaluate_in is EvaluateIn.FRESH:
            if spec.runs_submission:
                await self._sandboxes.start_with_artifacts(episode, spec, timer)
                await self._execute(episode)
                await self._sandboxes.close(keep_ticket=True)
            secrets.give(episode, spec, "[evaluate]")
            await self._score_checkpoints(episode, timer)
            await self._sandboxes.start_with_artifacts(episode, spec, timer)
        elif not await self._sandboxes.end_agent(episode, spec):
            return SANDBOX_ENDED_SCORE
        elif spec.runs_submission:
            await self._execute(episode)
            if not await self._sandboxes.end_agent(episode, spec):
                return SANDBOX_ENDED_SCORE
        secrets.give(episode, spec, "[evaluate]")
        with waits_for(StepKind.GRADER, spec.name) as step:
            try:
                given = await environment.evaluate(episode)
            except ESCAPING as error:
                contain(error, f"evaluate of {spec.name!r}")
            score = mask_score(require_score(given, spec.name), self.hidden)
            step.note(reward=score.reward)
        episode.note_ended(score.reward)
        return score

    async def _execute(self, episode: Episode) -> None:
        with waits_for(StepKind.GRADER, "run the agent's program"):
            await self._environment.execute(episode)

    async def _score_checkpoints(self, episode: Episode, timer: Timer) -> None:
        for number in range(self._sandboxes.checkpoints):
            await self._sandboxes.start_with_artifacts(episode, self._environment.spec, timer, number)
            with waits_for(StepKind.GRADER, f"checkpoint {number}"):
                goes_on = await self._environment.evaluate_checkpoint(episode, number)
            await self._sandboxes.close(keep_ticket=True)
            if not goes_on:
                break

    @asynccontextmanager
    async def _stage(
        self,
        limiter: StageLimiter,
        seconds: float,
        purpose: Purpose | None = None,
        clock: WorkClock | None = None,
    ) -> AsyncIterator[Timer]:
        """Queue for a stage and work in it; `purpose` is that of a sandbox which it needs, if any."""
        admission = partial(self._sandboxes.admit, purpose) if purpose is not None else None
        queued = await limiter.enter(self._slot, since=self._left_at, then=admission)
        self.stage = limiter.stage
        if self._on_stage is not None:
            await self._on_stage(limiter.stage)
        timer = Timer(limiter.stage, self._attempt, queued)
        try:
            async with limiter.deadline(seconds, clock or WorkClock()):
                yield timer
        except BaseException as error:
            mask_error(error, self.hidden)
            cancelled = isinstance(error, anyio.get_cancelled_exc_class())
            timer.error = "cancelled" if cancelled else describe(error).code
            raise
        finally:
            self._left_at = time.perf_counter()
            if self.episode is not None:
                hide(self.episode)
            self.spans.append(timer.span())

    async def release(self) -> None:
        try:
            await self._sandboxes.release()
        finally:
            self._slot.free()
            self._policy.close()


def limits_of(environment: Environment, request: RolloutRequest) -> EpisodeLimits:
    """Let the request override the environment's limits."""
    overrides = request.limits.model_dump(exclude_none=True)
    return environment.spec.limits.model_copy(update=overrides)
