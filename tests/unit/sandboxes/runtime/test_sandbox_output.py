"""Output is bounded, keeps both ends, and counts what it left out."""

from hypothesis import given
from hypothesis import strategies as st

from sandboxes.runtime.output import OutputBuffer


@given(st.lists(st.binary(max_size=40), max_size=40), st.integers(1, 100))
def test_keeps_everything_or_both_ends(parts, limit):
    buffer = OutputBuffer(limit)
    for part in parts:
        buffer.add(part)
    whole = b"".join(parts)
    assert buffer.total == len(whole)
    assert buffer.truncated == (len(whole) > limit)
    if not buffer.truncated:
        assert buffer.bytes() == whole
        return
    head, tail = (limit + 1) // 2, limit // 2
    note = f"\n[... {len(whole) - limit} bytes left out ...]\n".encode()
    assert buffer.bytes() == whole[:head] + note + whole[len(whole) - tail :]


def test_memory_does_not_grow_with_the_stream():
    buffer = OutputBuffer(1000)
    for _ in range(10_000):
        buffer.add(b"x" * 65536)
    assert sum(map(len, buffer._tail)) <= 500 + 65536
    assert buffer.total == 10_000 * 65536


def test_many_small_reads_are_kept_in_bounds():
    buffer = OutputBuffer(10)
    for number in range(10_000):
        buffer.add(str(number % 10).encode())
    assert len(buffer._tail) <= 6
    assert buffer.bytes().endswith(b"56789")


def test_invalid_utf8_is_replaced():
    buffer = OutputBuffer(100)
    buffer.add(b"caf\xc3")
    buffer.add(b"\xa9 \xff")
    assert buffer.text() == "café \ufffd"
