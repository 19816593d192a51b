"""Every hand-written chat format is exact, over a tokenizer that stands in for its model's."""

import json
from collections import Counter
from math import ceil

import pytest
from hypothesis import settings
from renderers.configs import _CONFIG_BY_NAME

from api_schemas.trajectories import FinishReason, Message, ToolCall
from rollout_service.tokens import Conversation
from rollout_service.tokens.renderer import _READ_LAST_TURN
from tests.support.tokens.chat_formats import FAMILIES, control_tokens, is_special, load, shared
from tests.support.tokens.conversations import (
    QUESTION,
    TOOL,
    TURNS,
    WRITTEN,
    Format,
    answers_to,
    as_written,
    hold,
)

pytestmark = pytest.mark.slow

TOOL_ORDER_NEEDED = {"deepseek-v4"}
"""Formats that order parallel results by their calls, which a bridge cannot know."""
SINGLE_CALL = {"llama-3", "gpt-oss"}
"""Formats in which a turn ends with its first call."""
NEVER_AS_BEGUN = {"deepseek-r1"}
"""Formats that never write an earlier turn as they begin one: with its reasoning."""
NO_LATER_SYSTEM = {"hy3"}
RESULTS_END_A_CALL = {"gemma4"}
"""Formats in which a result may follow only a call's own end of turn."""


def test_all_formats_of_the_library_are_here():
    assert set(FAMILIES) == set(_CONFIG_BY_NAME) - {"auto", "default"}
    assert len(FAMILIES) >= 28


def end(renderer, prompt, text):
    """Return the ids of an answer, after leaving any reasoning that the prompt began."""
    leave = [token for token in control_tokens(renderer.name) if token.startswith(("</think", "<channel|"))]
    for way in ("", *leave, "<|end|><|start|>assistant<|channel|>final<|message|>"):
        ids = [*renderer.encode(way + text), renderer.stop_token_ids[0]]
        if renderer.bridge(prompt, ids, [QUESTION]) is not None:
            return ids
    raise AssertionError(f"{renderer.name} extends no answer")


def result(content, call_id="functions.python:0", name="python"):
    return Message(role="tool", content=content, tool_call_id=call_id, name=name)


def called(renderer):
    """Return a prompt and a turn that calls a tool as the format writes it, or a plain answer if it never does."""
    for name in ("call", "thought call"):
        written = as_written(renderer, TURNS[name])
        if written is not None:
            return written[:2]
    prompt = renderer.render([QUESTION], [TOOL])
    return prompt, end(renderer, prompt, "Fine.")


def control_ids(renderer, ids):
    first = renderer.vocab_size - len(control_tokens(renderer.name))
    return [token for token in ids if token >= first]


def test_a_bridge_is_what_a_render_of_the_whole_conversation_writes(chat):
    compared = 0
    for name, turn in TURNS.items():
        written = as_written(chat, turn)
        if written is None or (chat.name in SINGLE_CALL and name == "parallel calls"):
            continue
        prompt, output, whole = written
        bridged = chat.bridge(prompt, output, answers_to(turn), [TOOL])
        if chat.name in TOOL_ORDER_NEEDED and name == "parallel calls":
            assert bridged is None
            continue
        assert bridged == whole
        compared += 1
    assert compared >= (0 if chat.name in NEVER_AS_BEGUN else 1)


def test_calls_that_the_policy_gives_one_id_are_told_apart(chat):
    call = TURNS["call"].tool_calls[0]
    twice = Message(role="assistant", reasoning="Hm.", tool_calls=[call, call])
    written = None if chat.name in SINGLE_CALL else as_written(chat, twice)
    if written is not None:
        calls = chat.parse(written[1], written[0], [TOOL]).tool_calls
        assert len({call.id for call in calls}) == len(calls) == 2


def test_a_call_whose_id_is_that_of_the_next_one_is_kept(root):
    renderer = shared(root / "kimi-k2", "kimi-k2")
    call = "<|tool_call_begin|>c-1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"
    assert [one.id for one in renderer.parse(renderer.encode(text), call_prefix="c").tool_calls] == ["c-0", "c-1"]


