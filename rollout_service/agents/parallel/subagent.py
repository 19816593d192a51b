"""One task that is assigned to a sub-agent: the same agent loop, against a frozen pool.

- It sees its system prompt and its task, and nothing of its parent's conversation; its parent sees its result alone.
- None of its tokens has mask 1.
- A failure of its engine or its own sandbox is retried alone; if it stays, the rollout fails, and no text blames the
  policy. What the sub-agent itself did wrong is an invalid result, with the reason.
- It is in the tree however it ends, with its costs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import StopReason, Usage
from api_schemas.rollouts.steps import StepKind
from api_schemas.rollouts.trees import (
    AgentNode,
    InvalidBecause,
    NodeDetail,
    NodeParent,
    NodePrompt,
    NodeSeconds,
)
from api_schemas.trajectories import Message, Segment, Trajectory
from rollout_service.activity import in_lane, waits_for
from rollout_service.agents.parallel.ledger import BranchTimes, Steps
from rollout_service.agents.parallel.tools import RESULT_RULE, marked_result, result_text
from rollout_service.agents.parallel.tree import AgentTree, FrozenPoolChangedError
from rollout_service.agents.tool_calling.agent import ToolCallingAgent
from rollout_service.agents.tool_calling.tools import cut_middle
from rollout_service.base.errors import describe
from rollout_service.base.masking import mask_info
from rollout_service.episodes import Episode, EpisodeLimits, SubagentSlot, WorkClock
from sandboxes import Sandbox
from sandboxes.errors import LimitExceededError, SandboxClosedError

if TYPE_CHECKING:
    from rollout_service.agents.parallel.calls import ParallelCalls

MAX_TRIES = 3
"""For a task whose infrastructure fails, the first time included."""

_INVALID = {
    StopReason.MAX_TURNS: InvalidBecause.MAX_TURNS,
    StopReason.MAX_TOKENS: InvalidBecause.MAX_TOKENS,
    StopReason.MAX_TOOL_CALLS: InvalidBecause.MAX_TOOL_CALLS,
    StopReason.MAX_CRITICAL_STEPS: InvalidBecause.MAX_CRITICAL_STEPS,
    StopReason.CONTEXT_FULL: InvalidBecause.CONTEXT_FULL,
    StopReason.TRUNCATED: InvalidBecause.TRUNCATED,
    StopReason.MALFORMED: InvalidBecause.MALFORMED,
    StopReason.AGENT_TIMEOUT: InvalidBecause.TIMEOUT,
    StopReason.SANDBOX_ENDED: InvalidBecause.SANDBOX_ENDED,
}


MakeCalls = Callable[[str, int | None, SubagentSlot], "ParallelCalls"]
"""Called with a sub-agent's id, its allowance of steps, and its slot."""


