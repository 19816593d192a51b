"""A sandbox reaches its own loopback, the hosts on its list, and nothing else, as seen from inside.

When root runs these tests, an ordinary user runs them once more.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import psutil
import pytest

from sandboxes import (
    ApptainerConfig,
    Sandbox,
    SandboxConfigError,
    SandboxLostError,
    SandboxSpec,
    SandboxStartError,
    make_provider,
)
from sandboxes.contract import LISTENER_ADDRESS
from sandboxes.host.children import wait_exit
from tests.support.processes.children import killed
from tests.support.users.as_user import ordinary_user
from tests.support.waiting import until
from tests.support.web_server import web_server

pytestmark = pytest.mark.apptainer
MIB = 1024**2

GET = """
import json, sys, urllib.request
try:
    with urllib.request.urlopen(sys.argv[1], timeout=20) as answer:
        print(json.dumps([answer.status, answer.read().decode()]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
except OSError as error:
    print(json.dumps([0, str(error)]))
"""

CONNECT = """
import json, socket, sys
family, kind, address = json.loads(sys.argv[1])
if isinstance(address, list):
    address = tuple(address)
with socket.socket(family, kind) as client:
    client.settimeout(5)
    try:
        client.connect(address)
        client.send(b"out")
        print("out")
    except OSError as error:
        print(type(error).__name__, error)
"""

LOOPBACK = """
import socket, threading
for family, name in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET, "localhost")):
    server = socket.create_server((name, 0), family=family)
    with socket.create_connection((name, server.getsockname()[1]), timeout=5) as client:
        server.accept()[0].sendall(b"ok")
        print(client.recv(2).decode(), end=" ")
"""


@pytest.fixture
def hello() -> Iterator[str]:
    """Yield the address of an HTTP server on the host's loopback."""
    with web_server(lambda _: (200, {}, b"hello")) as address:
        yield address


async def python(sandbox: Sandbox, code: str, *arguments: str) -> str:
    result = await sandbox.exec(["python3", "-c", code, *arguments])
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


async def get(sandbox: Sandbox, url: str) -> tuple[int, str]:
    status, text = json.loads(await python(sandbox, GET, url))
    return status, text


async def connect(sandbox: Sandbox, family: int, kind: int, address: object) -> str:
    return await python(sandbox, CONNECT, json.dumps([int(family), int(kind), address]))


def host_addresses() -> list[str]:
    """Return every IPv4 address of this host."""
    found = psutil.net_if_addrs().values()
    return [one.address for entries in found for one in entries if one.family == socket.AF_INET]


async def test_the_loopback_works_and_is_the_only_network(provider):
    async with await provider.start(SandboxSpec()) as sandbox:
        assert await python(sandbox, LOOPBACK) == "ok ok ok"
        result = await sandbox.exec(["bash", "-c", "ls /sys/class/net; tail -n +2 /proc/net/route; ls /sys/fs/cgroup"])
        assert result.stdout.split() in ([b"lo"], [b"bonding_masters", b"lo"]), result


@pytest.mark.parametrize("network", ["none", ("192.0.2.1",)], ids=["none", "list"])
async def test_nothing_of_the_host_is_reached(provider, network):
    name = f"\0rollout-test-{os.getpid()}"
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        udp.bind(("0.0.0.0", 0))
        udp.setblocking(False)
        abstract.bind(name)
        abstract.listen()
        async with await provider.start(SandboxSpec(network=network)) as sandbox:
            for address in host_addresses():
                there = [address, tcp.getsockname()[1]]
                assert await connect(sandbox, socket.AF_INET, socket.SOCK_STREAM, there) != "out", address
                await connect(sandbox, socket.AF_INET, socket.SOCK_DGRAM, [address, udp.getsockname()[1]])
            assert "refused" in (await connect(sandbox, socket.AF_UNIX, socket.SOCK_STREAM, name)).lower()
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                assert await connect(sandbox, socket.AF_INET, kind, ["192.0.2.1", 53]) != "out"
        with pytest.raises(BlockingIOError):
            udp.recv(10)


