"""The recorded requests of real agents, replayed: what each continues, and for which reasons segments begin."""

import pytest

from api_schemas.trajectories import ForkReason, SegmentRole
from rollout_service.engines.shipped import policy_folder
from rollout_service.tokens import ChatRenderer, check_invariants
from tests.support.gateway.recordings import NAMES
from tests.support.gateway.replaying import replay
from tests.support.tokens import chat_formats

FIVE_TURNS = {
    *(
        "claude",
        "claude-2.1.330",
        "cline",
        "codex",
        "gemini",
        "mini",
        "openai-agents",
        "opencode",
        "pi",
        "qwen",
    ),
    *("opencode-anthropic", "opencode-google", "pi-responses"),
}
MERGED = FIVE_TURNS | {"claude-2.1.330-tool-search", "codex-apply-patch", "openhands"}
"""Recordings in which every call of the agent's own continues the one before."""
MALFORMED = {"claude-malformed", "opencode-malformed", "pi-malformed"}
"""The same, with calls that are not JSON; they arrive as calls only in a format of which the name comes first."""
SPLIT = {
    "aider": ["history_edited"] * 3,
    "claude-compaction": ["answer_missing", *["compaction"] * 5],
    "claude-empty": ["answer_missing"],
    "codex-compaction": ["compaction"] * 2,
    "gemini-empty": ["foreign_assistant"],
    "gemini-masking": ["history_edited"],
    "mini-malformed": ["answer_missing"] * 2,
    "opencode-compaction": ["new_root", "compaction"],
    "smolagents": ["answer_changed"] * 4,
}
"""Why other segments of the agent's own conversation begin, in their order."""


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    return {
        "qwen3": ChatRenderer.load(policy_folder("calc-tuned"), "qwen3"),
        "qwen3.5": chat_formats.load(tmp_path_factory.mktemp("formats") / "qwen3.5", "qwen3.5"),
    }


def check(capture, answered):
    """Check the trajectory; return why its segments begin after the first."""
    trajectory = capture.trajectory()
    check_invariants(trajectory)
    assert capture.report().disagreements == 0
    segments = (*trajectory.segments, *trajectory.untrained)
    masks = sum(sum(segment.loss_mask) for segment in segments)
    assert masks == sum(len(one.output_ids) for one in answered)
    assert trajectory.segments[0].fork_reason is ForkReason.FIRST
    return [segment.fork_reason.value for segment in trajectory.segments[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("format_name", ["qwen3", "qwen3.5"])
@pytest.mark.parametrize("name", sorted(MERGED))
def test_every_continuation_of_a_recorded_run_merges(renderers, format_name, name):
    capture, answered = replay(renderers[format_name], name)
    assert check(capture, answered) == []
    own = [each.turn for each in capture.turns.values() if each.turn.role is SegmentRole.MAIN]
    assert [turn.parent is None for turn in own] == [True] + [False] * (len(own) - 1)
    assert name not in FIVE_TURNS or len(own) == 5


@pytest.mark.parametrize("name", sorted(MALFORMED))
def test_calls_that_are_not_json_do_not_break_a_recorded_run(renderers, name):
    capture, answered = replay(renderers["qwen3"], name)
    assert check(capture, answered) == []
    assert capture.report().malformed_calls == 1


@pytest.mark.slow
@pytest.mark.parametrize("format_name", ["qwen3", "qwen3.5"])
@pytest.mark.parametrize("name", SPLIT)
def test_a_recorded_history_that_was_changed_begins_a_segment(renderers, format_name, name):
    capture, answered = replay(renderers[format_name], name)
    assert check(capture, answered) == SPLIT[name]


@pytest.mark.parametrize("name", ["claude-2.1.330-subagent", "codex-subagent"])
def test_a_recorded_sub_agent_is_apart(renderers, name):
    capture, answered = replay(renderers["qwen3"], name)
    assert check(capture, answered) == []
    (apart,) = capture.trajectory().untrained
    assert (apart.role, apart.parent) == (SegmentRole.SUBAGENT, None)


def test_there_is_a_test_of_every_kind_of_recording():
    kinds = {name.removesuffix("-malformed") for name in (*MERGED, *MALFORMED, *SPLIT)}
    assert {name.split("-")[0] for name in NAMES} <= {kind.split("-")[0] for kind in kinds}
