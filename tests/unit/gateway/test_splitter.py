"""What a client receives while an answer is sampled is what the parser finds in all of it."""

import json
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_service.gateway.capture.splitter import Splitter
from rollout_service.gateway.contract import CallArguments, CallBegin, CallEnd, ReasoningDelta, TextDelta
from tests.support.tokens.chat_formats import FAMILIES, control_tokens, load
from tests.support.tokens.conversations import QUESTION, TOOL, TURNS, WRITTEN, as_written

pytestmark = pytest.mark.slow

STREAMED = {
    *("qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3"),
    *("nemotron-3", "nemotron-3-ultra", "nemotron-3.5", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3"),
}
XML = [
    "<tool_call>\n<function=python>\n<parameter=code>\nprint(1)\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>print(1)</arg_value>\n</tool_call> and then",
    "<tool_call>\n<function=python>\n<parameter=code>\nprint(1)",
]
NESTED = [
    '<think>a <tool_call>{"name": "python", "arguments": {}}</tool_call> b</think>c<tool_call>{"name"',
    'hm <tool_call>{"name": "python", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "python", "arguments": {"code": "a\\"}\\\\"}, "name": "other"}</tool_call>',
    '<tool_call>{"name": "python", "arguments": {"code": {"a": [{}]}}, "more": 1}</tool_call> tail <tool_call>x',
    '<tool_call>{"name": "python", "arguments": {"a": 1} oops}</tool_call>',
    '<tool_call>{"name": "\\ud800", "arguments": {"a": 1}}</tool_call>',
    '<tool_call>{"arguments": {"a": 1}, "name": "python"}</tool_call>',
    '<tool_call>{"name": "größe", "arguments": {"é": "日本🙂", "n": NaN}}</tool_call>',
    "<|im_start|>assistant\n<think>hm</think>a",
    "  \n<think> \n hm \n </think> \n\n a  \n  b \n ",
    "</think></think><think>x</think>",
]


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    root = tmp_path_factory.mktemp("formats")
    return {family: load(root / family, family) for family in FAMILIES}


def split(renderer, ids, sizes, prompt=(), tools=(TOOL,), stop=()):
    splitter = Splitter(renderer, list(prompt), tools, stop=stop)
    events, at = [], 0
    for size in sizes:
        events += splitter.feed(ids[at : at + size])
        at += size
    events += splitter.feed(ids[at:])
    return events + splitter.finish(), splitter


def joined(events):
    """Return reasoning, text and calls; no event may be out of its place."""
    reasoning = text = ""
    calls, is_open = [], False
    for event in events:
        match event:
            case ReasoningDelta():
                assert event.text
                assert not is_open
                reasoning += event.text
            case TextDelta():
                assert event.text
                assert not is_open
                text += event.text
            case CallBegin():
                assert event.index == len(calls)
                assert not is_open
                calls.append([event.call_id, event.name, "", None])
                is_open = True
            case CallArguments():
                assert is_open
                assert event.index == len(calls) - 1
                calls[-1][2] += event.text
            case CallEnd():
                assert is_open
                calls[-1][3] = event.error
                is_open = False
    assert not is_open
    return reasoning, text, calls


def expected(renderer, ids, prompt, tools):
    parsed = renderer.parse(ids, prompt, tools)
    return (parsed.reasoning or "").strip(), parsed.content.strip(), parsed.tool_calls


def check(renderer, ids, sizes, prompt=(), tools=(TOOL,)):
    """Check the events of one answer against the parser; return how many calls were sent."""
    events, splitter = split(renderer, ids, sizes, prompt, tools)
    reasoning, text, calls = joined(events)
    whole = split(renderer, ids, [], prompt, tools)[0]
    assert joined(whole) == (reasoning, text, calls)
    kinds = [type(event) for event in events]
    if not renderer.name.startswith("glm") and ReasoningDelta in kinds:
        assert TextDelta not in kinds[: len(kinds) - kinds[::-1].index(ReasoningDelta)]
    json.dumps([reasoning, text, calls]).encode()
    sent = splitter.sent
    assert (sent.reasoning, sent.text) == (reasoning, text)
    assert [[call.id, call.name, call.arguments, call.error] for call in sent.calls] == calls
    thought, content, found = expected(renderer, ids, prompt, tools)
    if [call.error for call in found] == ["unparseable"]:
        return 0
    assert not splitter.disagreed
    assert reasoning == thought
    good = [call for call in found if call.error is None]
    well = [call for call in calls if call[3] is None]
    changed = [call for call in calls if call[3] == "changed_after_sending"]
    assert len(well) + len(changed) == len(good)
    if not changed:
        assert [(name, json.loads(arguments)) for _, name, arguments, _ in well] == [
            (call.name, call.arguments) for call in good
        ]
    begun = len(calls) - len(well) - len(changed)
    broken = [call.raw for call in found if call.error is not None]
    assert splitter.malformed == len(broken)
    as_text = [raw for raw in broken if raw and text.endswith(raw)]
    assert text.startswith(content)
    assert len(text) <= len("\n".join(filter(None, [content, *broken])))
    assert begun == 0 or len(broken) >= begun
    if not begun:
        assert text == "\n".join(filter(None, [content, *broken]))
        assert as_text or not any(broken)
    return len(well)


def test_every_format_of_the_library_is_split(formats):
    assert set(FAMILIES) >= STREAMED


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_any_ids_in_any_pieces_give_what_the_parser_finds(formats, family, data):
    renderer = formats[family]
    first = renderer.vocab_size - len(control_tokens(family))
    control = st.integers(first, renderer.vocab_size - 1)
    token = (st.integers(0, renderer.vocab_size - 1) | control).map(lambda token: [token])
    text = st.sampled_from(["日本🙂", "é", "</think>", "</thi", " \n", *WRITTEN, *XML, *NESTED]).map(renderer.encode)
    pieces = data.draw(st.lists(token | text.filter(lambda ids: len(ids) < 1000), max_size=25))
    ids = [token for piece in pieces for token in piece]
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=80))
    prompt = renderer.render([QUESTION], [TOOL]) if data.draw(st.booleans()) else [1]
    check(renderer, ids, sizes, prompt, data.draw(st.sampled_from([(TOOL,), ()])))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_policies_write_is_split_as_it_is_parsed(formats, family):
    renderer, random = formats[family], Random(0)
    prompt = renderer.render([QUESTION], [TOOL])
    for written in [*WRITTEN, *XML, *NESTED]:
        for text in (written, f"hm</think>{written}{written}"):
            ids = [*renderer.encode(text), renderer.stop_token_ids[0]]
            for at in (prompt, [1]):
                check(renderer, ids, random.choices(range(9), k=30), at)
                check(renderer, ids[: random.randrange(len(ids))], [2] * 9, at)