async def test_a_list_admits_the_hosts_it_names_and_explains_refusals(provider, hello):
    with socket.create_server(("127.0.0.1", 0)) as other:
        unlisted = f"127.0.0.1:{other.getsockname()[1]}"
        async with await provider.start(SandboxSpec(network=(hello, "*.example.org"))) as sandbox:
            # 127.0.0.1 is in NO_PROXY, since inside it means the sandbox itself: use the proxy explicitly.
            asked = GET.replace("urllib.request.urlopen", "opener.open").replace(
                "try:", "opener = urllib.request.build_opener(Proxy)\ntry:", 1
            )
            code = (
                "import urllib.request, urllib.error\n"
                "class Proxy(urllib.request.ProxyHandler):\n"
                "    def proxy_open(self, request, proxy, kind):\n"
                "        request.set_proxy('127.0.0.1:3128', 'http')\n" + asked
            )
            assert json.loads(await python(sandbox, code, f"http://{hello}/")) == [200, "hello"]
            status, text = json.loads(await python(sandbox, code, f"http://{unlisted}/"))
            assert status == 403
            assert "port" in text
            assert "not in the environment's network list" in text
            status, text = await get(sandbox, "http://example.net/")
            assert (status, "host example.net is not in" in text) == (403, True)
            status, text = await get(sandbox, "https://example.net/")
            assert (status, "403 host example.net is not in" in text) == (0, True)
            counts = await provider.egress_counts()
            assert counts.allowed == 1
            assert counts.refused == {"port": 1, "host": 2}
    assert (await provider.egress_counts()).refused == counts.refused


async def test_a_sandbox_whose_proxy_has_ended_is_lost_and_not_the_agents_failure(provider):
    spec = SandboxSpec(network=("example.org",))
    async with await provider.start(spec) as sandbox:
        assert sandbox.healthy
        provider.egress.process.kill()
        await wait_exit(provider.egress.process, 10)
        with pytest.raises(SandboxLostError, match=r"the proxy of sandbox .* has ended"):
            await sandbox.bash()
        with pytest.raises(SandboxStartError, match="does not answer"):
            await provider.start(spec)
        async with await provider.start(spec) as other:
            assert (await get(other, "http://example.net/"))[0] == 403
            assert (other.healthy, sandbox.healthy) == (True, False), "the new process has only the other's proxy"


async def test_a_sandbox_with_a_proxy_reaches_its_owner_too(provider):
    async with await provider.start(SandboxSpec(network=("example.org",), listens=True)) as sandbox:
        assert sandbox.listener.getsockname() == LISTENER_ADDRESS
        there = [LISTENER_ADDRESS[0], LISTENER_ADDRESS[1]]
        assert await connect(sandbox, socket.AF_INET, socket.SOCK_STREAM, there) == "out"
        assert (await get(sandbox, "http://example.net/"))[0] == 403
    assert sandbox.listener.fileno() == -1


async def test_every_session_finds_the_proxy(provider, hello):
    async with await provider.start(SandboxSpec(network=(hello,))) as sandbox:
        proxy = "http://127.0.0.1:3128"
        bash = await (await sandbox.bash()).run("echo $http_proxy $HTTPS_PROXY $ALL_PROXY $NO_PROXY")
        assert bash.output == f"{proxy} {proxy} {proxy} localhost,127.0.0.1,::1\n"
        cell = await (await sandbox.python()).execute("import os; os.environ['https_proxy']")
        assert cell.result == repr(proxy)
        assert proxy.encode() in (await sandbox.exec(["env"])).stdout
        await sandbox.end_processes()
        assert (await get(sandbox, "http://example.net/"))[0] == 403


async def test_a_list_applies_to_its_own_sandbox_only(provider):
    first, second = SandboxSpec(network=("one.example",)), SandboxSpec(network=("two.example",))
    async with (
        await provider.start(first) as one,
        await provider.start(second) as two,
        await provider.start(SandboxSpec()) as none,
    ):
        there = ["127.0.0.1", 3128]
        assert await connect(one, socket.AF_INET, socket.SOCK_STREAM, there) == "out"
        assert await connect(none, socket.AF_INET, socket.SOCK_STREAM, there) != "out"
        assert "one.example is not in" in (await get(two, "http://one.example/"))[1]
        assert "two.example is not in" in (await get(one, "http://two.example/"))[1]


