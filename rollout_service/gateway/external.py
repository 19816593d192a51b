"""Agents outside: rollouts whose agent is a program of the caller's, which reports its end over the API.

The environment's `init` runs as ever, and so does `evaluate` unless the program reports a reward. A report of an
attempt that is over is refused, so a program that outlives its attempt cannot end the next one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256

import anyio

from api_schemas.external import RolloutAccess, RolloutEnd
from api_schemas.rollouts import StopReason
from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import waits_for
from rollout_service.agents.tool_calling.agent import final_answer
from rollout_service.base.errors import ConflictError, EnvironmentFailedError, NotFoundError
from rollout_service.base.signals import ChangeSignal
from rollout_service.environments.contract import Environment, EvaluateIn, Replayable
from rollout_service.environments.wrapped import WrappedEnvironment
from rollout_service.episodes import Episode, GatewayAccess, Score
from sandboxes.task_groups import open_task_group

MAX_REMEMBERED = 10_000


@dataclass(slots=True, eq=False)
class ExternalAgent:
    """The program of one attempt."""

    access: RolloutAccess
    report: RolloutEnd | None = None
    reported: anyio.Event = field(default_factory=anyio.Event)


class ExternalAgents:
    """Programs that work on rollouts of this service."""

    def __init__(self) -> None:
        self._agents: dict[str, ExternalAgent] = {}
        self._accepted: OrderedDict[tuple[str, int | None], bytes] = OrderedDict()
        """Hashes of reports, by rollout and attempt: a program whose answer was lost repeats its report."""
        self.changed = ChangeSignal()

    def begin(self, episode: Episode, access: GatewayAccess, model: str) -> ExternalAgent:
        agent = ExternalAgent(RolloutAccess(url=access.url, key=access.key, model=model, attempt=episode.attempt))
        rollout_id = episode.request.rollout_id or ""
        self._agents[rollout_id] = agent
        for attempt in (episode.attempt, None):  # of an earlier rollout with this id
            self._accepted.pop((rollout_id, attempt), None)
        self.changed.notify()
        return agent

    def end(self, rollout_id: str) -> None:
        """Forget a program whose attempt's agent has ended."""
        self._agents.pop(rollout_id, None)
        self.changed.notify()

    def access(self, rollout_id: str) -> RolloutAccess | None:
        """Return None unless the rollout's program may work now."""
        agent = self._agents.get(rollout_id)
        return agent.access if agent is not None and agent.report is None else None

    def report(self, rollout_id: str, end: RolloutEnd) -> None:
        """Accept a program's report; the same one may be sent again, also after the attempt has ended.

        Raises:
            NotFoundError: No program works on this rollout here.
            ConflictError: Another report came before, or the attempt is over.
        """
        if self.has_accepted(rollout_id, end):
            return
        agent = self._agents.get(rollout_id)
        if agent is None:
            raise NotFoundError(
                f"no external agent works on rollout {rollout_id} at this service",
                hint="Look at its state; a report can be made while the rollout stage lasts.",
            )
        if end.attempt is not None and end.attempt != agent.access.attempt:
            raise ConflictError(
                f"attempt {end.attempt} of rollout {rollout_id} is over",
                hint=f"Attempt {agent.access.attempt} has another key: begin anew with it.",
            )
        if agent.report is not None and agent.report != end:
            raise ConflictError(f"another end of rollout {rollout_id} was reported before")
        agent.report = end
        self._accepted[rollout_id, end.attempt] = _hash(end)
        if len(self._accepted) > MAX_REMEMBERED:
            self._accepted.popitem(last=False)
        agent.reported.set()

    def has_accepted(self, rollout_id: str, end: RolloutEnd) -> bool:
        """Return whether a report repeats an accepted one; without an attempt, it may be about the one at work."""
        if end.attempt is None and rollout_id in self._agents:
            return False
        return self._accepted.get((rollout_id, end.attempt)) == _hash(end)


def _hash(end: RolloutEnd) -> bytes:
    return sha256(end.model_dump_json().encode()).digest()


class ExternallyDriven(WrappedEnvironment):
    """For one attempt, replaces an environment's agent by a program outside."""

    uses_gateway = True

    def __init__(self, environment: Environment, agents: ExternalAgents) -> None:
        super().__init__(environment)
        self._agents = agents
        self._reward: Score | None = None
        self.spec = environment.spec.model_copy(update={"tools": []})
        self.replayable: Replayable = "never"

    async def run(self, episode: Episode) -> StopReason:
        """Wait for the report for as long as an agent may work.

        Raises:
            EnvironmentFailedError: The program reports that it has failed.
            InferenceError: No engine answered.
        """
        access = episode.gateway
        if access is None:
            raise EnvironmentFailedError("the gateway was not opened for an external agent")
        rollout_id = episode.request.rollout_id or ""
        agent = self._agents.begin(episode, access, episode.request.pool)
        try:
            with episode.clock.limit(episode.limits.agent_seconds):
                async with open_task_group() as tasks:
                    tasks.start_soon(access.until_failed)
                    with waits_for(StepKind.AGENT, "external"):
                        await agent.reported.wait()
                    tasks.cancel_scope.cancel()
        finally:
            self._agents.end(rollout_id)
        return self._settle(episode, access, agent.report)

    def _settle(self, episode: Episode, access: GatewayAccess, report: RolloutEnd | None) -> StopReason:
        episode.answer = final_answer(episode.policy.messages)
        if report is None:
            return StopReason.AGENT_TIMEOUT
        if report.error is not None:
            raise EnvironmentFailedError(
                f"the external agent failed: {report.error}", hint="See the program's own log."
            )
        if report.answer is not None:
            episode.answer = report.answer
        if report.reward is not None:
            self._reward = Score(report.reward, dict(report.reward_parts))
            self.spec = self.spec.model_copy(update={"evaluate_in": EvaluateIn.NONE})
        return access.stop_reason or StopReason.FINISHED

    async def evaluate(self, episode: Episode) -> Score:
        return self._reward or await super().evaluate(episode)
