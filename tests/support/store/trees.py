"""Rollouts with sub-agents, for tests of what keeps and returns them."""

from datetime import UTC, datetime

from hypothesis import strategies as st

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, StopReason, TokenExtras, Usage
from api_schemas.rollouts.trees import (
    AgentNode,
    Assigns,
    InvalidBecause,
    NodeDetail,
    NodeParent,
    NodePrompt,
    NodeSeconds,
    Work,
)
from api_schemas.tasks import Task
from api_schemas.trajectories import Message, Trajectory
from tests.support.samples import segment, trajectory

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = st.text(max_size=12)
COUNTS = st.integers(0, 2**53)
SECONDS = st.floats(0, 1e9)


def conversation(tokens: int, *, mask: int, text: str = "hello") -> Trajectory:
    """Return a trajectory of one segment."""
    columns = {"logprobs": [-0.5] * tokens, "versions": [3] * tokens, "turn_ids": [0] * tokens}
    return trajectory(
        segment(list(range(tokens)), [mask] * tokens, **columns),
        messages=[Message(role="assistant", content=text)],
    )


def node(rollout_id: str, number: int, **fields: object) -> AgentNode:
    """Return a sub-agent that did its task, with these fields changed."""
    given = {
        "node_id": f"{rollout_id}/{number}",
        "parent": NodeParent(turn=number - 1, call_id=f"call-{number}", wave=0),
        "agent": "reader",
        "pool": "frozen-1",
        "model": "tiny",
        "versions": [7, 7],
        "prompt": NodePrompt(system="You read.", user=f"Read page {number}."),
        "result": f"page {number} says 4",
        "valid": True,
        "stop_reason": StopReason.FINISHED,
        "usage": Usage(turns=2, sampled_tokens=9),
        "main_steps": [1, 1],
        "critical_steps": 2,
        "seconds": NodeSeconds(queued=0.25, worked=1.5),
        "trajectory": conversation(4, mask=0, text=f"node {number}"),
    }
    return AgentNode.model_validate(given | fields)


WORK = Work(
    main_steps=[1, 1],
    critical_steps=6,
    scheduled_steps=6,
    total_steps=6,
    waves=2,
    width_max=1,
    width_mean=1.0,
    created=1,
    assigns=Assigns(attempted=2, executed=2, valid=2),
)


def order(detail: NodeDetail = NodeDetail.NONE, rollout_id: str = "r1") -> RolloutRequest:
    """Return a request for a rollout."""
    task = Task(environment="calc")
    return RolloutRequest(rollout_id=rollout_id, task=task, exports=TokenExtras(nodes=detail))


def rollout(rollout_id: str = "r1", **fields: object) -> Rollout:
    """Return a rollout of two sub-agents, with these fields changed."""
    given = {
        "rollout_id": rollout_id,
        "state": RolloutState.COMPLETED,
        "task": Task(environment="calc"),
        "pool": "policy",
        "reward": 1.0,
        "created_at": NOW,
        "trajectory": conversation(3, mask=1),
        "nodes": [node(rollout_id, 1), node(rollout_id, 2)],
        "work": WORK,
    }
    return Rollout.model_validate(given | fields)


def bare(nodes: list[AgentNode]) -> list[AgentNode]:
    """Return sub-agents without their trajectories."""
    return [one.model_copy(update={"trajectory": None}) for one in nodes]


@st.composite
def nodes(draw: st.DrawFn, rollout_id: str = "r1") -> list[AgentNode]:
    """Return any tree of sub-agents, each below the rollout or an earlier one."""
    made: list[AgentNode] = []
    for number in range(1, draw(st.integers(0, 5)) + 1):
        parents = st.sampled_from(["", *(one.node_id for one in made)])
        why = draw(st.none() | st.sampled_from(InvalidBecause))
        made.append(
            node(
                rollout_id,
                number,
                parent=NodeParent(node_id=draw(parents), turn=draw(COUNTS), call_id=draw(NAMES), wave=draw(COUNTS)),
                agent=draw(NAMES),
                prompt=NodePrompt(system=draw(NAMES), user=draw(NAMES)),
                result=draw(NAMES),
                valid=why is None,
                invalid_because=why,
                versions=draw(st.lists(COUNTS, max_size=2)),
                seconds=NodeSeconds(queued=draw(SECONDS), worked=draw(SECONDS)),
                trajectory=draw(st.none() | st.builds(conversation, st.integers(0, 4), mask=st.just(0), text=NAMES)),
            )
        )
    return made
