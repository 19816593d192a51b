"""Kernels' messages are hostile: fields are checked, sockets are linked and never followed."""

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.kernel import Cell, _link_socket, connection_info

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
def test_any_message_is_survived(kind: str, content: dict[str, object]) -> None:
    cell = Cell(100)
    cell.take(kind, content)
    assert isinstance(cell.output.text(), str)
    assert cell.result is None or isinstance(cell.result, str)


def test_colours_are_taken_out_and_long_values_cut() -> None:
    cell = Cell(100)
    cell.take("error", {"ename": "E", "evalue": "v" * 1000, "traceback": ["\x1b[31mred\x1b[0m", "end"]})
    assert cell.error is not None
    assert cell.error.traceback == "red\nend"
    assert "left out" in cell.error.evalue
    assert cell.truncated


def test_only_sockets_are_linked(tmp_path: Path) -> None:
    inside, links = tmp_path / "inside", tmp_path / "links"
    inside.mkdir()
    links.mkdir()
    target = tmp_path / "host.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(target))
        (inside / "planted").symlink_to(target)
        assert not _link_socket(inside / "planted", links / "planted")
        assert not _link_socket(inside / "missing", links / "missing")
        (inside / "file").touch()
        assert not _link_socket(inside / "file", links / "file")
        assert list(links.iterdir()) == []
        os.link(target, inside / "real")
        assert _link_socket(inside / "real", links / "real")


def test_connection_info_names_all_channels() -> None:
    info = connection_info("/x/y")
    assert info["ip"] == "/x/y"
    assert sorted(value for key, value in info.items() if key.endswith("_port")) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_smallest_limits(limit: int) -> None:
    cell = Cell(limit)
    cell.take("stream", {"text": "abcdef"})
    assert cell.output.truncated
