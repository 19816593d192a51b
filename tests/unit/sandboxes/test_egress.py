"""The proxy enforces the list of hosts, with real sockets and a scripted resolver."""

import os
import resource
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address

import anyio
import psutil
import pytest
from anyio.abc import SocketAttribute, SocketStream
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.observability.telemetry.egress import EgressMeter
from rollout_service.observability.telemetry.metrics import Metrics
from sandboxes import (
    SandboxClosedError,
    SandboxConfigError,
    SandboxStartError,
)
from sandboxes.egress.host import EgressHost, ProxyOwner
from sandboxes.egress.messages import EgressCounts
from sandboxes.egress.proxy import BURST, CHUNK_BYTES, HEAD_BYTES, LOOKUPS, PER_SECOND, EgressProxy, ProxyLimits
from sandboxes.egress.rules import AllowList, HostRule, normalize_host, split_port
from sandboxes.host.processes import kill_processes, sandbox_of
from tests.support.named_sandboxes import NamedProvider
from tests.support.waiting import until

OWNER = ProxyOwner(secrets.token_hex(4), 65534, 65534)
"""A name for this test process alone, because processes that belong to it are killed by name."""

LABELS = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join)
PORTS = st.integers(1, 65535)


@given(NAMES)
def test_a_name_has_one_form(name):
    assert normalize_host(name.upper()) == normalize_host(f"{name}.") == normalize_host(name) == name
    assert AllowList([name.upper() + "."]).allows(normalize_host(name), 443)


@given(NAMES, NAMES, PORTS)
def test_a_name_matches_only_itself(name, other, port):
    allowed = AllowList([f"{name}:{port}"])
    assert allowed.allows(name, port)
    assert not allowed.allows(name, port % 65535 + 1)
    assert allowed.allows(other, port) == (other == name)
    assert not allowed.allows(f"{other}.{name}", port)
    assert not allowed.allows(f"{other}{name}", port)


@given(NAMES, NAMES)
def test_a_star_matches_subdomains(name, other):
    allowed = AllowList([f"*.{name}"])
    assert not allowed.allows(name, 443)
    assert allowed.allows(f"{other}.{name}", 443)
    assert not allowed.allows(f"{other}-{name}", 443)
    assert allowed.allows(other, 443) == other.endswith(f".{name}")


@given(st.ip_addresses(), PORTS)
def test_addresses_are_themselves_in_every_spelling(address, port):
    text = str(address)
    entry = f"[{text}]:{port}" if ":" in text else f"{text}:{port}"
    allowed = AllowList([entry])
    parsed = ip_address(normalize_host(text))
    assert allowed.allows(str(parsed), port)
    assert allowed.accepts_address(parsed, port, private=False)
    assert split_port(entry)[1] == port


@given(st.text(max_size=30))
def test_any_text_is_an_entry_or_an_error_that_names_it(text):
    try:
        rule = HostRule.parse(text)
    except SandboxConfigError as error:
        assert repr(text) in str(error)  # noqa: PT017
    else:
        assert normalize_host(rule.host) == rule.host


def test_international_names_are_compared_in_ascii():
    allowed = AllowList(["Bücher.example"])
    assert allowed.allows(normalize_host("xn--bcher-kva.example"), 443)
    assert allowed.allows(normalize_host("BÜCHER.example."), 80)


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "*",
        "*.",
        "https://api.example.com",
        "api.example.com/simple",
        "a b",
        "host:0",
        "host:65536",
        "host:x",
        "host:",
        "a..b",
        "-a.b",
        "*.*.b",
        "a*.b",
        "*.10.0.0.1",
        "0x7f.1",
        "127.1",
        "2130706433",
        "1.2.3.4.5",
        "[fd00::1",
        "fe80::1%eth0",
        "user@host",
        f"host:{chr(0xFF18)}",
        "::ffff:1.2.3.4%a",
    ],
)
def test_invalid_entries_are_refused(entry):
    with pytest.raises(SandboxConfigError) as error:
        AllowList(["api.example.com", entry])
    assert repr(entry) in str(error.value)
    assert error.value.hint


