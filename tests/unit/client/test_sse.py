"""The parser of server-sent events gives the same events however the bytes are cut."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_client._events import ServerSentEvent, SSEParser

LINE_ENDS = st.sampled_from(["\n", "\r", "\r\n"])
TEXT = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=("Cs",)), max_size=20)


def events(data: bytes, cuts: list[int] = ()) -> list[ServerSentEvent]:
    parser, found, start = SSEParser(), [], 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        found += parser.feed(data[start:cut])
        start = cut
    return found


@given(
    messages=st.lists(st.tuples(TEXT, st.lists(TEXT, min_size=1, max_size=3)), max_size=5),
    end=LINE_ENDS,
    cuts=st.lists(st.integers(min_value=0), max_size=8),
)
def test_events_survive_any_cut_and_any_line_end(messages, end, cuts):
    stream = "".join(
        f"id: {number}{end}event: {kind}{end}" + "".join(f"data: {line}{end}" for line in data) + end
        for number, (kind, data) in enumerate(messages)
    )
    expected = [
        ServerSentEvent(event=kind or "message", data="\n".join(data), id=str(number))
        for number, (kind, data) in enumerate(messages)
    ]
    # The last event ends with a CR that may be half of a CRLF, so seeing it takes one more byte.
    assert events((stream + ":").encode(), cuts) == expected


def test_a_line_separator_inside_of_json_does_not_end_the_line():
    assert events('data: "a\u2028b\x85c"\n\n'.encode())[0].data == '"a\u2028b\x85c"'


def test_comments_and_unknown_fields_are_ignored():
    assert events(b": alive\nretry: 10\nwhat: ever\n\n") == []


def test_an_event_without_its_empty_line_is_not_yielded():
    assert events(b"data: half\n") == []


def test_the_id_stays_until_another_comes():
    assert [event.id for event in events(b"id: 7\ndata: a\n\ndata: b\n\n")] == ["7", "7"]


def test_an_id_without_data_is_a_resume_point_and_not_an_event():
    parser = SSEParser()
    assert list(parser.feed(b"id: 7\n\nid: 8\n")) == []
    assert parser.last_id == "7", "what follows the line may be cut off"
