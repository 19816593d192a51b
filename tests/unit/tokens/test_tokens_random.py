"""Thousands of random conversations, over all hand-written chat formats, keep their promises.

With a hundred examples of a property (`--hypothesis-profile=deep`) there are at least ten thousand conversations.
"""

from collections import Counter
from math import ceil

import pytest
from hypothesis import settings

from tests.support.tokens.chat_formats import FAMILIES, load
from tests.support.tokens.conversations import Format, hold

pytestmark = pytest.mark.slow

EACH = ceil(100 * settings.default.max_examples / len(FAMILIES))


def test_there_are_at_least_six_formats():
    assert len(FAMILIES) >= 6


@pytest.mark.parametrize("family", FAMILIES)
def test_every_random_conversation_keeps_its_promises(tmp_path, family):
    chat = Format(family, load(tmp_path / family, family))
    counts = sum((hold(chat, seed) for seed in range(EACH)), Counter())
    assert counts["conversations"] == EACH
    assert counts["turns"] > EACH
    extended = counts["turns"] - sum(n for name, n in counts.items() if name.startswith("fork"))
    assert extended > EACH / 8, f"most turns began a segment, so that little was tested: {counts}"
