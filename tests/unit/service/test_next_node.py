"""One more node is said to bring what waits in the store and has no room elsewhere, and nothing where it is no help."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.nodes import HoldView, NodeState, NodeView, StageOverview
from api_schemas.rollouts import RolloutState, Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangFinding, HangVerdict
from api_schemas.views.overview import Bottleneck, BottleneckKind, Overview
from rollout_service.server.overview.bottleneck import next_node
from rollout_service.server.overview.stages import stages_of_all

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def node(rollouts: int, *, workers: int = 8, **fields: Any) -> NodeView:
    stages = [
        StageOverview(stage=stage, working=0, workers=size, waiting=0, places=4)
        for stage, size in zip(Stage, (2, workers, 4), strict=True)
    ]
    given: dict[str, Any] = {"cpus": 4, "provider": "local", "enforced": [], "live": rollouts}
    given |= {"in_use": rollouts, "warm": 0, "waiting": 0, "target": 32, "ceiling": 32}
    return NodeView(node=f"n{rollouts}", rollouts=rollouts, stages=stages, **given | fields)


def overview(queued: int, nodes: Sequence[NodeView], **fields: Any) -> Overview:
    given: dict[str, Any] = {"at": NOW, "version": "1", "node": "n8", "uptime_seconds": 1.0, "last_event": 0}
    given |= {
        "ready": True,
        "finished_per_second": 0.0,
        "stages": [],
        "counts": {RolloutState.QUEUED: queued},
    }
    return Overview(nodes=list(nodes), **given | fields)


def limit(kind: BottleneckKind) -> Bottleneck:
    return Bottleneck(kind=kind, message="All are busy.", hint="Add some.")


HELD = node(5, holds=[HoldView(resource="memory", reason="memory: 1 GiB")], waiting=3)
AGENTS = limit(BottleneckKind.AGENTS)


@pytest.mark.parametrize(
    ("queued", "nodes", "kind", "gain", "count"),
    [
        (12, [node(8)], BottleneckKind.AGENTS, 8, 2),
        (12, [node(8), node(9)], BottleneckKind.TOOLS, 8, 2),
        (3, [node(8)], BottleneckKind.GRADERS, 3, 1),
        (40, [HELD], BottleneckKind.HOST, 5, 8),
        (40, [node(3)], BottleneckKind.SANDBOXES, 2, 20),
        (12, [node(8), node(0)], BottleneckKind.AGENTS, 4, 1),
        (8, [node(8), node(0)], BottleneckKind.AGENTS, 0, 0),
        (12, [node(8, target=4)], BottleneckKind.AGENTS, 4, 3),
        (12, [node(0, state=NodeState.DRAINING)], None, 8, 2),
        (12, [node(8, state=NodeState.DEAD)], None, 1, 12),
        (12, [node(8)], None, 0, 0),
        (0, [node(8)], BottleneckKind.AGENTS, 0, 0),
        (900, [node(8)], BottleneckKind.ENGINES, 0, 0),
        (900, [node(8)], BottleneckKind.PAUSE, 0, 0),
        (900, [node(8)], BottleneckKind.STORE, 0, 0),
        (0, [node(1)], BottleneckKind.TRAINER, 0, 0),
        (0, [node(1)], BottleneckKind.ORDERS, 0, 0),
    ],
)
def test_it_brings_what_waits_in_the_store_and_has_no_room_elsewhere(queued, nodes, kind, gain, count):
    found = next_node(overview(queued, nodes), None if kind is None else limit(kind))
    assert (found.rollouts, found.nodes) == (gain, count)


def test_it_says_how_many_wait_or_why_nothing_comes_of_it():
    assert next_node(overview(12, [node(8)]), AGENTS).message == (
        "12 rollouts wait for a place; one more node would take 8 of them now."
    )
    full = next_node(overview(900, [node(8)]), limit(BottleneckKind.ENGINES))
    assert full.message == "One more node would bring nothing: the engines are full; add engines."
    away = overview(12, [node(8)], ready=False, reasons=["no backend is in service"])
    assert "no backend is in service" in next_node(away, None).message
    finding = HangFinding(
        finding_id="hang-1",
        verdict=HangVerdict.STUCK,
        kind=StepKind.ENGINE,
        subject="policy@a",
        since=NOW,
        seconds=30.0,
        message="a hangs",
        hint="",
    )
    assert "something is stuck: a hangs" in next_node(overview(12, [node(8)], findings=[finding]), None).message


def test_stages_of_several_nodes_are_added_up():
    init, rollout, evaluate = stages_of_all([node(8), node(3, workers=16), node(1).model_copy(update={"stages": []})])
    assert [one.workers for one in (init, rollout, evaluate)] == [4, 24, 8]
    assert stages_of_all([]) == []


NODES = st.lists(
    st.builds(
        node,
        st.integers(0, 40),
        workers=st.integers(1, 64),
        target=st.integers(0, 64),
        waiting=st.integers(0, 3),
        holds=st.sampled_from([[], HELD.holds]),
        state=st.sampled_from(NodeState),
    ),
    max_size=5,
)


@given(st.integers(0, 2_000), NODES, st.none() | st.sampled_from(BottleneckKind).map(limit))
def test_a_gain_is_never_more_than_what_is_queued_and_its_figures_agree(queued, nodes, found):
    answer = next_node(overview(queued, nodes), found)
    assert 0 <= answer.rollouts <= queued
    assert (answer.rollouts == 0) == (answer.nodes == 0)
    assert answer.nodes <= queued
    assert answer.message.endswith((".", "hangs"))


@given(st.integers(0, 500), NODES)
def test_a_node_with_room_takes_its_part_before_another_is_worth_anything(queued, nodes):
    answer = next_node(overview(queued, [*nodes, node(0, workers=8)]), AGENTS)
    assert answer.rollouts <= max(0, queued - 8)
