"""Rollouts whose agents had sub-agents, made by hand."""

from collections.abc import Sequence
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
