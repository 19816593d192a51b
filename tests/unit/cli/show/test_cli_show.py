"""Rollouts, trees and the use of sub-agents are shown in a terminal, whoever wrote the texts."""

import io
import re
from datetime import UTC, datetime

import pytest
import tokenizers
from hypothesis import given
from rich.console import Console

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.nodes import HoldView, NodeView
from api_schemas.rollouts import BranchPoint, Rollout, RolloutState, Span, Stage, Usage
from api_schemas.rollouts.figures import ParallelFigures, RunParallel
from api_schemas.rollouts.trees import InvalidBecause, NodeParent, RolloutNodes
from api_schemas.runs import InlineTasks, Run, RunCounts, RunRequest, RunState
from api_schemas.tasks import Task
from api_schemas.views.overview import BackendOverview
from api_schemas.views.summaries import RolloutSummary
from rollout_service.cli.backends import render_backends
from rollout_service.cli.demo.run import Summary, percentile
from rollout_service.cli.runs import _show as show_runs
from rollout_service.cli.show.trajectory import render_branches, render_rollout, split_by_turn
from rollout_service.cli.show.tree import RESULT_CHARS, render_tree
from rollout_service.cli.watch.sections import SIGNS, render_parallel
from rollout_service.cli.watch.view import line
from rollout_service.groups.statistics import parallel_figures, work_sums
from rollout_service.tokens.tokenizer import FastTokenizer
from tests.support.browser import canned
from tests.support.samples import backend_view, segment, trajectory
from tests.support.store.trees import WORK, node, nodes
from tests.support.sub_agents import DIRECT, SERIAL, WIDE
from tests.support.sub_agents import rollout as delegated

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WORDS = ["ask", "call", "result", "answer"]

SEGMENT = segment(
    [0, 0, 1, 2, 3, 3],
    [0, 0, 1, 0, 1, 1],
    logprobs=[0.0, 0.0, -0.25, 0.0, -1.5, -0.125],
    versions=[-1, -1, 4, -1, 5, 5],
    turn_ids=[-1, -1, 0, -1, 1, 1],
)
TRAJECTORY = trajectory(SEGMENT, turns=2)


def rollout(reward: float | None = 1.0, **changes) -> Rollout:
    state = RolloutState.FAILED if reward is None else RolloutState.COMPLETED
    values = {
        "rollout_id": "r-1",
        "state": state,
        "task": Task(environment="calc"),
        "pool": "policy",
        "reward": reward,
        "usage": Usage(turns=2, prompt_tokens=100, cached_tokens=75, sampled_tokens=3, tool_calls=1),
        "spans": [
            Span(stage=stage, attempt=1, started_at=NOW, queued_seconds=0.5, seconds=seconds)
            for stage, seconds in zip(Stage, (1.0, 2.0, 0.25), strict=True)
        ],
        "created_at": NOW,
        "trajectory": TRAJECTORY,
    }
    return Rollout.model_validate(values | changes)


@pytest.fixture
def tokenizer():
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="ask")
    return FastTokenizer(tokenizers.Tokenizer(model))


