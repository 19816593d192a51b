"""Whatever a program sends in one of the four dialects, the service answers, stays reachable and keeps no memory."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gateway.recordings import NAMES, load, places
from tests.support.processes.service import Running, eventually, scripted_engine, service

pytestmark = pytest.mark.slow(seconds=60)

MAX_BYTES = 8 * 1024 * 1024
MAX_HEALTH_SECONDS = 1.0
MAX_GROWTH_BYTES = 100 * 1024 * 1024


RUNS = {run.path.partition("/models/")[0]: run for name in NAMES for run in load(name)[-1:]}
RECORDED = [(run.path, run.headers, json.dumps(run.body), places(run.body)[1:]) for run in RUNS.values()]
"""A request of each route, with the places of its values."""

SIZES = st.sampled_from([2, 33, 1_025, 10_001, 100_000])
SMALL = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just({}) | st.just([])
HUGE = st.sampled_from([10**6, 2**31, 2**63, 2**64, 10**400, -1, -(2**63), 0, 1e308, 0.5])
ODD_TEXTS = st.sampled_from(["\ud800", "\udfff a", "\x00", "<|im_end|>", "\r\n", "\u2028", "🙂"])


WATCH = """
import http.client, select, sys, time
host, slowest = sys.argv[1], 0.0
while not select.select([sys.stdin], [], [], 0.05)[0]:
    started, connection = time.monotonic(), http.client.HTTPConnection(host, timeout=30)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()
    slowest = max(slowest, time.monotonic() - started)
print(slowest)
"""
"""Asks for `/health` until its input ends, in a process of its own; the test itself is busy making bodies."""


@contextmanager
def reachable(server: Running) -> Iterator[None]:
    """Check that the service answers within a second throughout the block, and has no defect in its log."""
    command = [sys.executable, "-c", WATCH, server.url.removeprefix("http://")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watch:
        try:
            yield
        finally:
            slowest, _ = watch.communicate()
    assert float(slowest) < MAX_HEALTH_SECONDS
    assert "unhandled error" not in server.log


@dataclass(frozen=True)
class Gateway:
    server: Running
    http: httpx.Client

    def send(self, path: str, headers: dict[str, str], content: bytes) -> httpx.Response:
        kept = {name: value for name, value in headers.items() if name.lower() == "anthropic-version"}
        return self.http.post(
            path.removeprefix("/"), content=content, headers=kept | {"content-type": "application/json"}
        )


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("fuzz")
    with (
        scripted_engine(folder, "Hello.<|im_end|>", delay=0) as engine,
        service(folder, engine.url) as server,
    ):
        eventually(lambda: "backend registered" in server.log, server.log_file)
        opened = httpx.post(f"{server.url}/v1/sessions", json={"train": True}, timeout=60).json()
        headers = {"authorization": f"Bearer {opened['key']}"}
        with httpx.Client(base_url=f"{opened['url']}/", headers=headers, timeout=60) as http:
            yield Gateway(server, http)


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


@st.composite
def values(draw: st.DrawFn, old: Any) -> Any:
    """Draw what stands in the place of a value: odd, huge, deep, or many of the same."""
    match draw(st.sampled_from(["small", "huge", "odd", "deep", "long", "many", "names"])):
        case "small":
            return draw(SMALL)
        case "huge":
            return draw(HUGE)
        case "odd":
            return draw(ODD_TEXTS)
        case "deep":
            return nested(draw(SMALL), draw(st.sampled_from([50, 400])))
        case "long":
            return draw(ODD_TEXTS) * draw(SIZES)
        case "names":
            return {f"{number}": old for number in range(fitting(old, draw(SIZES)))}
        case _:
            return [old] * fitting(old, draw(SIZES))


def fitting(value: Any, count: int) -> int:
    """Return how many of a value fit into the largest body, up to `count`."""
    return max(1, min(count, MAX_BYTES // (len(json.dumps(value)) + 12)))


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, str], bytes]:
    path, headers, recorded, inside = draw(st.sampled_from(RECORDED))
    body = json.loads(recorded)
    for _ in range(draw(st.integers(1, 2))):
        place, holder = draw(st.sampled_from(inside)), body
        with suppress(LookupError, TypeError):  # where the first value was put, the second may have no place
            for key in place[:-1]:
                holder = holder[key]
            old = holder[place[-1]]
            holder[place[-1]] = draw(values(old))
    content = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        content = content[: draw(st.integers(0, len(content)))]
    return path, headers, content[: 2 * MAX_BYTES]


def test_no_body_is_an_error_of_the_service(gateway):
    @settings(max_examples=3 * settings().max_examples)
    @given(requests())
    def try_body(request: tuple[str, dict[str, str], bytes]) -> None:
        answer = gateway.send(*request)
        assert answer.status_code < 500, answer.text[:2_000]
        if answer.status_code != 200:
            assert "error" in answer.json()

    with reachable(gateway.server):
        try_body()


def test_floods_of_one_kind_leave_no_memory(gateway):
    process = psutil.Process(gateway.server.process.pid)
    for path, headers, recorded, _ in RECORDED:
        gateway.send(path, headers, recorded.encode())
    before = process.memory_info().rss
    with reachable(gateway.server):
        for path, headers, recorded, _ in RECORDED:
            body = json.loads(recorded)
            for name in {"messages", "input", "contents", "tools"} & body.keys():
                many = [body[name][-1]] * fitting(body[name][-1], 100_000)
                answer = gateway.send(path, headers, json.dumps(body | {name: many}).encode())
                assert answer.status_code < 500, answer.text[:2_000]
    eventually(lambda: process.memory_info().rss <= before + MAX_GROWTH_BYTES, gateway.server.log_file, seconds=20)