@dataclass(slots=True)
class Branch:
    tree: AgentTree
    parent_episode: Episode
    parent: NodeParent
    agent: str
    system: str
    user: str
    duplicate: bool
    make_calls: MakeCalls
    allowance: int | None = None
    """Steps that may follow each other; None sets no limit."""
    times: BranchTimes = field(default_factory=BranchTimes)
    steps: Steps = field(default_factory=Steps)
    """Set once it has ended."""
    result: str = ""
    _number: int = 0
    _model: str = ""
    _invalid_because: InvalidBecause | None = InvalidBecause.CANCELLED
    _stop_reason: StopReason | None = None
    _error: ErrorInfo | None = None
    _episodes: list[Episode] = field(default_factory=list)
    """One for each try; only the last has a result, and all cost something."""
    _calls: ParallelCalls | None = None
    _sandbox_id: str | None = None
    _versions: list[int] = field(default_factory=list)

    async def run(self, clock: WaitingClock) -> str:
        """Return the text for the parent; `clock` is the parent's.

        Errors of the engine, the renderer and the sandbox are raised as they are, once they were retried.
        """
        self._model = self.tree.host.model(self.tree.settings.subagent.pool)
        self._number = len(self.tree.episode.nodes) + 1
        self.tree.put(self._number, self._node())
        try:
            with in_lane(str(self._number)):
                await self._run_with_retries(clock)
            return result_text(self.result, self._invalid_because)
        except Exception as error:
            self._invalid_because, self._error = InvalidBecause.ERROR, self._described(error)
            self._stop_reason = StopReason.ERROR
            raise
        finally:
            self.times.ended = time.perf_counter()
            if self._episodes and self._calls is not None:
                policy = self._episodes[-1].policy
                self.steps = self._calls.ledger.steps(policy.usage.turns)
                self._versions = self._versions or versions_of(policy.trajectory())
            self.tree.assigns["valid"] += self._invalid_because is None
            self.tree.put(self._number, self._node())

    async def _run_with_retries(self, clock: WaitingClock) -> None:
        for tries_left in reversed(range(MAX_TRIES)):
            try:
                await self._run_once(clock)
            except Exception as error:
                if not tries_left or not self._may_retry(error):
                    raise
            else:
                return

    def _described(self, error: Exception) -> ErrorInfo:
        return mask_info(describe(error), self.parent_episode.hidden)

    def _may_retry(self, error: Exception) -> bool:
        """Return whether another try may succeed."""
        is_shared = self.tree.settings.subagent.sandbox == "shared"
        if isinstance(error, SandboxClosedError | LimitExceededError) and is_shared:
            return False
        return describe(error).retryable and not isinstance(error, FrozenPoolChangedError)

    async def _run_once(self, clock: WaitingClock) -> None:
        queued_since = time.perf_counter()
        async with AsyncExitStack() as stack:
            with waits_for(StepKind.SUBAGENT, self.agent):
                slot = await stack.enter_async_context(self.tree.host.slot())
            self.times.queued += time.perf_counter() - queued_since
            if not self.has_begun:
                self.times.began = time.perf_counter()
                self.tree.count_begun(duplicate=self.duplicate)
            with clock.working():
                async with self._sandbox() as sandbox:
                    self._sandbox_id = None if sandbox is None else sandbox.id
                    await self._work(sandbox, slot)

    @asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[Sandbox | None]:
        if self.tree.settings.subagent.sandbox == "shared":
            yield self.parent_episode.sandbox
            return
        async with self.tree.host.sandbox() as sandbox:
            yield sandbox

    async def _work(self, sandbox: Sandbox | None, slot: SubagentSlot) -> None:
        settings = self.tree.settings.subagent
        self._calls = self.make_calls(self.node_id, self.allowance, slot)
        policy = await self.tree.host.open(
            settings.pool, self._calls.definitions, agent=self.agent, temperature=settings.temperature
        )
        parent = self.parent_episode
        episode = Episode(
            request=parent.request,
            attempt=parent.attempt,
            limits=self._limits(),
            policy=policy,
            sandbox=sandbox,
            pauses=parent.pauses,
            limit_violations=parent.limit_violations,
            state={} if settings.sandbox == "own" else parent.state,
        )
        self._episodes.append(episode)
        self._stop_reason = await self._run_agent(ToolCallingAgent(calls=self._calls), episode)
        self._versions = versions_of(policy.trajectory())
        self.tree.check_versions(settings.pool, self._versions)
        self._judge(episode, self._calls, self._stop_reason)

    async def _run_agent(self, agent: ToolCallingAgent, episode: Episode) -> StopReason:
        """Treat an agent that ends its own sandbox as one that has stopped."""
        prompt = self._prompt()
        messages = [
            Message(role="system", content=prompt.system),
            Message(role="user", content=prompt.user),
        ]
        try:
            return await agent.run(episode, messages)
        except (SandboxClosedError, LimitExceededError) as error:
            lost = isinstance(error, SandboxClosedError) or error.limit == "lifetime"
            if self.tree.settings.subagent.sandbox == "shared" or not lost:
                raise
            return StopReason.SANDBOX_ENDED

    def _limits(self) -> EpisodeLimits:
        own, parent = self.tree.settings.subagent, self.parent_episode.limits
        return EpisodeLimits(
            max_turns=own.max_turns,
            max_tokens=own.max_tokens,
            max_turn_tokens=own.max_turn_tokens,
            max_malformed=parent.max_malformed,
            agent_seconds=own.seconds,
            tool_seconds=parent.tool_seconds,
            tool_output_chars=parent.tool_output_chars,
        )

    def _judge(self, episode: Episode, calls: ParallelCalls, stop_reason: StopReason) -> None:
        text = episode.answer or ""
        marked = marked_result(text)
        is_marked = marked is not None or stop_reason is StopReason.FINISHED
        self.result = cut_middle(text.strip() if marked is None else marked, self.tree.settings.result_chars)
        called = calls.ledger.direct_calls > 0 or bool(calls.ledger.waves)
        if stop_reason in _INVALID:
            self._invalid_because = _INVALID[stop_reason]
        elif not self.result:
            self._invalid_because = InvalidBecause.EMPTY
        elif not is_marked:
            self._invalid_because = InvalidBecause.NO_RESULT
        elif self.tree.settings.subagent.needs_tool_call and not called:
            self._invalid_because = InvalidBecause.NO_TOOL_CALL
        else:
            self._invalid_because = None

    @property
    def has_begun(self) -> bool:
        """Whether it has had a slot, without which it did not run."""
        return self.times.began is not None

    @property
    def node_id(self) -> str:
        return f"{self.tree.rollout_id}/{self._number}"

    def _prompt(self) -> NodePrompt:
        user = self.user
        if self.tree.settings.subagent.sees_task:
            user = f"{self.tree.task_prompt}\n\n{user}"
        return NodePrompt(system=f"{self.system}\n\n{RESULT_RULE}", user=user)

    def _usage(self) -> Usage:
        """Return what all tries used."""
        tries = [each.policy.usage.model_copy(update={"tool_calls": each.tool_calls}) for each in self._episodes]
        return Usage(**{name: sum(getattr(one, name) for one in tries) for name in Usage.model_fields})

    def _node(self) -> AgentNode:
        policy = self._episodes[-1].policy if self._episodes else None
        wants_tokens = self.parent_episode.request.exports.nodes is NodeDetail.TOKENS
        return AgentNode(
            node_id=self.node_id,
            parent=self.parent,
            agent=self.agent,
            pool=self.tree.settings.subagent.pool,
            model=self._model,
            versions=[self._versions[0], self._versions[-1]] if self._versions else [],
            prompt=self._prompt(),
            result=self.result,
            valid=self._invalid_because is None,
            invalid_because=self._invalid_because,
            duplicate=self.duplicate,
            stop_reason=self._stop_reason,
            error=self._error,
            usage=self._usage(),
            main_steps=self._calls.ledger.main_steps(policy.usage.turns) if policy and self._calls else [],
            critical_steps=self.steps.critical,
            seconds=NodeSeconds(
                queued=self.times.queued,
                worked=self.times.worked,
                engine=sum(each.policy.engine_seconds for each in self._episodes),
                tools=sum(each.tool_seconds for each in self._episodes),
            ),
            sandbox=self._sandbox_id,
            trajectory=frozen(policy.trajectory()) if policy and wants_tokens else None,
        )


