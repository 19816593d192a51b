"""A connection whose opening is cancelled ends as any other: its slot is free, and the server does not wait for it."""

import socket

import anyio
import anyio.lowlevel
import pytest
import uvicorn

from rollout_service.http.connections import ConnectionLimits, Connections
from rollout_service.http.protocol import RequestLimits
from rollout_service.http.server import Server

MOST_STEPS = 100


async def app(scope, receive, send):
    raise AssertionError("no request is sent")


async def cancel_at(step: int, *, evicts: bool) -> tuple[int, dict[str, int]]:
    """Cancel an opening after so many steps of the event loop; return the connections left, and their slots."""
    connections = Connections(ConnectionLimits(admitted=1, pending=1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_config=None, ws="none", lifespan="off")
        config.load()
        server = Server(config, listener, connections=connections, limits=RequestLimits(), observe=lambda _: None)
        server.lifespan = config.lifespan_class(config)
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        accepted.setblocking(False)
        with client:
            async with anyio.create_task_group() as opening:
                opening.start_soon(server._open, accepted, "127.0.0.1")
                for _ in range(step):
                    await anyio.lowlevel.checkpoint()
                if evicts:
                    connections.add("127.0.0.1", lambda _: None)
                else:
                    opening.cancel_scope.cancel()
            for connection in list(server.server_state.connections):
                connection.shutdown()  # as uvicorn does
            for _ in range(MOST_STEPS):
                await anyio.lowlevel.checkpoint()
    return len(server.server_state.connections), connections.counts()


@pytest.mark.parametrize("step", range(1, 5))
@pytest.mark.parametrize("evicts", [False, True], ids=["the server stops", "it makes room"])
def test_an_opening_that_is_cancelled_leaves_no_connection(step, evicts):
    left, counts = anyio.run(lambda: cancel_at(step, evicts=evicts), backend_options={"use_uvloop": True})
    assert left == 0
    assert counts["pending"] == int(evicts)
