"""One attempt at a leased rollout: its saved turns, its stages, reported to the store, and its result.

A stage begins only while the attempt holds its lease; the trajectory and the spans are kept however the attempt ends.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import structlog
from pydantic import JsonValue

from api_schemas.errors import ErrorInfo
from api_schemas.external import AgentKind
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Span, Stage, StopReason
from api_schemas.rollouts.sessions import RolloutKind
from api_schemas.rollouts.steps import StepKind
from api_schemas.trajectories import Trajectory
from rollout_service.activity import waits_for
from rollout_service.agents.parallel.settings import ParallelSettings
from rollout_service.base.errors import StoreError, UnavailableError, describe
from rollout_service.base.masking import mask_info
from rollout_service.engines.serving.saved_turns import SavedTurn, UnreadableTurnError, decode
from rollout_service.engines.serving.session import without_secrets
from rollout_service.engines.serving.subagent_pools import subagent_pool
from rollout_service.engines.serving.turn_log import AnewReason, CannotResumeError, TurnLog
from rollout_service.environments.contract import Environment
from rollout_service.episodes import Episode, GatewayAccess, Policy, Score
from rollout_service.gateway.external import ExternallyDriven
from rollout_service.gateway.sessions.session import GatewaySession
from rollout_service.groups.auxiliary import PERF, raw_parts
from rollout_service.pipeline.branching import (
    BranchDivergedError,
    EarlierTurns,
    check_branch,
    earlier_turns,
    without_earlier_turns,
)
from rollout_service.pipeline.context import AttemptContext
from rollout_service.pipeline.saved_sandboxes import SavedSandbox, may_save
from rollout_service.pipeline.stage import Slot
from rollout_service.pipeline.stage_runner import StageRunner, limits_of
from rollout_service.pipeline.turn_writer import NOT_REPLAYABLE
from rollout_service.store.contract import Lease
from rollout_service.store.retrying import retry_until_stored
from rollout_service.tokens import ToolSpec
from sandboxes import SandboxError, SandboxSpec

T = TypeVar("T")


class LeaseLostError(Exception):
    """Another worker holds this rollout now, or it has ended; this attempt no longer counts."""


class NotServedError(Exception):
    """A pool of the rollout is not in service before the attempt began; the rollout waits in the store."""

    def __init__(self, pool: str) -> None:
        super().__init__(f"pool {pool!r} is not in service")
        self.pool = pool


class ElsewhereError(NotServedError):
    """Another node can run the rollout; the rollout waits in the store until that one leases it."""


class StoreAwayError(Exception):
    """The shard with a rollout stays away while others are not, so the attempt must not keep its worker."""


AWAY_SECONDS = 5.0
"""How long an attempt that cannot begin keeps its worker while its shard is away."""


async def until_stored(context: AttemptContext, what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call to the store until it succeeds.

    Raises:
        StoreAwayError: It has failed for a while, and rollouts of other shards could use the worker.
    """
    with waits_for(StepKind.STORE, what):
        while True:
            with anyio.move_on_after(AWAY_SECONDS if len(context.store.shards) > 1 else None):
                return await retry_until_stored(what, call)
            if context.store.problem is None:
                raise StoreAwayError(what)