async def test_code_inside_makes_no_namespace_and_has_no_right(provider):
    for network in ("none", "full", ("one.example",)):
        async with await provider.start(SandboxSpec(network=network)) as sandbox:
            for flag in ("--user", "--net", "--mount", "--map-root-user"):
                assert (await sandbox.exec(["unshare", flag, "true"])).exit_code != 0, (network, flag)
            status = await sandbox.exec(["grep", "-E", "^Cap(Inh|Prm|Eff|Bnd|Amb)", "/proc/self/status"])
            assert {int(line.split()[1], 16) for line in status.stdout.splitlines()} == {0}
            for path in ("/sys/kernel/x", "/sys/fs/cgroup/x", "/proc/sys/user/max_user_namespaces"):
                assert (await sandbox.exec(["bash", "-c", 'echo 9 >"$1"', "-", path])).exit_code != 0


async def test_the_disk_is_limited_as_a_whole(provider):
    assert "disk" in provider.enforced
    async with await provider.start(SandboxSpec(disk_bytes=16 * MIB)) as sandbox:
        bash = await sandbox.bash()
        many = await bash.run("for n in {1..100}; do head -c 1M /dev/zero >/tmp/f$n || break; done; echo $n")
        assert "No space left" in many.output
        assert int(many.output.split()[-1]) <= 17
        await bash.run("rm /tmp/f*")
        empty = await bash.run("mkdir d && cd d && touch {1..9000}; cd ..; rm -rf d")
        assert "No space left" in empty.output
        assert (await bash.run("head -c 1M /dev/zero >/dev/shm/x && echo ok; rm /dev/shm/x")).output == "ok\n"
        shared = await bash.run("head -c 32M /dev/zero >/dev/shm/x; rm /dev/shm/x")
        assert "No space left" in shared.output
        await sandbox.write_file("small", "fits")


async def test_fewer_limits_are_promised_without_own_namespaces(provider):
    provider.launcher.__dict__["namespaces"] = False  # as on a host that allows them only to Apptainer
    async with await provider.start(SandboxSpec()) as sandbox:
        assert await python(sandbox, LOOPBACK) == "ok ok ok"
        assert await connect(sandbox, socket.AF_INET, socket.SOCK_DGRAM, ["192.0.2.1", 53]) != "out"
    with pytest.raises(SandboxConfigError) as error:
        await provider.start(SandboxSpec(network=("one.example",)))
    assert "user namespaces" in error.value.hint
    assert ("disk" in provider.enforced) == (os.geteuid() == 0)


async def test_an_invalid_list_is_refused_at_once(provider):
    with pytest.raises(SandboxConfigError, match=r"https://one\.example"):
        await provider.start(SandboxSpec(network=("https://one.example",)))
    with pytest.raises(SandboxConfigError, match="internet"):
        await provider.start(SandboxSpec(network="internet"))  # type: ignore[arg-type]


async def test_a_run_folder_that_the_sandboxes_user_cannot_enter_is_named(tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rs-") as closed:  # accessible only to its owner
        provider = make_provider(ApptainerConfig(run_dir=Path(closed) / "run"), tmp_path)
        try:
            if os.geteuid() != 0:
                async with await provider.start(SandboxSpec()) as sandbox:
                    assert (await sandbox.exec(["true"])).exit_code == 0
            else:
                with pytest.raises(SandboxConfigError, match=closed) as error:
                    await provider.start(SandboxSpec())
                assert "chmod o+x" in error.value.hint
        finally:
            await provider.close()


OWNER = """
import sys, anyio
from pathlib import Path
from sandboxes import ApptainerConfig, SandboxSpec, make_provider

async def main():
    provider = make_provider(ApptainerConfig(), Path(sys.argv[1]))
    sandbox = await provider.start(SandboxSpec(network=("one.example",)))
    print(provider.egress.process.pid, sandbox.info.pid, flush=True)
    await anyio.sleep_forever()

anyio.run(main)
"""


async def test_the_proxies_end_with_a_service_that_was_killed(tmp_path):
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    process = subprocess.Popen(  # noqa: ASYNC220  it takes no time
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with killed(process):
        pids = [int(word) for word in (await anyio.to_thread.run_sync(process.stdout.readline)).split()]
        started = [psutil.Process(pid) for pid in pids]
    await until(lambda: not (any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in started)), 5)
    assert len(started) == 2


@pytest.mark.timeout(600)
async def test_all_of_this_holds_for_an_ordinary_user():
    with ordinary_user() as user:
        file = str(Path(__file__).relative_to(Path.cwd()))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-k", "not ordinary_user", file]
        done = await anyio.to_thread.run_sync(lambda: user.run(command, timeout=500))
    assert done.returncode == 0, done.stdout
