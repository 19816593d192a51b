"""The gain of one more node like the present ones, or why it would bring nothing: a pure decision.

Only rollouts that wait in the store count, where another node can claim them, and only as many as the present nodes
have no room for. Waits for engines, weights, the trainer or the store are no reason for a node.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from api_schemas.nodes import NodeState, NodeView
from api_schemas.rollouts import RolloutState, Stage
from api_schemas.views.hangs import HangVerdict
from api_schemas.views.overview import Bottleneck, BottleneckKind, NextNode, Overview

_NOT_NODES: Mapping[BottleneckKind, str] = {
    BottleneckKind.ENGINES: "the engines are full; add engines",
    BottleneckKind.PAUSE: "rollouts wait for weights",
    BottleneckKind.STORE: "rollouts wait for the store, and each node asks it for more",
    BottleneckKind.TRAINER: "the trainer takes no batches",
    BottleneckKind.ORDERS: "the nodes have room, and nothing is queued",
}


def next_node(overview: Overview, limit: Bottleneck | None) -> NextNode:
    if limit is not None and limit.kind in _NOT_NODES:
        return _nothing(f"{_NOT_NODES[limit.kind]}.")
    queued = overview.counts.get(RolloutState.QUEUED, 0)
    if not queued:
        return _nothing("nothing is queued that a node could begin.")
    nodes = [node for node in overview.nodes if node.state is NodeState.READY]
    if nodes and limit is None:
        return _nothing(_unexplained(overview))
    is_of_starts = limit is not None and limit.kind is BottleneckKind.SANDBOXES
    room = sum(max(0, begins_at_once(node) - node.rollouts) for node in nodes)
    left = queued if is_of_starts else queued - room
    each = _each(overview.nodes, Stage.INIT if is_of_starts else Stage.ROLLOUT)
    if left <= 0:
        return _nothing(f"the nodes have room for {room} more rollouts, and {queued} are queued.")
    gain = min(left, each)
    waits = "1 rollout waits" if left == 1 else f"{left} rollouts wait"
    return NextNode(
        rollouts=gain,
        nodes=math.ceil(left / each),
        message=f"{waits} for a place; one more node would take {gain} of them now.",
    )


def begins_at_once(node: NodeView) -> int:
    """Return how many rollouts a node works on at once, as far as its workers and its host go."""
    workers = _workers(node, Stage.ROLLOUT)
    return min(workers, node.in_use) if node.holds and node.waiting else min(workers, node.target)


def _each(nodes: Sequence[NodeView], stage: Stage) -> int:
    """Return how many rollouts another node would take: the median of the present ones."""
    sizes = [
        _workers(node, stage) if stage is Stage.INIT else begins_at_once(node)
        for node in nodes
        if node.state is not NodeState.DEAD
    ]
    return max(1, round(statistics.median(sizes))) if sizes else 1


def _workers(node: NodeView, stage: Stage) -> int:
    return next((one.workers for one in node.stages if one.stage is stage), node.places)


def _unexplained(overview: Overview) -> str:
    """Explain why another node would bring nothing although rollouts are queued."""
    if overview.reasons:
        return f"no rollout can begin: {overview.reasons[0]}"
    stuck = [one.message for one in overview.findings if one.verdict is HangVerdict.STUCK]
    if stuck:
        return f"something is stuck: {stuck[0]}"
    return "the nodes have free workers, which take what is queued."


def _nothing(why: str) -> NextNode:
    return NextNode(message=f"One more node would bring nothing: {why}")
