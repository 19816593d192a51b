"""The tree of a rollout's sub-agents is shown for people, and nothing in it moves the terminal."""

import io

from hypothesis import given
from rich.console import Console

from api_schemas.rollouts.trees import InvalidBecause, NodeParent, RolloutNodes
from rollout_service.cli.show.tree import RESULT_CHARS, render_tree
from tests.support.store.trees import WORK, node, nodes

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
    assert (
        lines[0]
        == "steps: 6 critical, 6 in total; 2 assigns, 2 run, 2 valid; at most 1 at once; 0 direct calls"
    )
    assert lines[1] == "r1"
    assert lines[2].endswith("1 reader  turn 0, wave 0  valid  2 steps, 1.5 s after 0.2 s in the queue")
    assert lines[3].endswith(" first line")
    assert lines[4].endswith(
        "2 helper  turn 2, wave 1  not valid: timeout  2 steps, 1.5 s after 0.2 s in the queue"
    )
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
