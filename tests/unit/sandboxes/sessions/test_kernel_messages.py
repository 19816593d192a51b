"""What code inside sends in place of a kernel takes little of the service's time."""

import socket
import threading
import time
from contextlib import suppress

import anyio

from sandboxes.contract import PythonErrorInfo
from sandboxes.sessions.kernel import DELIM, Cell, decode
from sandboxes.sessions.zmtp import COMMAND, GREETING, READY, ZmtpConnection, encode_frame

PARENT, HEADER = b'{"msg_id": "abc"}', b'{"msg_type": "stream"}'


def message(header: bytes = HEADER, parent: bytes = PARENT, content: bytes = b"{}") -> list[bytes]:
    return [b"topic", DELIM, b"signature", header, parent, b"not read", content]


def test_headers_that_would_take_seconds_are_not_decoded():
    dates = b'{"msg_type": "stream", "x": [' + b",".join([b'"2020-01-01T00:00:00"'] * 190_000) + b"]}"
    assert decode(message(header=dates), "abc") is None
    assert decode(message(parent=PARENT[:-1] + b', "x": ' + dates + b"}"), "abc") is None


def flood(listening: socket.socket) -> None:
    """Send tiny messages until the other end closes."""
    peer, _ = listening.accept()
    with peer, suppress(OSError):
        peer.sendall(GREETING + encode_frame(READY, COMMAND))
        while True:
            peer.sendall(encode_frame(b"x") * 4096)


async def test_a_flood_of_messages_takes_a_part_of_a_processor(folder):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "s"))
        listening.listen()
        sender = threading.Thread(target=flood, args=[listening], daemon=True)
        sender.start()
        connection = ZmtpConnection(folder / "s", b"SUB")
        connection.start(lambda _: sum(range(5000)))
        begun, worked = time.monotonic(), time.thread_time()
        with anyio.fail_after(100):
            while time.thread_time() - worked < 0.1:  # however long that takes on a busy host
                await anyio.sleep(0.01)
        share = (time.thread_time() - worked) / (time.monotonic() - begun)
        connection.close()
        sender.join()
    assert share < 0.5


def test_an_error_whose_traceback_cannot_be_printed_is_known_from_the_reply():
    cell, error = Cell(1_000), {"ename": "KeyboardInterrupt", "evalue": ""}
    cell.add_message("execute_reply", error | {"status": "error", "traceback": ["that of an earlier cell"]})
    assert cell.error == PythonErrorInfo("KeyboardInterrupt", "", "")
    cell.add_message("error", error | {"traceback": ["its own"]})
    cell.add_message("execute_reply", error | {"status": "error"})
    assert cell.error == PythonErrorInfo("KeyboardInterrupt", "", "its own")