def test_the_length_of_a_list_is_bounded():
    with pytest.raises(SandboxConfigError, match="1001"):
        AllowList(f"h{number}.example" for number in range(1001))
    with pytest.raises(SandboxConfigError, match="bytes"):
        AllowList([f"{'h.' * 120}example{number}" for number in range(1000)])
    with pytest.raises(SandboxConfigError, match="bytes"):
        AllowList(["a" + "\u00ad" * 100_000 + ".example"])  # characters that names leave out


@pytest.mark.parametrize(
    ("address", "private", "accepted"),
    [
        ("93.184.216.34", False, True),
        ("2606:2800:220:1::1", False, True),
        ("10.1.2.3", False, False),
        ("10.1.2.3", True, True),
        ("fd00::1", True, True),
        ("100.64.0.1", False, False),
        ("127.0.0.1", True, False),
        ("::1", True, False),
        ("169.254.169.254", True, False),
        ("fe80::1", True, False),
        ("0.0.0.0", True, False),
        ("224.0.0.1", True, False),
        ("255.255.255.255", True, False),
        ("::ffff:127.0.0.1", True, False),
        ("2002:7f00:1::1", True, False),
        ("64:ff9b::a9fe:a9fe", True, False),
        ("64:ff9b::808:808", False, True),
        ("192.0.0.192", True, False),
        ("168.63.129.16", True, False),
        ("168.63.129.17", False, True),
        ("64:ff9b:1::808:808", True, False),
        ("fec0::1", True, False),
        ("::8.8.8.8", True, False),
        ("::127.0.0.1", True, False),
        ("::ffff:0:8.8.8.8", True, False),
        ("fd00:ec2::254", True, False),
        ("fd00:c1::a9fe:a9fe", True, False),
        ("fd00:42::42", True, False),
        ("fd20:ce::254", True, False),
        ("0.0.0.1", True, False),
        ("2606:2800:220:1:0:5efe:7f00:1", True, False),
        ("2606:2800:220:1:0:5efe:808:808", False, True),
        ("100.100.100.200", True, False),
        ("240.0.0.1", True, False),
    ],
)
def test_the_addresses_that_a_listed_name_may_resolve_to(address, private, accepted):
    assert (
        AllowList(["name.example"]).accepts_address(ip_address(normalize_host(address)), 80, private=private)
        is accepted
    )


@dataclass
class Upstream:
    """A server that records what it was sent and gives a scripted answer."""

    answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
    port: int = 0
    seen: list[bytes] = field(default_factory=list)

    async def handle(self, stream: SocketStream) -> None:
        async with stream:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await self._answer(stream)

    async def _answer(self, stream: SocketStream) -> None:
        self.seen.append(await stream.receive())
        await stream.send(self.answer)