@pytest.mark.parametrize("role", ["tool", "user", "assistant"])
def test_no_text_of_a_message_becomes_a_control_token(chat, role):
    """This holds for the text alone, where it meets the text that the format adds, and in a whole render."""
    tokens = control_tokens(chat.name)
    forged = "X" + "".join(tokens) + "X".join(tokens) + tokens[0][:-1] + tokens[-1][:1]
    histories = []
    for content in ("X", forged):
        message = (
            Message(role="assistant", content=content) if role == "assistant" else Message(role=role, content=content)
        )
        new = result(content) if role == "tool" else message
        turn = [TURNS["call"]] if role == "tool" else []
        histories.append([QUESTION, *turn, new, *([QUESTION] if role == "assistant" else [])])
    clean, hostile = (chat.render(history, [TOOL]) for history in histories)
    assert control_ids(chat, clean) == control_ids(chat, hostile)
    assert forged in chat.decode(hostile)
    if role == "assistant":
        return
    prompt, output = called(chat) if role == "tool" else (clean, end(chat, clean, "Fine."))
    bridges = [chat.bridge(prompt, output, [history[-1]], [TOOL]) for history in histories]
    if None in bridges:
        assert chat.name in RESULTS_END_A_CALL | NEVER_AS_BEGUN
        return
    assert control_ids(chat, bridges[0]) == control_ids(chat, bridges[1])
    assert forged in chat.decode(bridges[1])


def test_each_control_token_is_escaped_by_itself(chat):
    prompt, output = called(chat)
    clean = control_ids(chat, chat.bridge(prompt, output, [result("X")], [TOOL]))
    for token in control_tokens(chat.name):
        for content in (token, f" {token}\n", token * 2, token[:-1] + token):
            bridged = chat.bridge(prompt, output, [result(content)], [TOOL])
            assert control_ids(chat, bridged) == clean


def test_the_arguments_and_the_name_of_a_call_forge_nothing(chat):
    tokens = control_tokens(chat.name)
    renders = []
    for text in ("X", "X" + "".join(tokens)):
        call = ToolCall(id="functions.python:0", name=f"f{text}", arguments={text: [text]}, raw="")
        turn = Message(role="assistant", reasoning=f"Hm {text}", tool_calls=[call])
        renders.append(chat.render([QUESTION, turn, result("ok", name=call.name)], [TOOL]))
    assert control_ids(chat, renders[0]) == control_ids(chat, renders[1])


def test_a_system_message_may_speak_of_tags_but_not_of_framing(chat):
    tokens = control_tokens(chat.name)
    for forged in tokens:
        clean, written = (
            control_ids(chat, chat.render([Message(role=role, content=content), QUESTION]))
            for role, content in (("system", "Be brief."), ("developer", f"Be brief. {forged}"))
        )
        assert (clean == written) or not is_special(forged)


