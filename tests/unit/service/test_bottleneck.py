"""What limits the throughput is named, and so is the gain of one more node, where nothing else comes first."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.inference import BackendState, BackendView
from api_schemas.nodes import HoldView, NodeState, NodeView, StageOverview
from api_schemas.rollouts import RolloutState, Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.runs import RunState
from api_schemas.views.hangs import HangFinding, HangVerdict
from api_schemas.views.overview import BackendOverview, Bottleneck, BottleneckKind, Overview, RunOverview
from rollout_service.server.overview.bottleneck import WINDOW_SECONDS, StageLoads, bottleneck, next_node
from rollout_service.server.overview.stages import stages_of_all

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
WORKERS = {Stage.INIT: 8, Stage.ROLLOUT: 64, Stage.EVALUATE: 16}


def stage(name: Stage, working: int, waiting: int = 0, **waits: int) -> StageOverview:
    waits_for = {StepKind(kind): number for kind, number in waits.items()}
    return StageOverview(
        stage=name, working=working, workers=WORKERS[name], waiting=waiting, places=32, waits_for=waits_for
    )


def overview(stages: list[StageOverview], **fields: Any) -> Overview:
    given: dict[str, Any] = {
        "at": NOW,
        "version": "1",
        "node": "here",
        "uptime_seconds": 1.0,
        "last_event": 0,
        "ready": True,
        "counts": {RolloutState.ROLLOUT: 1},
        "finished_per_second": 0.0,
        "stages": stages,
    }
    return Overview(**given | fields)


def kind_of(one: Overview) -> str | None:
    found = bottleneck(one, StageLoads().add(0.0, one.stages))
    return None if found is None else found.kind


HELD = NodeView.model_construct(holds=[HoldView(resource="memory", reason="memory: 3.1 GiB available")])
RUN = RunOverview(
    run_id="r",
    state=RunState.RUNNING,
    pool="policy",
    version=1,
    acceptance_rate=0.5,
    open_groups=1,
    ready_groups=7,
    acknowledged_groups=0,
)
ENGINE = BackendOverview(backend=BackendView.model_construct(state=BackendState.READY, in_flight=40, queued=0))
FULL = BackendOverview(backend=BackendView.model_construct(state=BackendState.READY, in_flight=40, queued=9))
BUSY = stage(Stage.ROLLOUT, 64, 2, engine=40, tool=24)
QUEUED = {"counts": {RolloutState.QUEUED: 900, RolloutState.ROLLOUT: 64}}


@pytest.mark.parametrize(
    ("rollout", "others", "fields", "kind"),
    [
        (BUSY, {}, QUEUED, "engines"),
        (stage(Stage.ROLLOUT, 64, 2, engine=20, tool=40), {}, QUEUED, "tools"),
        (stage(Stage.ROLLOUT, 64, 2, agent=64), {}, QUEUED, "agents"),
        (stage(Stage.ROLLOUT, 64, 2, paused_pool=60), {}, QUEUED, "pause"),
        (BUSY, {"evaluate": stage(Stage.EVALUATE, 16, 3, grader=16)}, QUEUED, "graders"),
        (BUSY, {"evaluate": stage(Stage.EVALUATE, 16, grader=16)}, QUEUED, "engines"),
        (stage(Stage.ROLLOUT, 20), {"init": stage(Stage.INIT, 8, 3, sandbox_start=8)}, QUEUED, "sandboxes"),
        (stage(Stage.ROLLOUT, 20), {"init": stage(Stage.INIT, 3, host=3)}, QUEUED, "host"),
        (stage(Stage.ROLLOUT, 20, engine=20), {}, {}, "orders"),
        (stage(Stage.ROLLOUT, 0), {}, {"counts": {}}, None),
        (stage(Stage.ROLLOUT, 0), {}, {"counts": {}, "runs": [RUN]}, "trainer"),
        (stage(Stage.ROLLOUT, 20, store=12), {}, QUEUED, "store"),
        (BUSY, {}, QUEUED | {"backends": [ENGINE]}, "agents"),
        (BUSY, {}, QUEUED | {"backends": [ENGINE, FULL]}, "engines"),
        (stage(Stage.ROLLOUT, 64, 2, pool_queue=40), {}, QUEUED | {"backends": [ENGINE]}, "engines"),
        (stage(Stage.ROLLOUT, 20, engine=20), {}, QUEUED, None),
        (stage(Stage.ROLLOUT, 64, engine=64), {}, {}, None),
        (BUSY, {}, QUEUED | {"ready": False}, None),
        (stage(Stage.ROLLOUT, 9, paused_pool=9), {}, QUEUED | {"ready": False}, "pause"),
    ],
)
def test_the_fullest_stage_nearest_to_the_end_is_named(rollout, others, fields, kind):
    init = others.get("init", stage(Stage.INIT, 1))
    evaluate = others.get("evaluate", stage(Stage.EVALUATE, 1))
    assert kind_of(overview([init, rollout, evaluate], **fields)) == kind


def test_it_says_what_shows_it_and_which_setting_would_change_it():
    stages = [stage(Stage.INIT, 3, host=3), stage(Stage.ROLLOUT, 20), stage(Stage.EVALUATE, 0)]
    found = bottleneck(overview(stages, nodes=[HELD]), StageLoads().add(0.0, stages))
    assert found.message == "3 rollouts wait for room on the host: memory: 3.1 GiB available."
    assert "sandboxes.pressure" in found.hint
    ceiling = HELD.model_copy(update={"holds": [HoldView(resource="ceiling", reason="ceiling: 8 of 8")]})
    found = bottleneck(overview(stages, nodes=[ceiling]), StageLoads().add(0.0, stages))
    assert "sandboxes.ceiling" in found.hint
    stages[0] = stage(Stage.INIT, 1, host=1)
    found = bottleneck(overview(stages), StageLoads().add(0.0, stages))
    assert found.message == "1 rollout waits for room on the host."
    stages[0] = stage(Stage.INIT, 0)
    found = bottleneck(overview(stages, runs=[RUN]), StageLoads().add(0.0, stages))
    assert found.message == (
        "44 of 64 rollout workers are free, and nothing is queued. 7 groups are ready and wait for the trainer."
    )


STUCK = HangFinding(
    finding_id="hang-1",
    verdict=HangVerdict.STUCK,
    kind=StepKind.ENGINE,
    subject="policy@a",
    since=NOW,
    seconds=30.0,
    message="a hangs",
    hint="",
)


def test_what_is_stuck_comes_first():
    stages = [stage(Stage.INIT, 1), BUSY, stage(Stage.EVALUATE, 1)]
    assert kind_of(overview(stages, **QUEUED, findings=[STUCK])) is None
    slow = STUCK.model_copy(update={"verdict": HangVerdict.SLOW})
    assert kind_of(overview(stages, **QUEUED, findings=[slow])) == "engines"


def test_a_node_that_drains_says_what_the_others_wait_for():
    drained = HELD.model_copy(update={"node": "here", "state": NodeState.DRAINING})
    other = HELD.model_copy(update={"node": "there", "state": NodeState.READY})
    stages = [stage(Stage.INIT, 1), BUSY, stage(Stage.EVALUATE, 1)]
    given = QUEUED | {"ready": False, "backends": [FULL]}
    assert kind_of(overview(stages, **given, nodes=[drained, other])) == "engines"
    assert kind_of(overview(stages, **given, nodes=[drained])) is None


def test_numbers_are_averages_of_the_last_seconds():
    loads = StageLoads()
    for second in range(60):
        working = 64 if second % 2 else 60
        waits = {StepKind.ENGINE: 64 if second % 4 else 0}
        stages = [
            stage(Stage.INIT, 0),
            stage(Stage.ROLLOUT, working, 1).model_copy(update={"waits_for": waits}),
            stage(Stage.EVALUATE, 0),
        ]
        found = loads.add(float(second), stages)[Stage.ROLLOUT]
    assert found.working == pytest.approx(62, abs=0.5)
    assert found.waits_for[StepKind.ENGINE] == pytest.approx(48, abs=6)
    late = loads.add(60 + 2 * WINDOW_SECONDS, [stage(name, 1) for name in Stage])
    assert {load.working for load in late.values()} == {1.0}


STAGES = st.tuples(
    *(
        st.builds(
            StageOverview,
            stage=st.just(name),
            working=st.integers(0, 100),
            workers=st.integers(1, 64),
            waiting=st.integers(0, 64),
            places=st.just(32),
            waits_for=st.dictionaries(st.sampled_from(StepKind), st.integers(0, 100)),
        )
        for name in Stage
    )
)


@given(STAGES, st.integers(0, 10), st.booleans())
def test_any_numbers_have_an_answer_with_a_hint(stages, queued, has_runs):
    counts = {RolloutState.QUEUED: queued}
    one = overview(list(stages), counts=counts, runs=[RUN] if has_runs else [])
    found = bottleneck(one, StageLoads().add(0.0, one.stages))
    assert found is None or (found.message.endswith(".") and found.hint.endswith("."))


def node(rollouts: int, *, workers: int = 8, **fields: Any) -> NodeView:
    stages = [
        StageOverview(stage=stage, working=0, workers=size, waiting=0, places=4)
        for stage, size in zip(Stage, (2, workers, 4), strict=True)
    ]
    given: dict[str, Any] = {"cpus": 4, "provider": "local", "enforced": [], "live": rollouts}
    given |= {"in_use": rollouts, "warm": 0, "waiting": 0, "target": 32, "ceiling": 32}
    return NodeView(node=f"n{rollouts}", rollouts=rollouts, stages=stages, **given | fields)


def queued(number: int, nodes: Sequence[NodeView], **fields: Any) -> Overview:
    return overview([], nodes=list(nodes), counts={RolloutState.QUEUED: number}, **fields)


def limit(kind: BottleneckKind) -> Bottleneck:
    return Bottleneck(kind=kind, message="All are busy.", hint="Add some.")


PRESSED = node(5, holds=[HoldView(resource="memory", reason="memory: 1 GiB")], waiting=3)
AGENTS = limit(BottleneckKind.AGENTS)


@pytest.mark.parametrize(
    ("number", "nodes", "kind", "gain", "count"),
    [
        (12, [node(8)], BottleneckKind.AGENTS, 8, 2),
        (12, [node(8), node(9)], BottleneckKind.TOOLS, 8, 2),
        (3, [node(8)], BottleneckKind.GRADERS, 3, 1),
        (40, [PRESSED], BottleneckKind.HOST, 5, 8),
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
def test_it_brings_what_waits_in_the_store_and_has_no_room_elsewhere(number, nodes, kind, gain, count):
    found = next_node(queued(number, nodes), None if kind is None else limit(kind))
    assert (found.rollouts, found.nodes) == (gain, count)


def test_it_says_how_many_wait_or_why_nothing_comes_of_it():
    assert next_node(queued(12, [node(8)]), AGENTS).message == (
        "12 rollouts wait for a place; one more node would take 8 of them now."
    )
    full = next_node(queued(900, [node(8)]), limit(BottleneckKind.ENGINES))
    assert full.message == "One more node would bring nothing: the engines are full; add engines."
    away = queued(12, [node(8)], ready=False, reasons=["no backend is in service"])
    assert "no backend is in service" in next_node(away, None).message
    assert "something is stuck: a hangs" in next_node(queued(12, [node(8)], findings=[STUCK]), None).message


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
        holds=st.sampled_from([[], PRESSED.holds]),
        state=st.sampled_from(NodeState),
    ),
    max_size=5,
)


@given(st.integers(0, 2_000), NODES, st.none() | st.sampled_from(BottleneckKind).map(limit))
def test_a_gain_is_never_more_than_what_is_queued_and_its_figures_agree(number, nodes, found):
    answer = next_node(queued(number, nodes), found)
    assert 0 <= answer.rollouts <= number
    assert (answer.rollouts == 0) == (answer.nodes == 0)
    assert answer.nodes <= number
    assert answer.message.endswith((".", "hangs"))


@given(st.integers(0, 500), NODES)
def test_a_node_with_room_takes_its_part_before_another_is_worth_anything(number, nodes):
    answer = next_node(queued(number, [*nodes, node(0, workers=8)]), AGENTS)
    assert answer.rollouts <= max(0, number - 8)
