"""Rollouts whose agents had sub-agents, made by hand, and sub-agents that play scripts."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime

from api_schemas.rollouts import Rollout, RolloutState
from api_schemas.rollouts.trees import (
    AgentNode,
    Assigns,
    InvalidBecause,
    NodeParent,
    NodePrompt,
    Work,
    WorkSeconds,
)
from api_schemas.tasks import Task
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.episodes import Policy, SubagentSlot
from rollout_service.pipeline.fair_slots import FairSlots
from rollout_service.testing.scripted_policy import ScriptedPolicy, ScriptedTurn
from rollout_service.tokens import ToolSpec
from sandboxes import Sandbox

CREATED = datetime(2026, 1, 31, tzinfo=UTC)

DIRECT = Work(
    main_steps=[2, 2, 1],
    critical_steps=5,
    scheduled_steps=5,
    total_steps=5,
    direct_calls=4,
    seconds=WorkSeconds(critical=2.0),
)
"""Four calls of other tools, then the answer."""

WIDE = Work(
    main_steps=[1, 1],
    critical_steps=5,
    scheduled_steps=5,
    total_steps=10,
    waves=1,
    width_max=3,
    width_mean=3.0,
    balance=8 / 9,
    created=3,
    assigns=Assigns(attempted=4, executed=3, valid=2, over_cap=1),
    seconds=WorkSeconds(critical=4.0, queued=1.0, straggler=0.5, active=6.0),
    subagent_tokens=90,
    result_chars=12,
)
"""Three tasks at once, one of which failed, and one over the limit."""

SERIAL = Work(
    main_steps=[1, 1, 1],
    critical_steps=9,
    scheduled_steps=9,
    total_steps=9,
    waves=2,
    width_max=1,
    width_mean=1.0,
    created=1,
    assigns=Assigns(attempted=2, executed=2, valid=2, duplicate=1),
    seconds=WorkSeconds(critical=6.0, active=4.0),
    subagent_tokens=60,
    result_chars=8,
)
"""The same task twice, one after the other."""


def node(number: int, invalid_because: InvalidBecause | None = None) -> AgentNode:
    """Return a sub-agent of a root's first turn."""
    return AgentNode(
        node_id=f"r/{number}",
        parent=NodeParent(turn=0, call_id=f"call-{number}", wave=0),
        agent="reader",
        pool="frozen-1",
        model="tiny",
        prompt=NodePrompt(system="You read.", user="Read."),
        valid=invalid_because is None,
        invalid_because=invalid_because,
    )


def rollout(
    work: Work | None,
    reward: float | None = 1.0,
    *,
    nodes: Sequence[AgentNode] | None = None,
    rollout_id: str = "r",
    parts: dict[str, float] | None = None,
) -> Rollout:
    """Return an ended rollout, without a score if `reward` is None; its nodes are by default those of `work`."""
    if nodes is None:
        assigns = work.assigns if work else Assigns()
        failed = [InvalidBecause.MAX_TURNS] * (assigns.executed - assigns.valid)
        nodes = [node(number, reason) for number, reason in enumerate([None] * assigns.valid + failed, 1)]
    return Rollout(
        rollout_id=rollout_id,
        state=RolloutState.CANCELLED if reward is None else RolloutState.COMPLETED,
        task=Task(environment="pointers"),
        pool="policy",
        reward=reward,
        reward_parts=parts or {},
        created_at=CREATED,
        work=work,
        nodes=list(nodes),
    )


class ScriptedSubagents:
    """Plays a script for each sub-agent; implements `episodes.SubagentHost`."""

    def __init__(self, script: Callable[[str], Iterable[ScriptedTurn]], *, slots: int = 64, delay: float = 0.0) -> None:
        """`script` is a function of the agent's name; each turn takes `delay` seconds."""
        self._script = script
        self._delay = delay
        self.slots = FairSlots(slots)
        self.opened: list[tuple[str, ScriptedPolicy]] = []
        """The policies so far, each with its agent's name."""

    def model(self, pool: str) -> str:
        """Return the pool's name as that of its model."""
        return pool

    async def open(self, pool: str, tools: list[ToolSpec], *, agent: str, temperature: float) -> Policy:
        """Begin the script of an agent."""
        policy = ScriptedPolicy(self._script(agent), delay=self._delay)
        policy.offer(tools)
        self.opened.append((agent, policy))
        return policy

    def slot(self) -> AbstractAsyncContextManager[SubagentSlot]:
        """Wait for a slot."""
        return self.slots.slot("episode")

    def sandbox(self) -> AbstractAsyncContextManager[Sandbox]:
        """Fail: a script needs no sandbox."""
        raise EnvironmentFailedError("scripted sub-agents have no sandboxes", hint="Share the agent's.")