@pytest.mark.parametrize("family", FAMILIES)
def test_well_formed_calls_are_sent(formats, family):
    renderer = formats[family]
    written = [found for turn in TURNS.values() if (found := as_written(renderer, turn)) is not None]
    calls = sum(check(renderer, output, [1] * len(output), prompt) for prompt, output, _ in written)
    assert calls or family == "deepseek-r1"


@pytest.mark.parametrize("family", sorted(STREAMED))
def test_text_is_sent_before_the_end(formats, family):
    renderer = formats[family]
    prompt = renderer.render([QUESTION], [TOOL])
    thinks = renderer.begins_in_reasoning(prompt)
    splitter = Splitter(renderer, prompt, [TOOL])
    events = splitter.feed(renderer.encode("Hello wor"))
    assert [type(event) for event in events] == [ReasoningDelta if thinks else TextDelta]
    if thinks:
        splitter.feed(renderer.encode("</think>"))
    assert joined(splitter.feed(renderer.encode("\n\nÀ l")))[1].endswith("À l")


def test_arguments_are_sent_as_they_are_sampled(formats):
    renderer = formats["qwen3"]
    splitter = Splitter(renderer, [1], [TOOL], call_prefix="call_k")
    head = splitter.feed(renderer.encode('<tool_call>\n{"name": "python", "arguments": {"code":  "p'))
    assert head == [CallBegin(0, "call_k_0", "python"), CallArguments(0, '{"code":  "p')]
    rest = splitter.feed(renderer.encode('\\u00e9"}}\n</tool_call>'))
    assert "".join(event.text for event in rest[:-1]) == '\\u00e9"}'
    assert rest[-1] == CallEnd(0)


def test_a_call_that_breaks_after_its_name_ends_with_its_error(formats):
    events, splitter = split(formats["qwen3"], formats["qwen3"].encode(NESTED[4]), [])
    assert joined(events)[1:] == ("", [["call_0", "python", '{"a": 1}', "invalid_json"]])
    assert splitter.malformed == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning_ends_before_a_stop_string_too(formats, family):
    renderer = formats[family]
    prompt = renderer.render([QUESTION], [TOOL])
    events, splitter = split(renderer, renderer.encode("I look. End: more"), [], prompt, stop=("End:",))
    assert [event.text for event in events] == ["I look."]
    assert splitter.stopped_by == "End:"


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_follows_a_stop_string(formats, family):
    renderer = formats[family]
    for prompt, output, _ in filter(None, (as_written(renderer, turn) for turn in TURNS.values())):
        thinks = renderer.begins_in_reasoning(prompt)
        ids = [*renderer.encode("End:" if not thinks else "</think>End:"), *output]
        splitter = split(renderer, ids, [], prompt, stop=("End:",))[1]
        assert splitter.stopped_by is None or not splitter.sent.calls


@given(
    text=st.text("ab \n", max_size=12),
    stops=st.lists(st.text("ab \n", min_size=1, max_size=3), min_size=1, max_size=3),
    sizes=st.lists(st.integers(0, 3), max_size=12),
    family=st.sampled_from(["qwen3", "qwen3.5", "glm-4.5", "kimi-k2", "llama-3"]),
)
@example(text="a a", stops=[" ", "a a"], sizes=[1, 3], family="qwen3")
@example(text="a b", stops=[" ", "a a"], sizes=[1, 3], family="qwen3")
def test_the_text_ends_before_the_first_stop_string(formats, text, stops, sizes, family):
    renderer = formats[family]
    text = f"x{text}x"
    events, splitter = split(renderer, renderer.encode("</think>" + text), sizes, [1], stop=tuple(stops))
    whole = split(renderer, renderer.encode("</think>" + text), [], [1], stop=tuple(stops))[0]
    assert joined(events) == joined(whole)
    cut = min([text.find(stop) for stop in stops if stop in text], default=len(text))
    said = joined(events)[1].removeprefix("</think>") or joined(events)[0]
    assert said == text[:cut].rstrip()
    assert splitter.stopped_by in ([None] if cut == len(text) else [s for s in stops if text.startswith(s, cut)])