class Attempt:
    def __init__(self, context: AttemptContext, lease: Lease) -> None:
        """`lease` has a place before the init stage, which the attempt gives back."""
        self._context = context
        self.lease = lease
        self._slot = Slot(context.stages.init.places)
        self._queued_at = time.perf_counter() - lease.queued_seconds
        self._runner: StageRunner | None = None
        self._state = RolloutState.QUEUED
        self._parallel: ParallelSettings | None = None
        self.turns: TurnLog | None = None
        """None until the attempt begins."""

    async def run(self) -> Score:
        """Raise whatever ends the attempt early."""
        environment = self._environment()
        self._parallel = environment.spec.parallel
        self.turns = await open_turn_log(self._context, self.lease, environment)
        saved = await find_saved_sandbox(self._context, self.lease, environment, self.turns)
        policy = AttemptPolicy(self._context, self.lease.request, environment, self.turns)
        self._runner = StageRunner(
            self._context,
            environment,
            self.lease.request,
            policy,
            slot=self._slot,
            queued_at=self._queued_at,
            attempt=self.lease.attempt,
            on_stage=partial(self._advance, policy),
            turns=self.turns,
            saved=saved,
        )
        try:
            return await self._runner.run()
        except CannotResumeError as error:
            branch = self.lease.request.branch_of
            if branch is None or not self.turns.is_at_branch:
                raise
            raise BranchDivergedError(branch, self.turns.played, error.reason) from error

    def _environment(self) -> Environment:
        """Return the task's environment, with a program outside as its agent if the request says so."""
        request = self.lease.request
        known = self._context.environments.get(request.task.environment)
        environment = known.for_instance(request.task.instance)
        if request.agent is AgentKind.EXTERNAL:
            return ExternallyDriven(environment, self._context.external)
        return environment

    async def _advance(self, policy: AttemptPolicy, stage: Stage) -> None:
        if stage is Stage.INIT:
            policy.check_served()
        state = RolloutState(stage.value)
        if state is self._state:
            return
        what, store = f"record the stage {stage}", self._context.store
        advance = partial(store.advance, self.lease, self._context.owner, state)
        try:
            if stage is Stage.INIT or len(store.shards) == 1:  # an outage of the store costs no attempt
                is_held = await until_stored(self._context, what, advance)
            else:
                with waits_for(StepKind.STORE, what):
                    is_held = await advance()
        except StoreError:
            return  # its shard is away; the stage only shows how far it is, and waiting would keep a worker
        if not is_held:
            raise LeaseLostError(self.lease.rollout_id)
        self._state = state

    async def release(self) -> None:
        """Give back the worker and all resources; shielded and idempotent."""
        if self._runner is not None:
            await self._runner.release()
        self._slot.free()

    @property
    def stage(self) -> Stage | None:
        return self._runner.stage if self._runner else None

    def describe(self, error: Exception) -> ErrorInfo:
        """Mask the environment's secrets."""
        number = self.lease.attempt if self.stage is not None else None  # none has begun before the first stage
        info = describe(error, stage=self.stage, attempt=number)
        return mask_info(info, self._runner.hidden if self._runner else ())

    @property
    def spans(self) -> list[Span]:
        return [*self.lease.spans, *(self._runner.spans if self._runner else ())]

    @property
    def _episode(self) -> Episode | None:
        return self._runner.episode if self._runner else None

    def result(self, state: RolloutState, *, score: Score | None = None, error: ErrorInfo | None = None) -> Rollout:
        episode = self._episode
        policy = episode.policy if episode else None
        return Rollout(
            rollout_id=self.lease.rollout_id,
            state=state,
            task=self.lease.request.task,
            pool=self.lease.request.pool,
            attempt=self.lease.attempt,
            reward=score.reward if score else None,
            reward_parts=score.parts | self._parts(score) if score else {},
            notes=list(episode.notes) if episode else [],
            program=episode.program if episode else None,
            stop_reason=self._stop_reason(state, error),
            error=error,
            retries=self.lease.retries,
            **({"usage": policy.usage} if policy else {}),
            spans=self.spans,
            branch_of=self.lease.request.branch_of,
            metadata=self.lease.request.metadata,
            created_at=self.lease.created_at,
            finished_at=max(datetime.now(UTC), self.lease.created_at),
            trajectory=self._trajectory(episode) if episode else None,
            nodes=list(episode.nodes) if episode else [],
            work=episode.work if episode else None,
            **_of_session(episode),
        )

    def _trajectory(self, episode: Episode) -> Trajectory:
        trajectory = episode.policy.trajectory()
        turns = set(range(len(trajectory.finish_reasons)))  # there may be none after a proposal
        found = {
            "tool_error_turns": episode.tool_error_turns.union(trajectory.tool_error_turns),
            "proposed_turns": episode.proposed_turns.union(trajectory.proposed_turns),
        }
        trajectory = trajectory.model_copy(update={name: sorted(noted & turns) for name, noted in found.items()})
        branch = self.lease.request.branch_of
        return trajectory if branch is None else without_earlier_turns(trajectory, branch)

    def _parts(self, score: Score) -> dict[str, float]:
        """Return how the work was divided; nothing in an environment without sub-agents."""
        episode = self._episode
        limits = self._parallel
        if episode is None or episode.work is None or limits is None:
            return {}
        width = limits.max_width or limits.max_assigns_per_turn
        parts = raw_parts(episode.work, max_assigns=limits.max_assigns_per_turn, max_width=width)
        return {PERF: score.reward, **parts}

    def _stop_reason(self, state: RolloutState, error: ErrorInfo | None) -> StopReason | None:
        if state is RolloutState.CANCELLED:
            return StopReason.CANCELLED
        if error is not None:
            return StopReason.STAGE_TIMEOUT if error.code == "stage_timeout" else StopReason.ERROR
        return self._runner.stop_reason if self._runner else None


def _of_session(episode: Episode | None) -> dict[str, Any]:
    """Return the fields of a part of a live session; none for a task."""
    if episode is None or episode.session is None:
        return {}
    return {
        "kind": RolloutKind.SESSION,
        "session": episode.session,
        "turn_marks": list(episode.turn_marks),
    }


