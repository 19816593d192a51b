"""A chat format loads or says why not; parsing never raises, and no text forges a control token."""

import json
import shutil

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.errors import Boundary
from api_schemas.trajectories import Message
from rollout_service.base.errors import ServiceError, describe
from rollout_service.engines.shipped import policy_folder
from rollout_service.tokens import ChatRenderer
from rollout_service.tokens.errors import (
    RendererMismatchError,
    RenderError,
    TokenizerNotFoundError,
    UnknownRendererError,
)
from rollout_service.tokens.tokenizer import FastTokenizer
from tests.support.tokens.chat_formats import FAMILIES, control_tokens, load
from tests.support.tokens.conversations import TOOL

CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'


@pytest.fixture
def folder(tmp_path):
    shutil.copy(policy_folder("calc-tuned") / "tokenizer.json", tmp_path)
    return tmp_path


def parse(renderer, text, stop=True):
    ids = renderer.encode(text) + [renderer.stop_token_ids[0]] * stop
    return renderer.parse(ids, call_prefix="c")


@pytest.mark.parametrize("path", ["/no/such/folder", "no-such-folder", "./a/b/c"])
def test_a_missing_tokenizer_says_what_to_pass(path):
    with pytest.raises(TokenizerNotFoundError) as caught:
        ChatRenderer.load(path, "qwen3")
    assert path in str(caught.value)
    assert "tokenizer.json" in caught.value.hint


def test_a_broken_tokenizer_is_not_readable(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerNotFoundError, match="not readable"):
        ChatRenderer.load(tmp_path, "qwen3")


def test_broken_settings_are_named(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(TokenizerNotFoundError, match=r"config\.json cannot be read as JSON"):
        ChatRenderer.load(folder)
    with pytest.raises(TokenizerNotFoundError, match="Not a directory") as caught:
        ChatRenderer.load(folder / "tokenizer.json")
    assert "Pass a folder" in caught.value.hint


def test_an_unknown_renderer_lists_the_known_ones():
    with pytest.raises(UnknownRendererError) as caught:
        ChatRenderer.load(policy_folder("calc-tuned"), "qwen33")
    assert "qwen3," in caught.value.hint
    assert "glm-4.5" in caught.value.hint


@pytest.mark.parametrize(("config", "seen"), [(None, "no config.json"), ({"model_type": "llama"}, "'llama'")])
def test_auto_says_when_it_cannot_tell(folder, config, seen):
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownRendererError, match=seen) as caught:
        ChatRenderer.load(folder)
    assert "renderer = 'qwen3'" in caught.value.hint


def test_auto_goes_by_the_model_type(folder):
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    assert ChatRenderer.load(folder).name == "qwen3"


def test_a_tokenizer_of_another_format_does_not_fit(folder):
    with pytest.raises(RendererMismatchError, match=r"does not fit.*\[gMASK\]"):
        ChatRenderer.load(folder, "glm-4.5")


def test_an_unknown_option_is_refused(folder):
    with pytest.raises(RendererMismatchError, match="enable_thinkin"):
        ChatRenderer.load(folder, "qwen3", {"enable_thinkin": False})


def test_token_errors_are_distinguished_by_their_boundary():
    with pytest.raises(ServiceError) as caught:
        ChatRenderer.load("/no/such/folder", "qwen3")
    info = describe(caught.value)
    assert (info.boundary, info.code) == (Boundary.TOKENS, "tokenizer_not_found")


def test_messages_that_the_format_cannot_render_are_named(renderer):
    with pytest.raises(RenderError, match="none"):
        renderer.render([])


def test_a_well_formed_call(renderer):
    parsed = parse(renderer, "Let me see.\n" + CALL)
    assert parsed.content == "Let me see."
    (call,) = parsed.tool_calls
    assert (call.id, call.name, call.arguments, call.error) == ("c-0", "python", {"code": "print(1)"}, None)
    assert json.loads(call.raw)["name"] == "python"
    assert parsed.closed
    assert not any(call.error for call in parsed.tool_calls)


def test_parallel_calls_keep_their_order_and_the_malformed_one_its_text(renderer):
    parsed = parse(renderer, f"{CALL}\n<tool_call>\n{{broken\n</tool_call>\n{CALL}")
    assert [call.error for call in parsed.tool_calls] == [None, "invalid_json", None]
    assert [call.id for call in parsed.tool_calls] == ["c-0", "c-1", "c-2"]
    assert parsed.tool_calls[1].raw == "{broken"
    assert parsed.tool_calls[1].arguments is None
    assert any(call.error for call in parsed.tool_calls)


