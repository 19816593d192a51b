"""Reports with any text reach the process that prints them."""

import json

import execnet
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plugins.sendable_reports import escape_surrogates

TEXTS = st.text(alphabet="aé😀\ud800\udfff", max_size=8)
DATA = st.recursive(
    st.none() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=8,
)


@given(DATA)
def test_every_report_can_be_sent_and_differs_only_in_surrogates(data):
    sent = escape_surrogates(data)
    assert execnet.loads(execnet.dumps(sent)) == sent
    if "\\ud" not in json.dumps(data):
        assert sent == data
