"""Kernel messages are untrusted: fields are checked, only sockets are opened, and links are never followed."""

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.sessions.kernel import Cell, _open_socket, make_connection_info

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["text", "data", "ename", "evalue", "traceback", "execution_state", "text/plain"])


@given(
    st.sampled_from(["stream", "display_data", "execute_result", "error", "status", "other"]),
    st.dictionaries(FIELDS, JSON, max_size=5),
)
def test_any_message_is_survived(kind, content):
    cell = Cell(100)
    cell.add_message(kind, content)
    assert isinstance(cell.output.text(), str)
    assert cell.result is None or isinstance(cell.result, str)


def test_colors_are_removed_and_long_values_cut():
    cell = Cell(100)
    cell.add_message(
        "error", {"ename": "E", "evalue": "v" * 1000, "traceback": ["\x1b[31mred\x1b[0m", "end"]}
    )
    assert cell.error is not None
    assert cell.error.traceback == "red\nend"
    assert "left out" in cell.error.evalue
    assert cell.truncated


def test_only_sockets_are_opened_and_no_link_is_followed(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    target = tmp_path / "host.sock"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(target))
        server.listen()
        (inside / "planted").symlink_to(target)
        (inside / "file").touch()
        os.mkfifo(inside / "fifo")
        for name in ("planted", "missing", "file", "fifo"):
            assert _open_socket(inside / name) is None
        os.link(target, inside / "real")
        held = _open_socket(inside / "real")
        assert held is not None
        (inside / "real").unlink()
        (inside / "real").symlink_to("/dev/null")
        client.connect(f"/proc/self/fd/{held}")  # the checked socket, whatever has its name by now
        os.close(held)


def test_connection_info_names_all_channels():
    info = make_connection_info("/x/y")
    assert info["ip"] == "/x/y"
    assert sorted(value for key, value in info.items() if key.endswith("_port")) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_smallest_limits(limit):
    cell = Cell(limit)
    cell.add_message("stream", {"text": "abcdef"})
    assert cell.output.truncated
