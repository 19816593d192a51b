"""Parsing never raises, whatever ids a policy samples, and no text forges a control token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.trajectories import Message
from tests.support.tokens.chat_formats import FAMILIES, control_tokens, load
from tests.support.tokens.conversations import TOOL

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
    clean, written = (
        renderer.render([Message(role="user", content=content)]) for content in ("x", f"x{text}x")
    )
    first = renderer.vocab_size - len(control_tokens(name))
    assert [token for token in written if token >= first] == [token for token in clean if token >= first]
    assert f"x{text}x" in renderer.decode(written)