class AttemptPolicy:
    """Implements `stage_runner.PolicySource`."""

    def __init__(
        self, context: AttemptContext, request: RolloutRequest, environment: Environment, turns: TurnLog
    ) -> None:
        """`turns` has those to play, and saves others."""
        self._context = context
        self._request = request
        self._turns = turns
        self._recorded = environment.recorded
        self._subagent_pool = subagent_pool(environment.spec)
        self._limits = limits_of(environment, request) if environment.uses_gateway else None
        """None unless a program drives the policy by itself."""
        self._session: GatewaySession | None = None

    def check_served(self) -> None:
        """Raise unless the pool is in service, and that of the sub-agents."""
        if self._recorded is not None:
            return
        pools, _ = self._context.policies.in_service()
        for pool in (self._request.pool, self._subagent_pool):
            if pool is not None and pool not in pools:
                raise NotServedError(pool)

    async def open(self, tools: list[ToolSpec], hidden: Collection[str]) -> Policy:
        """Open the conversation, or the recorded one; the texts of `hidden` are masked for the policy."""
        if self._recorded is not None:
            return await self._recorded.open(self._request)
        if self._limits is None:
            return without_secrets(await self._context.policies.open(self._request, tools, self._turns), hidden)
        if self._context.gateway is None:
            raise UnavailableError("there is no gateway for a program to drive the policy through")
        self._session = self._context.gateway.open(self._request, self._limits, hidden)
        return self._session

    @property
    def gateway(self) -> GatewayAccess | None:
        return self._session

    async def end(self) -> None:
        if self._session is not None:
            self.close()
            await self._session.end()

    def close(self) -> None:
        if self._session is None:
            self._context.policies.close(self._request)
        elif self._context.gateway is not None:
            self._context.gateway.close(self._session)


log = structlog.get_logger(__name__)

RESUMED, BEGUN_ANEW, SHORTENED = "resumed", "begun_anew", "shortened"
EVENT = "rollout.resume"
"""An event's kind; the data is `outcome`, `reason`, `turns`, `seconds` and `restored_turns`."""


async def open_turn_log(context: AttemptContext, lease: Lease, environment: Environment) -> TurnLog:
    """Return the saved turns to play first, and where to save the others.

    An attempt either plays every saved turn exactly as it was, or raises CannotResumeError before anything is sampled.

    Raises:
        StoreAwayError: The turns cannot be read now.
        BranchError: The rollout is a branch, and the turns before it cannot be read.
        CannotResumeError: There are saved turns, and they cannot be played.
    """
    writer = context.turn_writer
    # Sub-agents would be sampled anew, and the agent be told something else than before.
    is_replayable = environment.replayable != "never" and environment.spec.parallel is None
    saved: Sequence[SavedTurn] = ()
    if lease.saved_turns:
        if writer is None:
            raise CannotResumeError(AnewReason.DISABLED)
        if not is_replayable:
            raise CannotResumeError(AnewReason.NOT_REPLAYABLE)
        saved = await _read(context, lease.rollout_id)
    earlier = EarlierTurns()
    if (branch := lease.request.branch_of) is not None:
        check_branch(lease.request, environment)
        read = partial(earlier_turns, context.store, lease.request, branch)
        earlier = await until_stored(context, "read the turns before a branch", read)

    def save(number: int, turn: SavedTurn) -> None:
        if writer is not None and (is_replayable or number == 0):
            writer.add(lease, number, turn if is_replayable else None)

    async def on_resumed() -> None:
        await report(context, lease, turns, outcome=RESUMED)

    turns = TurnLog(
        saved,
        save=save,
        on_resumed=on_resumed if saved else None,
        earlier=earlier.turns,
        earlier_results=earlier.results,
    )
    return turns


async def find_saved_sandbox(
    context: AttemptContext, lease: Lease, environment: Environment, turns: TurnLog
) -> SavedSandbox | None:
    """Return None unless a sandbox to go on in was saved."""
    store = context.saved_sandboxes
    if store is None or not turns.saved or not may_save(environment, lease.request):
        return None
    try:
        image = await context.sandboxes.provider.identity(SandboxSpec(image=environment.spec.image))
    except SandboxError:
        return None  # its start says why
    return await store.find(lease.rollout_id, turns.saved, image)


async def report(
    context: AttemptContext, lease: Lease, turns: TurnLog | None, *, outcome: str, reason: str = ""
) -> None:
    """Count an attempt after an interruption, and record it as an event."""
    played = turns.played if turns else 0
    seconds = turns.replay_seconds if turns else 0.0
    context.metrics.count_resume(outcome, reason, played if outcome == RESUMED else 0)
    log.info("interrupted rollout taken up", outcome=outcome, reason=reason, turns=played, seconds=seconds)
    data: dict[str, JsonValue] = {
        "outcome": outcome,
        "reason": reason,
        "turns": played,
        "seconds": round(seconds, 3),
        "restored_turns": turns.restored if turns else 0,
    }
    try:
        with waits_for(StepKind.STORE, "record the resumption"):
            await context.store.record(EVENT, lease.rollout_id, data)
    except StoreError as error:
        log.warning("an event could not be recorded", kind=EVENT, error=str(error), hint=error.hint)


async def _read(context: AttemptContext, rollout_id: str) -> list[SavedTurn]:
    read = partial(context.store.saved_turns, rollout_id)
    data = await until_stored(context, "read the saved turns", read)
    if NOT_REPLAYABLE in data:
        raise CannotResumeError(AnewReason.NOT_REPLAYABLE)
    try:
        return await anyio.to_thread.run_sync(lambda: [decode(each) for each in data])
    except UnreadableTurnError as error:
        log.warning("saved turns cannot be read", rollout_id=rollout_id, error=str(error))
        raise CannotResumeError(AnewReason.UNREADABLE) from error