def printed(renderable) -> str:
    console = Console(width=100, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def test_runs_cut_where_the_turn_changes_and_lose_nothing():
    cut = list(split_by_turn(SEGMENT))
    assert [(span.start, span.turn, span.sampled) for span in cut] == [
        (0, -1, False),
        (2, 0, True),
        (3, -1, False),
        (4, 1, True),
    ]
    assert [token for span in cut for token in span.token_ids] == SEGMENT.token_ids
    assert [span.version for span in cut if span.sampled] == [4, 5]


def test_a_trajectory_shows_its_mask_and_its_logprobs_without_colors(tokenizer):
    text = printed(render_rollout(rollout(), tokenizer))
    assert "tokens 0-1: context, mask 0" in text
    assert "tokens 4-5: turn 1, version 5, mask 1" in text
    assert "answer -1.500" in text
    assert "6 tokens, 3 sampled" in text
    assert "reward 1" in text


def test_a_branch_says_where_it_begins(tokenizer):
    text = printed(render_rollout(rollout(branch_of=BranchPoint(rollout_id="r-0", turn=1)), tokenizer))
    assert "a branch of r-0 at turn 1" in text


def test_the_branches_of_a_rollout_come_by_turns_with_their_outcome():
    points = [None, *(BranchPoint(rollout_id=f"a.0.{n}", turn=turn) for n, turn in ((0, 4), (0, 2), (1, 5)))]
    rows = [
        RolloutSummary(
            rollout_id=f"a.0.{number}",
            state=RolloutState.COMPLETED,
            environment="calc",
            pool="policy",
            branch_of=point,
            attempt=1,
            reward=0.5,
            created_at=NOW,
            changed_at=NOW,
        )
        for number, point in enumerate(points)
    ]
    text = printed(render_branches("a.0.0", rows))
    assert text.splitlines() == [
        "branched at turn 2: a.0.2, completed, reward 0.5",
        "branched at turn 4: a.0.1, completed, reward 0.5",
    ]
    assert printed(render_branches("a.0.2", rows)) == ""


def test_a_failure_shows_its_cause_and_no_reward(tokenizer):
    error = ErrorInfo(code="sandbox_start", boundary=Boundary.SANDBOX, message="it did not come up")
    text = printed(render_rollout(rollout(None, error=error, trajectory=None), tokenizer))
    assert "reward none" in text
    assert "sandbox_start: it did not come up" in text


def test_a_failure_shows_what_to_do_and_where_the_environment_failed(tokenizer):
    error = ErrorInfo(
        code="internal_error",
        boundary=Boundary.SERVICE,
        message="NameError: x",
        hint="Look at the code.",
        frames=["mine.grading, line 4, in evaluate", "mine.rules, line 9, in count"],
    )
    text = printed(render_rollout(rollout(None, error=error, trajectory=None), tokenizer))
    assert "internal_error: NameError: x. Look at the code." in text
    assert "  at mine.grading, line 4, in evaluate\n" in text


def test_a_summary_tells_wrong_answers_from_failures():
    error = ErrorInfo(code="sandbox_start", boundary=Boundary.SANDBOX, message="no")
    summary = Summary([rollout(), rollout(), rollout(0.0), rollout(None, error=error)], seconds=8.0)
    assert summary.figures() == {
        "rollouts": 4,
        "succeeded": 2,
        "failed": 1,
        "success_rate": 0.5,
        "seconds": 8.0,
        "rollouts_per_second": 0.5,
    }
    text = printed(summary.show())
    assert "2/4 (50.0%)" in text
    assert "1 sandbox_start" in text
    assert "400, 75.0% cached" in text
    assert "0.50 rollouts/s" in text


@pytest.mark.parametrize(("values", "expected"), [([3.0], 3.0), ([0.0, 100.0], 95.0), ([1.0] * 7, 1.0)])
def test_percentiles(values, expected):
    assert percentile(values, 95) == pytest.approx(expected)


BACKEND = backend_view(
    "policy@gpu-node-17:30000",
    url="http://gpu-node-17:30000",
    state="failed",
    weight_version=1_234,
    in_flight=256,
    served=1_234_567,
    failures=12,
    last_error="no answer from http://gpu-node-17:30000/health within 5 s: connection refused",
)
NODE = NodeView(
    node="gpu-node-17",
    cpus=64,
    provider="apptainer",
    enforced=[],
    live=268,
    in_use=260,
    warm=8,
    waiting=512,
    target=260,
    ceiling=300,
    holds=[HoldView(resource="memory", reason="memory: 3.1 GiB available, 4.0 GiB kept free")],
)


def test_engines_are_readable_on_80_columns():
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(render_backends([BACKEND]))
    text = console.file.getvalue()
    assert "…" not in text
    for word in (BACKEND.backend_id, "failures"):
        assert re.search(rf"(?<!\S){re.escape(word)}(?!\S)", text), word
    assert BACKEND.last_error in " ".join(text.split())


def test_a_line_says_why_sandboxes_wait():
    backends = [BackendOverview(backend=BACKEND)]
    changes = {"counts": {RolloutState.QUEUED: 12_345}, "backends": backends, "nodes": [NODE]}
    assert line(canned.overview().model_copy(update=changes), 0.0) == (
        "12345 queued, 268 sandboxes, 1 engine, 0.0 rollouts/s;"
        " sandboxes wait: memory: 3.1 GiB available, 4.0 GiB kept free"
    )


def test_made_up_log_probabilities_of_a_scripted_model_are_left_out(tokenizer):
    assert "logprobs" not in printed(render_rollout(rollout(), tokenizer, scripted=True))
    assert "logprobs: " in printed(render_rollout(rollout(), tokenizer))


@pytest.mark.parametrize("ended_at", [None, NOW])
def test_a_run_that_goes_on_is_shown_with_its_warnings(ended_at, capsys):
    run = Run(
        run_id="a",
        state=RunState.RUNNING if ended_at is None else RunState.ENDED,
        request=RunRequest(source=InlineTasks(open=True), batch_size=1),
        version=0,
        tasks=0,
        cursor=0,
        acceptance_rate=0.5,
        counts=RunCounts(),
        warnings=["advantages: they undo the schedule."],
        created_at=NOW,
        ended_at=ended_at,
    )
    show_runs([run])
    said = capsys.readouterr().err
    assert said == ("a: warning: advantages: they undo the schedule.\n" if ended_at is None else "")


HOSTILE = "\x1b]0;owned\x07 [bold]x\u202e\n\n  second line"


def shown(found: RolloutNodes) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render_tree(found))
    text = console.file.getvalue()
    assert isinstance(text, str)
    return text


