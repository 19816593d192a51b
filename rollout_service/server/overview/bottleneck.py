"""The present limit of the throughput of all nodes, and the gain of one more node: pure decisions.

A service that is stuck or takes no work gets no advice on its settings: few busy workers mean opposite things in a
healthy service and in a starved one. Stages are examined from the last on, since a full one fills those before it. For
another node, only rollouts count that wait in the store, where it can claim them, and that the present nodes have no
room for.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from api_schemas.inference import BackendState
from api_schemas.nodes import NodeState, NodeView, StageOverview
from api_schemas.rollouts import RolloutState, Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangVerdict
from api_schemas.views.overview import BackendOverview, Bottleneck, BottleneckKind, NextNode, Overview
from rollout_service.server.hangs.reporter import RUN

WINDOW_SECONDS = 10.0
"""Averages are over this time, if overviews are made all the time."""
FULL = 0.9
"""The share of busy workers from which a stage is full."""
MOST = 0.5
"""The share of rollouts that is most of them."""

_ENGINES = frozenset({StepKind.ENGINE, StepKind.POOL_QUEUE})
_TOOLS = frozenset({StepKind.TOOL, StepKind.SESSION})


@dataclass(frozen=True, slots=True)
class StageLoad:
    """A stage on average over the last looks."""

    stage: Stage
    working: float
    workers: int
    waiting: float
    waits_for: dict[StepKind, float]

    @property
    def is_full(self) -> bool:
        return self.working >= FULL * self.workers

    def share(self, kinds: Iterable[StepKind]) -> float:
        """Return the share of working rollouts that wait for any of these."""
        return sum(self.waits_for.get(kind, 0.0) for kind in kinds) / self.working if self.working else 0.0


class StageLoads:
    """Averages over the last overviews, which smooth out changes from second to second."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Sequence[StageOverview]]] = deque()

    def add(self, now: float, stages: Sequence[StageOverview]) -> dict[Stage, StageLoad]:
        self._looks.append((now, stages))
        while self._looks[0][0] < now - WINDOW_SECONDS:
            self._looks.popleft()
        each_stage = zip(*(look for _, look in self._looks), strict=True)
        return {looks[-1].stage: _average(looks) for looks in each_stage}


def bottleneck(overview: Overview, loads: dict[Stage, StageLoad]) -> Bottleneck | None:
    """Return the limit of the throughput; None if nothing is to do, or something else comes first."""
    init, rollout, evaluate = (loads[stage] for stage in Stage)
    if any(one.verdict is HangVerdict.STUCK and one.kind != RUN for one in overview.findings):
        return None
    # A service without an engine in service is not ready, even while the next weights are being loaded.
    if not overview.ready and not _only_drains(overview):
        return _pause(rollout)
    queued = overview.counts.get(RolloutState.QUEUED, 0)
    return (
        _store(loads)
        or _graders(evaluate)
        or _pause(rollout)
        or _agents(rollout, queued, overview.backends)
        or _host(init, overview.nodes)
        or _starts(init, queued)
        or _orders(rollout, queued, overview)
    )


def _only_drains(overview: Overview) -> bool:
    """Return whether the answering node takes no work only because it drains, while others do."""
    states = {node.node: node.state for node in overview.nodes}
    return (
        states.get(overview.node) is NodeState.DRAINING
        and NodeState.READY in states.values()
        and any(one.backend.state is BackendState.READY for one in overview.backends)
    )


def _store(loads: Mapping[Stage, StageLoad]) -> Bottleneck | None:
    working = sum(load.working for load in loads.values())
    waiting = sum(load.waits_for.get(StepKind.STORE, 0.0) for load in loads.values())
    if waiting < max(1.0, MOST * working):
        return None
    return Bottleneck(
        kind=BottleneckKind.STORE,
        message=f"{_rollouts(waiting)} for the store, of {working:.0f}.",
        hint="Look at the load and the disk of its Redis, or of [store] folder.",
    )


def _graders(evaluate: StageLoad) -> Bottleneck | None:
    if not evaluate.is_full or evaluate.waiting < 1:
        return None
    return Bottleneck(
        kind=BottleneckKind.GRADERS,
        message=f"All {_workers(evaluate)} are busy, and {_rollouts(evaluate.waiting)} to be scored.",
        hint="Raise pipeline.evaluate_workers if the host has room, or make the environment's grader faster.",
    )


def _pause(rollout: StageLoad) -> Bottleneck | None:
    share = rollout.share([StepKind.PAUSED_POOL])
    if share < MOST:
        return None
    return Bottleneck(
        kind=BottleneckKind.PAUSE,
        message=f"{share:.0%} of the rollouts wait for a paused pool.",
        hint="They go on when its weights are loaded, or when it is resumed. If updates take long, load them from a "
        "disk that all engines share, or broadcast them.",
    )


