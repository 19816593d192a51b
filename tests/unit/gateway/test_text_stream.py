"""A text ends before its first stop string, in whatever pieces it comes, and no more of it waits than it must."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_service.gateway.capture.text_stream import StopFilter

LETTERS = "ab"
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=4)
PIECES = st.lists(st.text(LETTERS, max_size=9), max_size=12)


def before_first(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return what stands before the first of the strings, and the string: of several, the shortest."""
    places = [(at, len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(places)[0]], min(places)[2]) if places else (text, None)


@given(STOPS, PIECES)
def test_a_text_ends_before_its_first_stop_string_however_it_is_cut(stops, pieces):
    filtered = StopFilter(stops)
    returned = ""
    for number, piece in enumerate(pieces, 1):
        returned += filtered.push(piece)
        whole, _ = before_first("".join(pieces[:number]), stops)
        assert whole.startswith(returned), "nothing of a string is returned"
    assert (returned + filtered.end(), filtered.found) == before_first("".join(pieces), stops)


@given(STOPS, PIECES)
def test_no_more_waits_than_may_begin_a_stop_string(stops, pieces):
    filtered, text, returned = StopFilter(stops), "", ""
    for piece in pieces:
        text += piece
        returned += filtered.push(piece)
        if filtered.found is None:
            waiting = text[len(returned) :]
            assert (
                not waiting or any(stop.startswith(waiting) for stop in stops) or any(stop in waiting for stop in stops)
            )


def test_strings_may_begin_anew_after_the_end_of_a_region():
    filtered = StopFilter(["abc"])
    assert filtered.push("xab") + filtered.end() + filtered.push("c abc") == "xabc "