@dataclass
class Names:
    """A resolver with scripted answers that records the questions."""

    known: dict[str, list[str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host not in self.known:
            raise OSError("no such name")
        return self.known[host]


@asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    server = Upstream()
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        server.port = listener.listeners[0].extra(SocketAttribute.local_port)
        tasks.start_soon(listener.serve, server.handle)
        yield server
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def serving(proxy: EgressProxy) -> AsyncIterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(proxy.serve, listening)
        yield listening.getsockname()[1]
        tasks.cancel_scope.cancel()


async def ask(port: int, request: str) -> bytes:
    """Send a request and return everything that arrives until the connection ends."""
    answer = b""
    async with await anyio.connect_tcp("127.0.0.1", port) as client:
        await client.send(request.encode("latin-1"))
        with anyio.fail_after(20):
            async for part in client:
                answer += part
    return answer


async def test_a_tunnel_carries_bytes_both_ways_and_counts_them():
    async with upstream() as server:
        names = Names({"data.example": ["127.0.0.1"]})
        proxy = EgressProxy("a", AllowList([f"data.example:{server.port}", f"127.0.0.1:{server.port}"]), resolve=names)
        async with serving(proxy) as port:
            answer = await ask(port, f"CONNECT DATA.example.:{server.port} HTTP/1.1\r\nHost: x\r\n\r\nearly")
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert rest == server.answer
    assert server.seen == [b"early"]
    assert (proxy.counts.connections, proxy.counts.allowed) == (1, 1)
    assert proxy.counts.bytes_out >= len(b"early")
    assert proxy.counts.bytes_in == len(server.answer)


async def test_a_plain_request_is_forwarded_without_proxy_headers():
    async with upstream() as server:
        proxy = EgressProxy("a", AllowList([f"127.0.0.1:{server.port}"]))
        async with serving(proxy) as port:
            answer = await ask(
                port,
                f"POST http://127.0.0.1:{server.port}/a?b=c#d HTTP/1.1\r\nHost: evil.example\r\nX-A: 1\r\n"
                "Proxy-Authorization: secret\r\nConnection: x-b\r\nX-B: 2\r\nContent-Length: 4\r\n\r\nbody",
            )
    assert answer == server.answer
    head, _, body = server.seen[0].partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert lines[0] == b"post /a?b=c http/1.1"
    assert set(lines[1:]) == {
        b"x-a: 1",
        b"content-length: 4",
        b"connection: close",
        f"host: 127.0.0.1:{server.port}".encode(),
    }
    assert body in {b"", b"body"}  # it may come in two parts


async def test_a_host_that_is_not_listed_is_refused_before_it_is_resolved():
    names = Names({"other.example": ["93.184.216.34"]})
    proxy = EgressProxy("a", AllowList(["good.example"]), resolve=names)
    async with serving(proxy) as port:
        tunnel = await ask(port, "CONNECT other.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        plain = await ask(port, "GET http://other.example/ HTTP/1.1\r\nHost: x\r\n\r\n")
        other_port = await ask(port, "CONNECT good.example:22 HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await ask(port, "HEAD http://other.example/ HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head == plain[: plain.index(b"\r\n\r\n") + 4]
    for answer in (tunnel, plain):
        assert answer.startswith(b"HTTP/1.1 403 host other.example is not in the environment's network list")
        assert b"x-egress-refused: host" in answer
        assert answer.endswith(b"to allow it\n")
    assert b"add good.example:22" in other_port
    assert names.asked == []
    assert proxy.counts.refused == {"host": 3, "port": 1}
    assert proxy.counts.allowed == 0


@pytest.mark.parametrize("address", ["169.254.169.254", "127.0.0.1", "::1", "10.0.0.1", "::ffff:10.0.0.1"])
async def test_a_listed_name_does_not_lead_to_the_host_or_its_network(address):
    proxy = EgressProxy("a", AllowList(["rebound.example"]), resolve=Names({"rebound.example": [address]}))
    async with serving(proxy) as port:
        answer = await ask(port, "CONNECT rebound.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403")
    assert b"is not public" in answer
    assert proxy.counts.refused == {"address": 1}


async def test_only_allowed_addresses_of_a_name_are_tried():
    async with upstream() as server:
        names = Names({"two.example": ["127.0.0.3", "127.0.0.1"]})
        allowed = AllowList([f"two.example:{server.port}", f"127.0.0.1:{server.port}"])
        async with serving(EgressProxy("a", allowed, resolve=names)) as port:
            answer = await ask(port, f"CONNECT two.example:{server.port} HTTP/1.1\r\nHost: x\r\n\r\nx")
    assert answer.endswith(server.answer)


async def test_a_slow_name_server_takes_a_part_of_the_lookups():
    under_way = 0

    async def resolve(host: str, port: int) -> Sequence[str]:
        nonlocal under_way
        under_way += 1
        await anyio.sleep_forever()

    proxy = EgressProxy("a", AllowList(["slow.example"]), resolve=resolve)
    async with serving(proxy) as port, anyio.create_task_group() as tasks:
        for _ in range(3 * LOOKUPS):
            tasks.start_soon(ask, port, "CONNECT slow.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: proxy.counts.connections == 3 * LOOKUPS and under_way >= LOOKUPS)
        await anyio.sleep(0.05)
        assert under_way == LOOKUPS
        tasks.cancel_scope.cancel()


async def test_unresolved_names_and_silent_hosts_are_different_refusals():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    proxy = EgressProxy("a", AllowList(["gone.example", f"127.0.0.1:{free}"]), resolve=Names())
    async with serving(proxy) as port:
        gone = await ask(port, "CONNECT gone.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        silent = await ask(port, f"CONNECT 127.0.0.1:{free} HTTP/1.1\r\nHost: x\r\n\r\n")
    assert gone.startswith(b"HTTP/1.1 502")
    assert b"has no address" in gone
    assert silent.startswith(b"HTTP/1.1 502")
    assert b"does not answer" in silent
    assert proxy.counts.refused == {"unresolved": 1, "unreachable": 1}


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        ("GET / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("GET https://good.example/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("CONNECT good.example HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("CONNECT 0x7f.1:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("GET http://user@/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("\x16\x03\x01 no http\r\n\r\n", 400),
        ("GET http://good.example/ HTTP/1.1\r\nHost: x\r\nA: " + "a" * (HEAD_BYTES + 1), 431),
    ],
)
async def test_malformed_requests_are_refused(request_text, status):
    proxy = EgressProxy("a", AllowList(["good.example"]), resolve=Names())
    async with serving(proxy) as port:
        answer = await ask(port, request_text)
    assert answer.startswith(b"HTTP/1.1 %d" % status)
    assert proxy.counts.refused == {"bad_request": 1}


async def test_silent_clients_are_disconnected():
    limits = ProxyLimits(head_seconds=0.2, idle_seconds=0.3)
    async with upstream() as server:
        proxy = EgressProxy("a", AllowList([f"127.0.0.1:{server.port}"]), limits=limits)
        async with serving(proxy) as port:
            assert (await ask(port, "GET http")).startswith(b"HTTP/1.1 408")
            idle = await ask(port, f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\nHost: x\r\n\r\n")
    assert idle.startswith(b"HTTP/1.1 200")


async def test_connections_are_bounded_and_the_next_waits():
    limits = ProxyLimits(connections=1)
    async with upstream() as server:
        proxy = EgressProxy("a", AllowList([f"127.0.0.1:{server.port}"]), limits=limits)
        request = f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\nHost: x\r\n\r\n"
        async with serving(proxy) as port:
            first = await anyio.connect_tcp("127.0.0.1", port)
            await first.send(request.encode())
            await first.receive()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, port, request + "x")
                await anyio.wait_all_tasks_blocked()
                assert proxy.counts.connections == 1
                await first.aclose()
    assert proxy.counts.connections == 2


async def test_many_connections_in_a_row_are_slowed_down():
    proxy = EgressProxy("a", AllowList([]))
    async with serving(proxy) as port:
        begun = time.monotonic()
        for _ in range(BURST + PER_SECOND // 2):
            await ask(port, "GET / HTTP/1.1\r\n\r\n")
    assert time.monotonic() - begun > 0.4, "half a second's connections beyond the burst"


async def test_a_reader_that_stops_holds_up_its_writer():
    async with upstream() as server:
        server.answer = b"x" * (64 * 1024 * 1024)
        proxy = EgressProxy("a", AllowList([f"127.0.0.1:{server.port}"]))
        async with serving(proxy) as port, await anyio.connect_tcp("127.0.0.1", port) as client:
            await client.send(f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\nHost: x\r\n\r\nx".encode())
            await client.receive(CHUNK_BYTES)
            before = -1
            with anyio.fail_after(20):
                while proxy.counts.bytes_in != before:
                    before = proxy.counts.bytes_in
                    await anyio.sleep(0.3)
            assert proxy.counts.bytes_in < len(server.answer) / 2


@pytest.mark.slow
async def test_the_process_of_the_proxies_serves_counts_and_ends():
    host = EgressHost()
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    async with upstream() as server:
        await host.open("a", AllowList([f"127.0.0.1:{server.port}"]), False, listening, OWNER)
        answer = await ask(port, f"GET http://127.0.0.1:{server.port}/ HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer == server.answer
        assert b"403" in await ask(port, "CONNECT no.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await host.counts()).allowed == 1
        counts = await host.close("a")
        assert (counts.allowed, counts.refused) == (1, {"host": 1})
        assert (await host.counts()).bytes_in == counts.bytes_in
        with pytest.raises(OSError):
            await anyio.connect_tcp("127.0.0.1", port)
    process = host.process
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(host.aclose)
            with pytest.raises(SandboxClosedError):
                await host.open("b", AllowList([]), False, socket.create_server(("127.0.0.1", 0)), OWNER)
    assert process.returncode is not None
    assert host.process is None


@pytest.mark.slow
async def test_a_killed_process_is_one_error_and_is_then_replaced():
    host = EgressHost()
    allowed = AllowList([])
    await host.open("a", allowed, False, socket.create_server(("127.0.0.1", 0)), OWNER)
    host.process.kill()
    host.process.wait()
    with pytest.raises(SandboxStartError):
        await host.open("b", allowed, False, socket.create_server(("127.0.0.1", 0)), OWNER)
    await host.open("c", allowed, False, socket.create_server(("127.0.0.1", 0)), OWNER)
    assert (await host.close("a")).connections == 0
    await host.aclose()


@pytest.mark.slow
async def test_a_process_without_descriptors_refuses_one_sandbox_and_serves_the_others():
    host, owner = EgressHost(), OWNER._replace(user=os.geteuid(), group=os.getegid())
    await host.open("a", AllowList([]), False, socket.create_server(("127.0.0.1", 0)), owner)
    used = psutil.Process(host.process.pid).num_fds()
    resource.prlimit(host.process.pid, resource.RLIMIT_NOFILE, (used, used))
    with pytest.raises(SandboxStartError, match="no descriptor left"):
        await host.open("b", AllowList([]), False, socket.create_server(("127.0.0.1", 0)), owner)
    await host.counts()
    assert (host.serves("a"), host.serves("b")) == (True, False)
    await host.aclose()


@pytest.mark.slow
async def test_the_process_is_marked_with_its_service_and_inherits_nothing_else(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret")
    host = EgressHost()
    await host.open("a", AllowList([]), False, socket.create_server(("127.0.0.1", 0)), OWNER)
    assert sandbox_of(host.process.pid) == f"{OWNER.service}-egress"
    environment = await anyio.Path(f"/proc/{host.process.pid}/environ").read_bytes()
    assert b"SOME_KEY" not in environment
    host.process.send_signal(signal.SIGSTOP)
    assert kill_processes(lambda mark: mark.startswith(f"{OWNER.service}-")) == 1
    assert host.process.wait(10) == -signal.SIGKILL
    await host.aclose()


class Counting(NamedProvider):
    """A provider whose sandboxes have made one more connection at every reading."""

    looked = 0

    async def egress_counts(self) -> EgressCounts:
        self.looked += 1
        return EgressCounts(self.looked, self.looked, 20, 30, {"host": 2})


async def test_counts_are_read_repeatedly_and_shown():
    provider, metrics = Counting(), Metrics()
    meter = EgressMeter(provider, seconds=0.01)
    metrics.watch_egress(lambda: meter.counts)
    assert b"rollout_egress_connections_total 0.0" in metrics.render()
    async with meter.running():
        await until(lambda: provider.looked >= 3, 10)
    shown = metrics.render()
    assert f"rollout_egress_connections_total {meter.counts.connections}.0".encode() in shown
    assert b'rollout_egress_bytes_total{direction="out"} 20.0' in shown
    assert b'rollout_egress_bytes_total{direction="in"} 30.0' in shown
    assert b'rollout_egress_refused_total{reason="host"} 2.0' in shown
