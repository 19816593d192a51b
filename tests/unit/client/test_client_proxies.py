"""The proxies of the environment: not for this machine, and named where they fail."""

import sys
from collections.abc import AsyncIterator

import anyio
import httpx
import pytest
from anyio.abc import SocketAttribute, SocketStream

from rollout_client._connection import find_proxy
from rollout_client.client import ProxySettingsError, RolloutClient, UnreachableError

NOWHERE = "http://user:secret@127.0.0.1:9"


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Yield the port of a server on this machine that says that it is ready."""

    async def answer(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            body = b'{"ready": true}'
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        yield listener.extra(SocketAttribute.local_port)
        tasks.cancel_scope.cancel()


def test_a_proxy_is_used_where_the_environment_names_one(monkeypatch):
    assert find_proxy(httpx.URL("http://node:1")) is None
    monkeypatch.setenv("http_proxy", "proxy:3128")
    assert find_proxy(httpx.URL("http://node:1")) == "http://proxy:3128"
    assert find_proxy(httpx.URL("https://node:1")) is None
    monkeypatch.setenv("all_proxy", "http://other:3128")
    assert find_proxy(httpx.URL("https://node:1")) == "http://other:3128"
    monkeypatch.setenv("no_proxy", "node")
    assert find_proxy(httpx.URL("http://node:1")) is None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.0.1", "[::1]", "rollouts.localhost"])
def test_this_machine_is_reached_without_a_proxy(monkeypatch, host):
    monkeypatch.setenv("all_proxy", NOWHERE)
    assert find_proxy(httpx.URL(f"http://{host}:8080")) is None


@pytest.mark.parametrize("proxy", [NOWHERE, "socks5://127.0.0.1:9"])
async def test_a_server_on_this_machine_answers_whatever_the_proxy(monkeypatch, port, proxy):
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("all_proxy", proxy)
    async with RolloutClient(f"http://127.0.0.1:{port}", patience_seconds=0) as client:
        await client.ready()


async def test_a_proxy_that_does_not_answer_is_named_without_its_password(monkeypatch):
    monkeypatch.setenv("http_proxy", NOWHERE)
    async with RolloutClient("http://rollouts.example:8080", patience_seconds=0) as client:
        for call in (client.runs, client.ready):
            with pytest.raises(UnreachableError, match=r"through the proxy 127\.0\.0\.1:9 .*NO_PROXY") as refused:
                await call()
            assert "secret" not in str(refused.value)


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "gopher://127.0.0.1:9"])
def test_a_proxy_that_cannot_be_used_is_an_error_of_the_client(monkeypatch, proxy):
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.setitem(sys.modules, "socksio", None)
    with pytest.raises(ProxySettingsError, match=f"the proxy {proxy} .*cannot be used"):
        RolloutClient("http://rollouts.example:8080")