def versions_of(trajectory: Trajectory) -> list[int]:
    """Return the versions that sampled tokens, in ascending order."""
    return sorted(
        {
            version
            for segment in trajectory.segments
            for version, sampled in zip(segment.versions, segment.loss_mask, strict=True)
            if sampled
        }
    )


def frozen(trajectory: Trajectory) -> Trajectory:
    """Set mask 0 everywhere, without anything that only sampled tokens have."""
    return trajectory.model_copy(update={"segments": [_frozen(segment) for segment in trajectory.segments]})


def _frozen(segment: Segment) -> Segment:
    length = len(segment.token_ids)
    return segment.model_copy(
        update={
            "loss_mask": [0] * length,
            "logprobs": [0.0] * length,
            "versions": [-1] * length,
            "turn_ids": [-1] * length,
        }
    )


class WaitingClock:
    """Runs an agent's clock during a wave only while at least one of the wave is at work."""

    def __init__(self, clock: WorkClock) -> None:
        self._clock = clock
        self._at_work = 0

    def __enter__(self) -> Self:
        self._clock.stop()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.start(self._clock.seconds)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count one as at work within the block."""
        if self._at_work == 0:
            self._clock.start(self._clock.seconds)
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1
            if self._at_work == 0:
                self._clock.stop()
