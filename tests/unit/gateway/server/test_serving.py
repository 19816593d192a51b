"""A server of one program lives as long as its block, whatever ends the block."""

import socket

import httpx
import pytest

from rollout_service.gateway.gateway import ONE_PROGRAM
from rollout_service.gateway.server.listener import serving
from rollout_service.settings.gateway import GatewaySettings
from sandboxes.errors import SandboxClosedError


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


async def test_an_error_of_the_block_reaches_its_caller_as_it_is():
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(trust_env=False) as client:

        async def serve_and_fail():
            async with serving(app, listener, GatewaySettings(), ONE_PROGRAM, lambda _: None):
                assert (await client.get(url)).text == "here"
                raise SandboxClosedError("the disk is full")

        with pytest.raises(SandboxClosedError):
            await serve_and_fail()
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
