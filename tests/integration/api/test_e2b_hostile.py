"""E2B's API holds against programs and peers that mean harm: keys are apart, everything is bounded, nothing is left."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import e2b
import httpx
import psutil
import pytest
from e2b import Sandbox

from rollout_service.settings import Settings
from tests.support.e2b_service import KEY, OTHER_KEY, READ_KEY, e2b_service, options
from tests.support.processes.service import Running, eventually

pytestmark = [
    pytest.mark.apptainer,
    pytest.mark.extended("rollout_service/server/e2b/", "rollout_service/http/"),
    pytest.mark.slow,
    pytest.mark.xdist_group("e2b hostile"),
]
LIMIT = 2_000_000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    limits = f"max_sandboxes = 2\nmax_file_bytes = {LIMIT}\n[http]\nbody_seconds = 1.0\n"
    with e2b_service(tmp_path_factory.mktemp("e2b"), limits) as found:
        yield found


@pytest.fixture(scope="module")
def url(served) -> str:
    return served[1]


@pytest.fixture(scope="module")
def sandbox(url: str) -> Iterator[Sandbox]:
    with Sandbox.create("base", **options(url)) as found:
        yield found


@pytest.fixture
def inside(url: str, sandbox: Sandbox) -> Iterator[httpx.Client]:
    """Speak to the sandbox as its client does."""
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": sandbox._envd_access_token}
    with httpx.Client(base_url=url, headers=headers) as client:
        yield client


def test_a_key_reaches_only_its_own_sandboxes(url, sandbox):
    other = options(url, OTHER_KEY)
    assert Sandbox.list(**other).next_items() == []
    assert not Sandbox.kill(sandbox.sandbox_id, **other)
    for call in (Sandbox.connect, Sandbox.get_info, lambda name, **how: Sandbox.set_timeout(name, 1, **how)):
        with pytest.raises(e2b.NotFoundException):
            call(sandbox.sandbox_id, **other)
    with pytest.raises(e2b.SandboxException, match="role read"):
        Sandbox.create("base", **options(url, READ_KEY))
    with pytest.raises(e2b.SandboxException, match="role read"):
        Sandbox.list(**options(url, READ_KEY)).next_items()
    assert sandbox.is_running()


@pytest.mark.parametrize("token", ["", "wrong", KEY, "ü".encode().decode("latin-1")])
@pytest.mark.parametrize("path", ["/health", "/files?path=/etc/passwd", "/process.Process/List"])
def test_nothing_inside_is_reached_without_the_token(url, sandbox, token, path):
    headers = {b"E2b-Sandbox-Id": sandbox.sandbox_id.encode(), b"X-Access-Token": token.encode("latin-1")}
    method = "POST" if "Process" in path else "GET"
    answer = httpx.request(method, url + path, headers=headers | {b"X-API-KEY": KEY.encode()})
    assert answer.status_code == 401
    assert answer.json()["message"] == "the access token is not that of the sandbox"


def test_a_repeated_header_leads_to_no_other_sandbox(url, sandbox):
    with Sandbox.create("base", **options(url, OTHER_KEY)) as other:
        other.commands.run("echo hidden words >/tmp/secret")
        ids, token = (sandbox.sandbox_id, other.sandbox_id), ("X-Access-Token", sandbox._envd_access_token)
        for first, second in (ids, ids[::-1]):
            headers = [("E2b-Sandbox-Id", first), ("E2b-Sandbox-Id", second), token]
            found = httpx.get(f"{url}/files?path=/tmp/secret", headers=headers)
            stat = httpx.post(f"{url}/filesystem.Filesystem/Stat", headers=headers, json={"path": "/tmp/secret"})
            assert {found.status_code, stat.status_code} <= {401, 404}
            assert "hidden words" not in found.text


@pytest.mark.parametrize("name", ["", "..", "../x", "%2e%2e/%2e%2e", "a/b", "x" * 5_000, "\\..", "*"])
def test_an_id_is_no_path(url, inside, name):
    keyed = {"X-API-KEY": KEY}
    for path in (f"/sandboxes/{name}", f"/v2/sandboxes/{name}/connect", f"/sandboxes/{name}/timeout"):
        for method in ("GET", "DELETE", "POST"):
            assert httpx.request(method, url + path, headers=keyed, json=None).status_code in (400, 404, 405)
    assert inside.get("/health", headers={"E2b-Sandbox-Id": name}).status_code == 502


def test_files_named_by_path_are_those_inside(sandbox):
    sandbox.files.write("/../../../etc/../tmp/traversal", "in")
    assert sandbox.commands.run("cat /tmp/traversal").stdout == "in"
    sandbox.commands.run("ln -s /proc/1/root/etc/shadow /tmp/shadow")
    with pytest.raises(e2b.SandboxException):
        sandbox.files.read("/tmp/shadow")
    for path in ("-delete", "(", "$(touch run)", "a;touch run", "--help"):
        sandbox.files.write(path, path)
        assert sandbox.files.get_info(path).size == len(path)
        assert sandbox.files.rename(path, f"{path}2").name == f"{path}2"
        sandbox.files.remove(f"{path}2")
    assert not sandbox.files.exists("run")
    with pytest.raises(e2b.InvalidArgumentException):
        sandbox.files.get_info("a\0b")


def test_bodies_are_bounded(url, inside, sandbox):
    keyed = {"X-API-KEY": KEY}
    assert httpx.post(f"{url}/v2/sandboxes", headers=keyed, content=b"x" * 5_000_000).status_code == 413
    assert inside.post("/files?path=a", content=b"x" * (LIMIT + 1)).status_code == 413
    form = {"files": [("file", ("a", b"x" * (LIMIT // 2))), ("file", ("b", b"y" * LIMIT))]}
    assert inside.post("/files", files=form["files"]).status_code == 413
    assert not sandbox.files.exists("b")
    json_type = {"Content-Type": "application/json"}
    large = inside.post("/process.Process/List", content=b" " * 5_000_000, headers=json_type)
    assert large.status_code in (413, 429)
    sandbox.commands.run(f"head -c {LIMIT + 1} /dev/zero >/tmp/large")
    with pytest.raises((e2b.SandboxException, httpx.TransportError)):
        sandbox.files.read("/tmp/large", format="bytes")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"templateID": 1}',
        b'{"templateID": "base", "timeout": 0}',
        b'{"templateID": "base", "envVars": {"a\\u0000b": "c"}}',
        b'{"templateID": "base", "envVars": {"a": "b\\u0000"}}',
    ],
)
def test_a_creation_that_makes_no_sense_is_refused(url, body):
    answer = httpx.post(f"{url}/v2/sandboxes", headers={"X-API-KEY": KEY}, content=body)
    assert (answer.status_code, answer.json()["code"]) == (400, 400)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'--b\r\nContent-Disposition: form-data; filename=""\r\n\r\nx\r\n--b--',
        b'--b\r\nContent-Disposition: form-data; filename="formed"\r\n\r\nx',
        b"--b\r\n" + b"x" * 100_000,
    ],
)
def test_a_broken_form_is_refused(inside, sandbox, body):
    answer = inside.post("/files", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"})
    assert answer.status_code == 400
    assert not sandbox.files.exists("formed")


def test_a_slow_body_loses_its_connection(url, sandbox):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = f"POST /files?path=slow HTTP/1.1\r\nHost: {host}\r\nE2b-Sandbox-Id: {sandbox.sandbox_id}\r\n"
        head += f"X-Access-Token: {sandbox._envd_access_token}\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode())
        began, answer = time.monotonic(), b""
        while data := connection.recv(4_096):
            answer += data
        assert time.monotonic() - began < 8
        assert b"408" in answer
    assert not sandbox.files.exists("slow")


def test_other_ports_and_pages_of_other_sites_are_refused(url, inside):
    assert inside.get("/health", headers={"E2b-Sandbox-Port": "8000"}).status_code == 404
    evil = {"X-API-KEY": KEY, "Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
    assert httpx.post(f"{url}/v2/sandboxes", headers=evil, json={"templateID": "base"}).status_code == 403


def test_programs_take_no_more_than_their_places(url, sandbox):
    with Sandbox.create("base", **options(url, OTHER_KEY)):
        answer = httpx.post(f"{url}/v2/sandboxes", headers={"X-API-KEY": KEY}, json={"templateID": "base"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert "e2b.max_sandboxes" in answer.json()["message"]
    running = [sandbox.commands.run("sleep 100", background=True, timeout=0) for _ in range(128)]
    with pytest.raises(e2b.RateLimitException, match="128 commands"):
        sandbox.commands.run("true")
    for handle in running:
        handle.kill()
    eventually(lambda: not sandbox.commands.list())
    assert sandbox.commands.run("echo up").stdout == "up\n"


def test_a_client_that_goes_away_in_a_creation_or_a_command_leaves_nothing(url, served, sandbox):
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{url}/v2/sandboxes", headers={"X-API-KEY": OTHER_KEY}, json={"templateID": "base"}, timeout=0.01)
    eventually(lambda: not Sandbox.list(**options(url, OTHER_KEY)).next_items(), seconds=10)
    flood = sandbox.commands.run("yes", background=True)
    flood.disconnect()
    assert sandbox.commands.run("echo up").stdout == "up\n"
    assert flood.kill()


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_nothing_outlives_the_service(tmp_path, end):
    with e2b_service(tmp_path) as (service, url):
        sandbox = Sandbox.create("base", **options(url))
        marker = f"sleep 98{service.process.pid}"
        sandbox.commands.run(marker, background=True, timeout=0)

        def is_left() -> bool:
            found = psutil.process_iter(["cmdline"])
            return any(" ".join(one.info["cmdline"] or []) == marker for one in found)

        eventually(is_left)
        getattr(service.process, end)()
        service.ended(30)
        eventually(lambda: not is_left(), seconds=20)


def test_it_is_off_unless_it_is_asked_for_and_asks_for_keys():
    assert not Settings().e2b.enabled
    assert Settings().e2b.network == "none"
    with pytest.raises(ValueError, match="beyond loopback"):
        Settings(e2b={"enabled": True, "host": "0.0.0.0"})


def test_sandboxes_that_isolate_nothing_are_not_offered(tmp_path):
    command = [sys.executable, "-m", "rollout_service.cli", "serve", "--sandbox", "local", "--port", "0"]
    done = subprocess.run(
        [*command, "--engine", "none", "--state-dir", str(tmp_path)],
        env=os.environ | {"ROLLOUT_E2B__ENABLED": "true", "ROLLOUT_E2B__PORT": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    assert "needs sandboxes that isolate" in done.stdout + done.stderr
