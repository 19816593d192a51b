"""Server-sent events are passed on whole and in order, however their bytes are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.engines.kinds.http_client import EventSplitter

LINE = st.binary(max_size=20).map(lambda raw: raw.replace(b"\n", b"-").replace(b"\r", b"-"))


def split(*parts: bytes) -> list[bytes]:
    events: list[bytes] = []
    splitter = EventSplitter(events.append)
    for part in parts:
        before = len(events)
        assert splitter.feed(part) == (len(events) > before)
    return events


@given(
    events=st.lists(st.lists(LINE, min_size=1, max_size=3), max_size=6),
    end=st.sampled_from([b"\n", b"\r\n"]),
    cuts=st.lists(st.integers(0, 400)),
)
def test_where_the_bytes_are_cut_changes_nothing(
    events: list[list[bytes]], end: bytes, cuts: list[int]
) -> None:
    raw = b"".join(
        b"".join(b"data: " + line + end for line in lines) + b": comment" + end + end for lines in events
    )
    places = sorted({0, len(raw), *(min(cut, len(raw)) for cut in cuts)})
    parts = [raw[start:stop] for start, stop in pairwise(places)]
    assert split(*parts) == [b"\n".join(lines) for lines in events]


@pytest.mark.parametrize(
    ("raw", "events"),
    [
        (b"data:{}\n\n", [b"{}"]),
        (b"event: x\nid: 1\ndata: a\n\n", [b"a"]),
        (b"\n\n\n: ping\n\n", []),
        (b"data: never finished\n", []),
        (b"database: x\n\n", []),
    ],
)
def test_only_the_data_of_finished_events_counts(raw: bytes, events: list[bytes]) -> None:
    assert split(raw) == events


def test_unfinished_bytes_are_counted() -> None:
    splitter = EventSplitter(lambda _: None)
    splitter.feed(b"data: abc\ndata: de")
    assert splitter.unfinished_bytes == len(b"abc") + len(b"data: de")
    splitter.feed(b"\n\n")
    assert splitter.unfinished_bytes == 0
