"""Text that is cut in the middle never exceeds the limit, and a note counts the missing characters."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.agents.tool_calling.tools import MIN_LIMIT, cut_middle


@settings(deadline=None)
@given(st.text(max_size=3_000), st.integers(MIN_LIMIT, 2_000))
def test_the_ends_stay_and_the_note_counts_what_is_missing(text, limit):
    cut = cut_middle(text, limit)
    assert len(cut) <= limit
    if len(text) <= limit:
        assert cut == text
        return
    found = re.search(r"\n\[\.\.\. (\d+) characters cut \.\.\.\]\n", cut)
    head, tail = cut[: found.start()], cut[found.end() :]
    assert text.startswith(head)
    assert text.endswith(tail)
    assert int(found[1]) == len(text) - len(head) - len(tail)
    assert 0 <= len(head) - len(tail) <= 1


@settings(deadline=None)
@given(st.text(alphabet="x", min_size=10, max_size=10_000_000 // 1_000))
def test_most_of_the_room_is_used(text):
    cut = cut_middle(text, 100)
    assert len(cut) == len(text) if len(text) <= 100 else len(cut) >= 96


def test_a_limit_without_room_is_refused():
    with pytest.raises(ValueError, match="no room"):
        cut_middle("text", MIN_LIMIT - 1)