def test_each_sub_agent_says_what_it_was_and_did():
    below = NodeParent(node_id="r1/1", turn=2, call_id="c", wave=1)
    made = [
        node("r1", 1, result="\n\nfirst line\nsecond line"),
        node(
            "r1",
            2,
            parent=below,
            agent="helper",
            valid=False,
            invalid_because=InvalidBecause.TIMEOUT,
            result="",
        ),
        node("r1", 3, duplicate=True, result="x" * 500),
    ]
    lines = shown(RolloutNodes(rollout_id="r1", nodes=made, work=WORK)).splitlines()
    assert lines[0] == "steps: 6 critical, 6 in total; 2 assigns, 2 run, 2 valid; at most 1 at once; 0 direct calls"
    assert lines[1] == "r1"
    assert lines[2].endswith("1 reader  turn 0, wave 0  valid  2 steps, 1.5 s after 0.2 s in the queue")
    assert lines[3].endswith(" first line")
    assert lines[4].endswith("2 helper  turn 2, wave 1  not valid: timeout  2 steps, 1.5 s after 0.2 s in the queue")
    assert lines[4].index("2 helper") > lines[2].index("1 reader"), "a nested one is indented"
    assert "valid, duplicate" in lines[5]
    assert lines[6].endswith("x" * RESULT_CHARS + "...")


def test_a_rollout_without_sub_agents_says_so():
    assert shown(RolloutNodes(rollout_id="r1", nodes=[])) == "no sub-agents\n"


def test_what_a_policy_wrote_is_shown_as_text():
    text = shown(RolloutNodes(rollout_id="r1", nodes=[node("r1", 1, agent=HOSTILE, result=HOSTILE)]))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert r"\x1b]0;owned\x07 [bold]x\u202e" in text


@given(nodes())
def test_every_sub_agent_of_any_tree_is_shown_once(made):
    text = shown(RolloutNodes(rollout_id="r1", nodes=made, work=WORK))
    assert text.count(" in the queue") == len(made)


def figures(*works) -> ParallelFigures:
    found = parallel_figures(work_sums(delegated(work) for work in works))
    assert found is not None
    return found


def lines(parallel: RunParallel) -> dict[str, list[str]]:
    """Return the cells of each row after its first, by the figure."""
    output = io.StringIO()
    Console(file=output, width=200).print(render_parallel(parallel))
    rows = (line.split("  ") for line in output.getvalue().splitlines())
    cells = ([cell.strip() for cell in row if cell.strip()] for row in rows)
    return {row[1]: row[2:] for row in cells}


def test_every_figure_is_shown_for_the_run_and_its_last_rollouts():
    shown = lines(RunParallel(total=figures(DIRECT, WIDE, SERIAL), recent=figures(DIRECT)))
    assert shown["figure"] == ["so far", "last 1"]
    assert shown["assign_rate"] == ["0.67", "0.00"]
    assert shown["critical/total"] == ["0.79", "1.00"]
    assert shown["finish_rate"] == ["0.80", "-"]
    assert shown["invalid"] == ["max_turns 0.20", "-"]
    assert shown["rollouts"] == ["3", "1"]


def test_without_recent_rollouts_there_is_no_column_for_them():
    shown = lines(RunParallel(total=figures(SERIAL)))
    assert shown["figure"] == ["so far"]
    assert shown["invalid"] == ["none"]


def test_no_figure_is_forgotten():
    named = {name for names in SIGNS.values() for name in names}
    assert named == set(ParallelFigures.model_fields) - {"solved"} | {"critical/total"}