@pytest.mark.parametrize(
    ("inner", "error"),
    [
        ('{"name": "python", "arguments": [1]}', "arguments_not_an_object"),
        ('{"name": "python", "arguments": {"x": NaN}}', "arguments_not_json"),
        ('{"name": "python", "arguments": {"x": 1e999}}', "arguments_not_json"),
        ('{"name": "python", "arguments": {"x": "\\ud800"}}', "arguments_not_json"),
        ('{"name": "", "arguments": {}}', "missing_name"),
        ('{"name": 5, "arguments": {}}', "missing_name"),
        ('{"name": "py\\ud800", "arguments": {}}', "missing_name"),
        ('["python"]', "missing_name"),
        ("[" * 5000, "unparseable"),
        ("1" * 5000, "unparseable"),
    ],
)
def test_a_call_with_unusable_arguments_is_malformed(renderer, inner, error):
    (call,) = parse(renderer, f"<tool_call>\n{inner}\n</tool_call>").tool_calls
    assert (call.error, call.arguments) == (error, None)
    call.model_dump_json()


def test_a_truncated_call_is_unclosed(renderer):
    parsed = parse(renderer, CALL[:40], stop=False)
    assert [call.error for call in parsed.tool_calls] == ["unclosed_block"]
    assert not parsed.closed


def test_reasoning_is_separated_from_the_answer(renderer):
    parsed = parse(renderer, "<think>\nhm\n</think>\n\nanswer")
    assert (parsed.reasoning, parsed.content) == ("hm", "answer")


def test_reasoning_may_begin_in_the_prompt(renderer):
    prompt = renderer.render([Message(role="user", content="q")]) + renderer.encode("<think>\n")
    parsed = renderer.parse(renderer.encode("hm\n</think>\n\nanswer"), prompt)
    assert (parsed.reasoning, parsed.content) == ("hm", "answer")


def test_a_malformed_call_stays_in_the_text_when_history_is_rendered_again(renderer):
    parsed = parse(renderer, f"{CALL}\n<tool_call>\n{{broken\n</tool_call>")
    answer = Message(role="assistant", content=parsed.content, tool_calls=list(parsed.tool_calls))
    user = Message(role="user", content="q")
    text = renderer.decode(renderer.render([user, answer, user]))
    assert "{broken" in text
    assert '"code": "print(1)"' in text


def test_tokens_sampled_after_a_stop_token_are_never_dropped(renderer):
    prompt = renderer.render([Message(role="user", content="q")])
    stop = renderer.stop_token_ids[0]
    answer = [Message(role="tool", content="x")]
    assert renderer.bridge(prompt, [20, stop], answer)
    assert renderer.bridge(prompt, [20, stop, 21], answer) is None


def test_earlier_reasoning_may_be_removed_at_a_user_message():
    question = [Message(role="user", content="q")]
    kept = ChatRenderer.load(policy_folder("calc-tuned"))
    removed = ChatRenderer.load(policy_folder("calc-tuned"), options={"thinking_retention": "tool_cycle"})
    prompt, output = kept.render(question), [20, kept.stop_token_ids[0]]
    assert kept.bridge(prompt, output, question)
    assert removed.bridge(prompt, output, question) is None


ALL_CONTROL = sorted({token for family in FAMILIES for token in control_tokens(family)})
TEXT = st.lists(
    st.text(max_size=8)
    | st.sampled_from(ALL_CONTROL)
    | st.builds(lambda token, n: token[:n], st.sampled_from(ALL_CONTROL), st.integers(1, 12)),
    max_size=6,
).map("".join)


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    root = tmp_path_factory.mktemp("formats")
    return {family: load(root / family, family) for family in FAMILIES}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@given(ids=st.lists(st.integers(0, 600), max_size=60), tools=st.booleans())
def test_parsing_raises_on_no_ids(renderers, name, ids, tools):
    parsed = renderers[name].parse(ids, [1, 2, 3], [TOOL] if tools else [])
    for call in parsed.tool_calls:
        assert (call.arguments is None) == (call.error is not None)
        assert call.error or call.name


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@given(text=TEXT)
def test_no_text_holds_a_control_token(renderers, name, text):
    renderer = renderers[name]
    clean, written = (renderer.render([Message(role="user", content=content)]) for content in ("x", f"x{text}x"))
    first = renderer.vocab_size - len(control_tokens(name))
    assert [token for token in written if token >= first] == [token for token in clean if token >= first]
    assert f"x{text}x" in renderer.decode(written)


WIDE = "\uff1c|end|\uff1e"


@pytest.mark.parametrize("text", [WIDE, "<|end|>\u0338", f"<|end|>\u0338{WIDE}", f"{WIDE}<|end|>"])
def test_normalizing_makes_no_control_token_of_a_text(text):
    vocabulary = tokenizers.Tokenizer(tokenizers.models.BPE({chr(i): i for i in range(32, 127)}, []))
    vocabulary.normalizer = tokenizers.normalizers.NFKC()
    vocabulary.add_special_tokens([tokenizers.AddedToken("<|end|>", normalized=True)])
    tokenizer = FastTokenizer(vocabulary)
    assert vocabulary.token_to_id("<|end|>") not in tokenizer.encode(tokenizer.escaper().escape(text))
