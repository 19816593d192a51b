"""A port for a server is free, and not one that the kernel may give to another program meanwhile."""

import socket

import pytest

from sandboxes.host import ports


def test_a_port_is_free_and_below_those_that_the_kernel_gives():
    port = ports.free_port()
    assert port < int(ports.GIVEN.read_text().split()[0])
    with socket.create_server(("127.0.0.1", port)):
        assert ports.free_port() != port


def test_a_kernel_that_gives_all_ports_leaves_none_below(tmp_path, monkeypatch):
    given = tmp_path / "range"
    given.write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "GIVEN", given)
    with socket.create_server(("127.0.0.1", ports.free_port())) as server:
        assert server.getsockname()[1] >= 1024


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match="assign requested address"):
        ports.free_port("192.0.2.1")