def _agents(rollout: StageLoad, queued: int, backends: Sequence[BackendOverview]) -> Bottleneck | None:
    if not rollout.is_full or not (rollout.waiting >= 1 or queued):
        return None
    full = f"All {_workers(rollout)} are busy"
    if (share := rollout.share(_ENGINES)) >= MOST:
        if _have_room(backends) and not rollout.waits_for.get(StepKind.POOL_QUEUE):
            return Bottleneck(
                kind=BottleneckKind.AGENTS,
                message=f"{full}, and no engine has a queue, though {share:.0%} of them wait for one.",
                hint="Add nodes, or raise pipeline.rollout_workers if the hosts have room: engines could serve more.",
            )
        return Bottleneck(
            kind=BottleneckKind.ENGINES,
            message=f"{full}, and {share:.0%} of them wait for engines.",
            hint="Add engines. If those you have report no queue of their own, raise pipeline.rollout_workers instead.",
        )
    if (share := rollout.share(_TOOLS)) >= MOST:
        return Bottleneck(
            kind=BottleneckKind.TOOLS,
            message=f"{full}, and {share:.0%} of them run tools.",
            hint="Raise pipeline.rollout_workers if the hosts have room, or add nodes: engines could serve more.",
        )
    return Bottleneck(
        kind=BottleneckKind.AGENTS,
        message=f"{full}, and others wait for one.",
        hint="Raise pipeline.rollout_workers if engines and hosts have room.",
    )


def _have_room(backends: Sequence[BackendOverview]) -> bool:
    """Return whether all engines in service report an empty queue."""
    in_service = [one.backend for one in backends if one.backend.state is BackendState.READY]
    return bool(in_service) and all(one.queued == 0 for one in in_service)


def _host(init: StageLoad, nodes: Sequence[NodeView]) -> Bottleneck | None:
    held = init.waits_for.get(StepKind.HOST, 0.0)
    if held < 1:
        return None
    hold = next((hold for node in nodes for hold in node.holds), None)
    because = "" if hold is None else f": {hold.reason}"
    return Bottleneck(
        kind=BottleneckKind.HOST,
        message=f"{_rollouts(held)} for room on the host{because}.",
        hint="Raise sandboxes.ceiling if the host has room, or add nodes."
        if hold is not None and hold.resource == "ceiling"
        else "Add nodes, or give sandboxes less. sandboxes.pressure sets what a host may bear.",
    )


def _starts(init: StageLoad, queued: int) -> Bottleneck | None:
    if not init.is_full or not (init.waiting >= 1 or queued):
        return None
    return Bottleneck(
        kind=BottleneckKind.SANDBOXES,
        message=f"All {_workers(init)} start sandboxes or set up tasks, while workers that run agents are free.",
        hint="Raise pipeline.init_workers, or keep more sandboxes warm with sandboxes.warm.size.",
    )


def _orders(rollout: StageLoad, queued: int, overview: Overview) -> Bottleneck | None:
    is_asked = overview.runs or any(overview.counts.get(state, 0) for state in _UNDER_WAY)
    if queued or rollout.is_full or not is_asked:
        return None
    free = rollout.workers - rollout.working
    ready = sum(run.ready_groups for run in overview.runs)
    message = f"{free:.0f} of {_workers(rollout)} are free, and nothing is queued."
    if ready:
        return Bottleneck(
            kind=BottleneckKind.TRAINER,
            message=f"{message} {ready} groups are ready and wait for the trainer.",
            hint="Make the trainer's steps faster, or let the service begin more ahead of them: raise the run's "
            "max_concurrent or max_staleness.",
        )
    return Bottleneck(
        kind=BottleneckKind.ORDERS,
        message=message,
        hint="The service could do more: submit more at once, or raise the run's max_concurrent or max_staleness.",
    )


_UNDER_WAY = (RolloutState.INIT, RolloutState.ROLLOUT, RolloutState.EVALUATE)


def _workers(load: StageLoad) -> str:
    return f"{load.workers} {load.stage} workers"


def _rollouts(number: float) -> str:
    return "1 rollout waits" if round(number) == 1 else f"{number:.0f} rollouts wait"


def _average(looks: Sequence[StageOverview]) -> StageLoad:
    waits: Counter[StepKind] = Counter()
    for look in looks:
        waits.update(look.waits_for)
    count, newest = len(looks), looks[-1]
    return StageLoad(
        stage=newest.stage,
        working=sum(look.working for look in looks) / count,
        workers=newest.workers,
        waiting=sum(look.waiting for look in looks) / count,
        waits_for={kind: number / count for kind, number in waits.items()},
    )


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
    workers = _size_of(node, Stage.ROLLOUT)
    return min(workers, node.in_use) if node.holds and node.waiting else min(workers, node.target)


def _each(nodes: Sequence[NodeView], stage: Stage) -> int:
    """Return how many rollouts another node would take: the median of the present ones."""
    sizes = [
        _size_of(node, stage) if stage is Stage.INIT else begins_at_once(node)
        for node in nodes
        if node.state is not NodeState.DEAD
    ]
    return max(1, round(statistics.median(sizes))) if sizes else 1


def _size_of(node: NodeView, stage: Stage) -> int:
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
