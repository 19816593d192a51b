"""No call that the policy sampled is lost or made up where the library misreads its turn."""

import time

import pytest

from rollout_service.tokens import ChatRenderer
from tests.support.tokens.calls import TOOL, USER, written
from tests.support.tokens.chat_formats import control_tokens, shared, write_model, write_tokenizer

CALL = '{"name": "write", "parameters": {"path": "/x"}}'
RUN, NO_JSON = ("write", {"path": "/x"}, None), ("write", None, "invalid_json")
ANSWER = '{"name": "Bob", "age": 3}'


def parsed(renderer, text, tools=(TOOL,)):
    """Return the text and the calls of a turn."""
    turn = renderer.parse(renderer.encode(text), renderer.render([USER], tools), tools)
    return turn.content, [(call.name, call.arguments, call.error) for call in turn.tool_calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [RUN]),
        (f"<|python_tag|>{CALL}<|eom_id|>", "", [RUN]),
        (f"Let me see.<|python_tag|>{CALL}", "Let me see.", [RUN]),
        (CALL.replace('"name"', '"type": "function", "name"'), "", [RUN]),
        (CALL.replace("write", "other"), "", [("other", {"path": "/x"}, None)]),
        ('{"name": "write"}', "", [("write", {}, None)]),
        (f"{CALL}; {CALL}", "", [NO_JSON]),
        (f"{CALL}\n\nDone.", "", [NO_JSON]),
        (CALL[:-1], "", [NO_JSON]),
        ('{"name": "write", "args": {"path": "/x"}}', "", [("write", None, "misplaced_arguments")]),
        (ANSWER, ANSWER, []),
        (ANSWER[:-1], ANSWER[:-1], []),
        ('{"name": ["write"]}', '{"name": ["write"]}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("{" * 5000, "{" * 5000, []),
        ("Done.", "Done.", []),
    ],
)
def test_a_bare_object_is_a_call_if_it_has_the_form_of_one(root, text, content, calls):
    assert parsed(shared(root / "llama-3", "llama-3"), text) == (content, calls)


@pytest.mark.parametrize("text", [CALL, ANSWER, CALL[:-1]])
def test_a_bare_object_is_an_answer_where_no_tool_is_offered(root, text):
    assert parsed(shared(root / "llama-3", "llama-3"), text, tools=()) == (text, [])


@pytest.mark.parametrize("inner", ['"parameters": {"path": "/x"}', '"args": {"path": "/x"}', '"path": "/x"'])
def test_arguments_in_another_place_are_not_read_as_none(root, inner):
    renderer = shared(root / "qwen3", "qwen3")
    found = parsed(renderer, f'<tool_call>\n{{"name": "write", {inner}}}\n</tool_call>')
    assert found == ("", [("write", None, "misplaced_arguments")])
    for empty in ("", ', "arguments": {}', ', "id": "c1"'):
        assert parsed(renderer, f'<tool_call>\n{{"name": "write"{empty}}}\n</tool_call>')[1] == [("write", {}, None)]


@pytest.mark.parametrize("family", ["kimi-k2", "kimi-k2.5", "deepseek-v3", "deepseek-r1"])
def test_a_second_section_of_calls_is_told(root, family):
    renderer = shared(root / family, family)
    prompt, output = written(renderer, {"path": "/x"})
    turn = renderer.decode([token for token in output if token not in renderer.stop_token_ids])
    section = turn.removeprefix("</think>")
    calls = renderer.parse(renderer.encode(f"{turn}\n{section}"), prompt, [TOOL]).tool_calls
    assert [call.error for call in calls] == [None, "malformed_structure"]
    assert calls[1].raw == section


HEADER = "<|end|><|start|>assistant"


@pytest.mark.parametrize("channel", ["commentary", "analysis"])
@pytest.mark.parametrize("tool", ["write", "python"])
def test_a_recipient_without_its_namespace_is_called(root, channel, tool):
    renderer = shared(root / "gpt-oss", "gpt-oss")
    call = '<|message|>{"path": "/x"}<|call|>'
    for header in (f" to={tool}<|channel|>{channel} json", f"<|channel|>{channel} to={tool} <|constrain|>json"):
        found = parsed(renderer, f"hm{HEADER}<|channel|>commentary<|message|>See.{HEADER}{header}{call}")
        assert found == ("See.", [(tool, {"path": "/x"}, None)])


@pytest.mark.parametrize("text", ["to=write", "<|start|>", "<|start|>assistant to=write"])
def test_a_text_that_names_a_recipient_is_a_text(root, text):
    renderer = shared(root / "gpt-oss", "gpt-oss")
    ids = [*renderer.encode(f"hm{HEADER}<|channel|>final<|message|>"), *renderer._tokenizer.encode(text)]
    turn = renderer.parse(ids, renderer.render([USER]))
    assert (turn.tool_calls, turn.content) == ((), text if text == "to=write" else "")


def test_a_long_header_costs_little(root):
    renderer = shared(root / "gpt-oss", "gpt-oss")
    begun = time.process_time()
    for text in ("assistant ", "assistant to=functions.x ", "assistant to=assistant "):
        parsed(renderer, f"hm{HEADER} {text * 6_000}<|message|>See.")
    assert time.process_time() - begun < 15  # quadratic time would be more than a minute


def test_a_message_ends_where_the_next_one_begins(root):
    renderer = shared(root / "inkling", "inkling")
    call = '<|message_model|>write<|content_invoke_tool_json|>{"name":"write","args":{"path":"/x"}}<|end_message|>'
    assert parsed(renderer, f"<|content_text|>See.{call}") == ("See.", [RUN])
    assert parsed(renderer, f"<|content_text|>See.<|end_message|>{call}{call}") == ("See.", [RUN, RUN])
    turn = renderer.parse(renderer.encode(f"<|content_thinking|>Hm.{call}"), renderer.render([USER]), [TOOL])
    assert turn.reasoning == "Hm."


@pytest.mark.slow  # it loads transformers
def test_fenced_calls_keep_their_names_and_arguments_in_formats_by_template(tmp_path):
    folder = write_model(tmp_path / "model", "{{ messages }}")
    write_tokenizer(folder, (*control_tokens("default"), *control_tokens("deepseek-v3")))
    renderer = ChatRenderer.load(folder, "default", {"tool_parser": "deepseek-v3"})
    by_hand = shared(tmp_path / "deepseek-v3", "deepseek-v3")
    for path in ("/x", "```json\n{}\n```"):
        turn = by_hand.decode(written(by_hand, {"path": path})[1])
        for name in ("write", "get-weather"):
            [call] = renderer.parse(renderer.encode(turn.replace("write", name)), None, [TOOL]).tool_calls
            assert (call.name, call.arguments, call.error) == (name, {"path": path}, None)
