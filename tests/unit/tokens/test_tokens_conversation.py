"""A conversation records turns exactly, refuses unusable answers, and begins a segment only for a stated reason."""

import math

import pytest

from api_schemas.trajectories import FinishReason, ForkReason, Message
from rollout_service.tokens import Conversation, check_invariants
from rollout_service.tokens.errors import ConversationStateError, RecordError

TOOL = {"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'


@pytest.fixture
def conversation(renderer):
    conversation = Conversation(renderer, [TOOL])
    conversation.append([Message(role="user", content="What is 1?")])
    return conversation


def say(conversation, renderer, text, finish=FinishReason.STOP, stop=True):
    conversation.prompt()
    ids = renderer.encode(text) + [renderer.stop_token_ids[0]] * stop
    return conversation.record(ids, [-0.25] * len(ids), [3] * len(ids), finish)


def test_two_turns_are_one_segment(conversation, renderer):
    first = say(conversation, renderer, CALL)
    conversation.append([Message(role="tool", content="1", tool_call_id=first.tool_calls[0].id)])
    second = say(conversation, renderer, "\\boxed{1}")
    assert (first.fork_reason, second.fork_reason) == (ForkReason.FIRST, None)
    (segment,) = conversation.trajectory().segments
    assert [sum(turn == i for turn in segment.turn_ids) for i in (0, 1)] == [
        len(first.output_ids),
        len(second.output_ids),
    ]
    assert set(zip(segment.loss_mask, segment.logprobs, segment.versions, strict=True)) == {
        (0, 0.0, -1),
        (1, -0.25, 3),
    }
    assert conversation.messages[2].name == "python"
    assert second.message.content == "\\boxed{1}"


def test_other_tools_can_be_offered_before_the_first_turn_alone(conversation, renderer):
    added = {"type": "function", "function": {"name": "notes__add", "parameters": {"type": "object"}}}
    before = list(conversation.prompt())
    conversation.offer([TOOL, added])
    assert "notes__add" not in renderer.decode(before)
    assert "notes__add" in renderer.decode(conversation.prompt())
    say(conversation, renderer, "\\boxed{1}")
    check_invariants(conversation.trajectory())
    with pytest.raises(ConversationStateError, match="after the first turn"):
        conversation.offer([TOOL])


def test_call_ids_are_unique_in_a_conversation(conversation, renderer):
    for _ in range(3):
        say(conversation, renderer, f"{CALL}\n{CALL}")
        conversation.append([Message(role="tool", content="1"), Message(role="tool", content="1")])
    ids = [call.id for turn in conversation.turns for call in turn.tool_calls]
    assert len(set(ids)) == 6


def test_a_stop_text_is_kept_and_the_turn_closed_as_context(conversation, renderer):
    turn = say(conversation, renderer, "one\nSTOP", FinishReason.STOP, stop=False)
    conversation.append([Message(role="user", content="Go on.")])
    end = turn.prompt_length + len(turn.output_ids)
    prompt = conversation.prompt()
    assert renderer.decode(prompt[turn.prompt_length : end]) == "one\nSTOP"
    assert prompt[end] == renderer.stop_token_ids[0]
    say(conversation, renderer, "ok")
    (segment,) = conversation.trajectory().segments
    assert sum(segment.loss_mask[:end]) == len(turn.output_ids)


def test_a_history_may_be_edited_back_to_where_it_was(conversation, renderer):
    first = say(conversation, renderer, CALL)
    conversation.replace(conversation.messages[:1])
    again = say(conversation, renderer, CALL)
    assert first.output_ids == again.output_ids
    trajectory = conversation.trajectory()
    check_invariants(trajectory)
    one, two = trajectory.segments
    assert two.shared_prefix == again.prompt_length == first.prompt_length
    assert sum(one.loss_mask) == sum(two.loss_mask) == len(first.output_ids)


def test_the_history_of_the_next_prompt_is_known(conversation, renderer):
    assert len(conversation.rendered_next) == 1
    say(conversation, renderer, CALL)
    conversation.append([Message(role="tool", content="1")])
    assert [message.role for message in conversation.rendered_next] == ["tool"]
    conversation.replace(conversation.messages)
    assert len(conversation.rendered_next) == 3


@pytest.mark.parametrize("reason", [ForkReason.HISTORY_EDITED, ForkReason.COMPACTION])
def test_an_edited_history_begins_a_segment(conversation, renderer, reason):
    say(conversation, renderer, CALL)
    conversation.replace([Message(role="user", content="In short: what is 1?")], reason)
    turn = say(conversation, renderer, "\\boxed{1}")
    assert turn.fork_reason is reason
    trajectory = conversation.trajectory()
    check_invariants(trajectory)
    assert trajectory.fork_counts == {ForkReason.FIRST: 1, reason: 1}
    assert [sum(segment.loss_mask) for segment in trajectory.segments] == [
        len(turn.output_ids) for turn in conversation.turns
    ]


def test_editing_before_the_first_turn_is_no_fork(conversation, renderer):
    conversation.replace([Message(role="user", content="Another")])
    assert say(conversation, renderer, "ok").fork_reason is ForkReason.FIRST


def test_a_refused_bridge_begins_a_segment_that_holds_the_history_as_context(conversation, renderer):
    say(conversation, renderer, "<think>\nhm")  # ends inside its reasoning, which no template writes
    conversation.append([Message(role="user", content="And?")])
    turn = say(conversation, renderer, "ok")
    assert turn.fork_reason is ForkReason.BRIDGE_REFUSED
    check_invariants(conversation.trajectory())


def test_an_assistant_message_that_was_not_sampled_is_never_trained_on(conversation, renderer):
    say(conversation, renderer, "one")
    conversation.append([Message(role="assistant", content="two"), Message(role="user", content="three")])
    turn = say(conversation, renderer, "four")
    assert turn.fork_reason is ForkReason.BRIDGE_REFUSED
    segment = conversation.trajectory().segments[1]
    sampled = [t for t, bit in zip(segment.token_ids, segment.loss_mask, strict=True) if bit]
    assert tuple(sampled) == turn.output_ids


def test_the_prompt_is_a_copy(conversation):
    conversation.prompt().clear()
    assert conversation.prompt()


def test_a_trajectory_is_a_copy(conversation, renderer):
    say(conversation, renderer, CALL)
    before = conversation.trajectory()
    conversation.append([Message(role="tool", content="1")])
    say(conversation, renderer, "ok")
    assert sum(before.segments[0].loss_mask) == len(conversation.turns[0].output_ids)


def test_there_must_be_a_message_to_answer(renderer, conversation):
    with pytest.raises(ConversationStateError, match="no message"):
        Conversation(renderer).prompt()
    say(conversation, renderer, CALL)
    with pytest.raises(ConversationStateError, match="no answer yet"):
        conversation.prompt()


def test_a_turn_needs_its_prompt(conversation):
    with pytest.raises(ConversationStateError, match="no prompt"):
        conversation.record([], [], [], FinishReason.STOP)


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions", "message"),
    [
        ([20, 21], [-1.0], [0, 0], "2 sampled ids came with 1"),
        ([20], [-1.0], [], "0 versions"),
        ([20], [math.nan], [0], "not a finite number"),
        ([20], [-math.inf], [0], "not a finite number"),
        ([-1], [-1.0], [0], "negative"),
        ([20], [-1.0], [-1], "negative"),
        ([2**31], [-1.0], [0], "too large"),
        ([20], [-1.0], [2**63], "too large"),
    ],
)
def test_an_unusable_answer_is_refused_and_not_recorded(conversation, ids, logprobs, versions, message):
    prompt = conversation.prompt()
    with pytest.raises(RecordError, match=message):
        conversation.record(ids, logprobs, versions, FinishReason.STOP)
    assert conversation.turns == ()
    assert conversation.prompt() == prompt
