"""The tags of calls are found where the library finds them, in linear time."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.tokens.tagged_text import text_lexemes, text_lexemes_of_the_library
from tests.support.tokens.calls import TOOL, written
from tests.support.tokens.chat_formats import load

FORMAT = "deepseek-v4"
MARKERS = {"<call>": "begin", "\n</call>": "end", "</": "close", "é🙂": "other"}
TEXT = st.lists(st.sampled_from([*MARKERS, "<", "call>", "a", " ", "\n", "é", "🙂", "\ufffd"])).map("".join)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return load(tmp_path_factory.mktemp("format") / FORMAT, FORMAT)


@given(parts=st.lists(TEXT | st.lists(st.integers(0, 400))), offset=st.integers(0, 3))
def test_they_are_where_the_library_finds_them(renderer, parts, offset):
    ids = [one for part in parts for one in (renderer.encode(part) if isinstance(part, str) else part)]
    tokenizer = renderer._tokenizer
    expected = list(text_lexemes_of_the_library(tokenizer, ids, offset, MARKERS))
    assert list(text_lexemes(tokenizer, ids, offset, MARKERS)) == expected


def test_a_turn_of_many_calls_is_read_in_time(renderer):
    prompt, turn = written(renderer, *[{"text": "a b c", "count": 1}] * 200)
    begun = time.process_time()
    assert len(renderer.parse(turn, prompt, (TOOL,)).tool_calls) == 200
    assert time.process_time() - begun < 5  # quadratic time is a minute
