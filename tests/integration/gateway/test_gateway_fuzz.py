"""Whatever a program sends in one of the four dialects, the service answers, stays reachable and keeps no memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gateway.recordings import NAMES, load
from tests.support.processes.service import Running, eventually, scripted_engine, service

pytestmark = [pytest.mark.xdist_group("gateway_fuzz"), pytest.mark.slow(seconds=60)]

MAX_BYTES = 8 * 1024 * 1024
MAX_HEALTH_SECONDS = 1.0
MAX_GROWTH_BYTES = 100 * 1024 * 1024
RECORDED = [(run.path, run.headers, json.dumps(run.body)) for name in NAMES for run in load(name)[-1:]]

SIZES = st.sampled_from([2, 33, 1_025, 10_001, 200_000])
SMALL = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just({}) | st.just([])
HUGE = st.sampled_from([10**6, 2**31, 2**63, 2**64, 10**400, -1, -(2**63), 0, 1e308, 0.5])
ODD_TEXTS = st.sampled_from(["\ud800", "\udfff a", "\x00", "<|im_end|>", "\r\n", "\u2028", "🙂"])


@dataclass
class Watch:
    """A thread that asks for `/health` all the time."""

    url: str
    slowest: float = 0.0
    problems: list[str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with httpx.Client(timeout=30) as http:
            while not self._ended.wait(0.05):
                started = time.monotonic()
                try:
                    answer = http.get(f"{self.url}/health")
                except httpx.HTTPError as error:
                    self.problems.append(repr(error))
                    continue
                self.slowest = max(self.slowest, time.monotonic() - started)
                if answer.status_code != 200:
                    self.problems.append(answer.text)

    def end(self) -> None:
        self._ended.set()


@dataclass(frozen=True)
class Gateway:
    server: Running
    http: httpx.Client
    watch: Watch

    def send(self, path: str, headers: dict[str, str], content: bytes) -> httpx.Response:
        kept = {name: value for name, value in headers.items() if name.lower() == "anthropic-version"}
        return self.http.post(
            path.removeprefix("/"), content=content, headers=kept | {"content-type": "application/json"}
        )

    def check(self) -> None:
        """Check that the service was reachable throughout, and has no defect in its log."""
        assert self.watch.problems == []
        assert self.watch.slowest < MAX_HEALTH_SECONDS
        assert "unhandled error" not in self.server.log


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("fuzz")
    with (
        scripted_engine(folder, "Hello.<|im_end|>", delay=0) as engine,
        service(folder, engine.url) as server,
    ):
        opened = httpx.post(f"{server.url}/v1/sessions", json={"train": True}, timeout=60).json()
        watch = Watch(server.url)
        thread = threading.Thread(target=watch.run)
        thread.start()
        headers = {"authorization": f"Bearer {opened['key']}"}
        with httpx.Client(base_url=f"{opened['url']}/", headers=headers, timeout=60) as http:
            yield Gateway(server, http, watch)
        watch.end()
        thread.join()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, one in inner for found in places(one, (*path, key)))]


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
    path, headers, recorded = draw(st.sampled_from(RECORDED))
    body = json.loads(recorded)
    for _ in range(draw(st.integers(1, 2))):
        place, holder = draw(st.sampled_from(places(body)[1:])), body
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = draw(values(holder[place[-1]]))
    content = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        content = content[: draw(st.integers(0, len(content)))]
    return path, headers, content[: 2 * MAX_BYTES]


@settings(max_examples=4 * settings().max_examples)
@given(requests())
def test_no_body_is_an_error_of_the_service(
    gateway: Gateway, request: tuple[str, dict[str, str], bytes]
) -> None:
    answer = gateway.send(*request)
    assert answer.status_code < 500, answer.text[:2_000]
    if answer.status_code != 200:
        assert "error" in answer.json()
    gateway.check()


def test_floods_of_one_kind_leave_no_memory(gateway: Gateway) -> None:
    process = psutil.Process(gateway.server.process.pid)
    for path, headers, recorded in RECORDED:
        gateway.send(path, headers, recorded.encode())
    before = process.memory_info().rss
    for path, headers, recorded in RECORDED:
        body = json.loads(recorded)
        for name in {"messages", "input", "contents", "tools"} & body.keys():
            many = [body[name][-1]] * fitting(body[name][-1], 100_000)
            answer = gateway.send(path, headers, json.dumps(body | {name: many}).encode())
            assert answer.status_code < 500, answer.text[:2_000]
    gateway.check()
    eventually(
        lambda: process.memory_info().rss <= before + MAX_GROWTH_BYTES, gateway.server.log_file, seconds=20
    )