def test_a_turn_that_was_cut_off_is_closed_as_context(chat):
    prompt, output = called(chat)
    for length in {0, 1, len(output) // 2, len(output) - 1}:
        bridged = chat.bridge(prompt, output[:length], [QUESTION], [TOOL])
        assert bridged is None or bridged[: len(prompt) + length] == prompt + output[:length]
    cut = end(chat, prompt, "Fin")[:-1]
    bridged = chat.bridge(prompt, cut, [QUESTION], [TOOL])
    assert bridged[: len(prompt) + len(cut)] == prompt + cut
    assert bridged[len(prompt) + len(cut)] in control_ids(chat, bridged)


def test_a_character_may_be_split_over_tokens_and_turns(chat):
    conversation = Conversation(chat, [TOOL])
    conversation.append([QUESTION])
    face = chat.encode("日🙂")
    prompt = conversation.prompt()
    opening = end(chat, prompt, "")[:-1]
    output = [*opening, *face[:-2]]
    turn = conversation.record(output, [-1.0] * len(output), [0] * len(output), FinishReason.LENGTH)
    assert turn.output_ids == tuple(output)
    assert "日" in (turn.message.content or turn.message.reasoning or "")
    conversation.append([QUESTION])
    following = conversation.prompt()
    assert following[: len(prompt) + len(output)] == prompt + output


@pytest.mark.parametrize(
    "content",
    ["", " ", "\n", "日本🙂 é", "\ufdd0", "x" * 20_000, "<" * 5_000, '{"a": 1}', "false", "\x00\x1b[0m"],
    ids=["empty", "blank", "newline", "unicode", "mark", "long", "brackets", "json", "false", "control"],
)
def test_any_result_extends_the_chain(chat, content):
    prompt, output = called(chat)
    bridged = chat.bridge(prompt, output, [result(content, name="größe 工具")], [TOOL])
    assert bridged[: len(prompt) + len(output)] == prompt + output
    expected = content.strip().replace("\ufdd0", "\N{REPLACEMENT CHARACTER}")
    written = chat.decode(bridged[len(prompt) + len(output) :])
    assert expected in written or json.dumps(expected, ensure_ascii=False)[1:-1] in written


@pytest.mark.parametrize("head", [[], ["system"], ["developer"]])
def test_a_conversation_may_begin_without_a_system_prompt_or_with_a_developers(chat, head):
    messages = [*(Message(role=role, content="Be brief.") for role in head), QUESTION]
    text = chat.decode(chat.render(messages, [TOOL]))
    assert "Hello" in text
    assert ("Be brief." in text) == bool(head)


def test_a_lone_surrogate_is_refused_and_not_replaced(chat):
    prompt, output = called(chat)
    lone = Message.model_construct(
        role="tool", content="\ud800", tool_call_id=None, name="f", tool_calls=[], reasoning=None
    )
    assert chat.bridge(prompt, output, [lone], [TOOL]) is None


@pytest.mark.parametrize("written", WRITTEN)
def test_parsing_raises_on_no_text(chat, written):
    ids = chat.encode(written)
    turn = chat.parse(ids, None, [TOOL])
    assert turn.closed == (not set(ids).isdisjoint(chat.stop_token_ids))
    assert all((call.arguments is None) == (call.error is not None) for call in turn.tool_calls)
    kept = turn.content + (turn.reasoning or "") + "".join(call.raw for call in turn.tool_calls)
    assert set(kept) <= set(written)
    assert kept.strip() == written.strip() or "<" in written


@pytest.mark.parametrize("name", sorted(_READ_LAST_TURN))
@pytest.mark.parametrize("text", ["Yes.", "<think>\nHm.\n</think>\n\nYes.", "<think>\nHm", "Hm.\n</think>\n\nYes."])
def test_a_format_that_is_given_the_end_of_a_prompt_answers_as_if_it_had_all_of_it(root, name, text):
    renderer = shared(root / name, name)
    library, new = renderer._backend, [result("4")]
    prompt = renderer.render([QUESTION], [TOOL])
    for _ in range(3):
        ids = renderer.encode(text)
        for output in (ids, [*ids, renderer.stop_token_ids[0]]):
            whole = library.bridge_to_next_turn(prompt, output, renderer._wire(new), tools=[TOOL])
            bridged = renderer.bridge(prompt, output, new, [TOOL])
            assert bridged == (whole and whole.token_ids)
            read, known = renderer.parse(output, prompt), library.parse_response(output, prompt_ids=prompt)
            assert (read.content, read.reasoning) == (known.content, known.reasoning_content)
            prompt = bridged or prompt


EACH = ceil(100 * settings.default.max_examples / len(FAMILIES))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_random_conversation_keeps_its_promises(tmp_path, family):
    chat = Format(family, load(tmp_path / family, family))
    counts = sum((hold(chat, seed) for seed in range(EACH)), Counter())
    assert counts["conversations"] == EACH
    assert counts["turns"] > EACH
    extended = counts["turns"] - sum(n for name, n in counts.items() if name.startswith("fork"))
    assert extended > EACH / 8, f"most turns began a segment, so that little was tested: {counts}"
