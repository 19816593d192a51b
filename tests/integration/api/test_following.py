"""Streams of a real server: the overview and events, filtered, resumed, shared and left."""

import itertools
import json
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from api_schemas.errors import Problem
from api_schemas.events import Event
from api_schemas.views.overview import Overview
from tests.support.processes.service import Running, eventually, scripted_engine, service

CONFIG = """
[sandboxes.pressure]
enabled = false
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("service")
    with (
        scripted_engine(folder, delay=0) as engine,
        service(folder, engine.url, CONFIG, "--log-level", "debug") as started,
    ):
        yield started


@pytest.fixture
def api(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def order(api: httpx.Client, rollout_id: str, *, wait: float = 60) -> dict[str, Any]:
    task = {"environment": "echo", "instance": {"number": 1}}
    answer = api.post("/v1/rollouts", params={"wait": wait}, json={"task": task, "rollout_id": rollout_id})
    answer.raise_for_status()
    body: dict[str, Any] = answer.json()
    return body


def events_until(api: httpx.Client, last: str, **query: Any) -> list[Event]:
    """Read events until one about the subject `last` ends it."""
    events = []
    with api.stream("GET", "/v1/events", params=query, timeout=30) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(Event.model_validate_json(line.removeprefix("data: ")))
                if events[-1].subject == last and events[-1].data.get("state") == "completed":
                    return events
    pytest.fail("the stream ended early")


def test_the_overview_counts_what_happened(server, api):
    for number in range(3):
        assert order(api, f"counted-{number}")["state"] == "completed"

    def look() -> Overview:
        return Overview.model_validate_json(api.get("/v1/overview").content)

    eventually(lambda: look().outcomes.get("completed", 0) >= 3, server.log_file)
    overview = look()
    assert overview.outcomes["completed"] >= 3
    assert overview.counts["completed"] >= 3
    ended = sum(overview.outcomes.values())
    assert overview.success_share == pytest.approx(overview.outcomes["completed"] / ended, abs=1e-4)
    assert overview.ready
    assert overview.role == "admin"
    assert 0 < overview.last_event <= api_last_event(api)
    (backend,) = (one for one in overview.backends if one.p50_seconds is not None)
    assert backend.requests_per_second > 0
    assert [stage.stage for stage in overview.stages] == ["init", "rollout", "evaluate"]
    assert overview.nodes[0].node == overview.node


def api_last_event(api: httpx.Client) -> int:
    with api.stream("GET", "/v1/events") as response:
        return int(next(response.iter_lines()).removeprefix("id: "))


def test_a_failure_is_shown_with_its_cause(server, api):
    task = {"environment": "echo", "instance": {"number": 1}}
    body = {"task": task, "rollout_id": "broken", "limits": {"rollout_seconds": 0.0001}}
    failed = api.post("/v1/rollouts", params={"wait": 60}, json=body).json()
    assert failed["state"] == "failed", failed
    code = failed["error"]["code"]

    def look() -> dict[str, Any]:
        return {group["code"]: group for group in api.get("/v1/overview").json()["errors"]}

    eventually(lambda: code in look(), server.log_file)
    groups = look()
    assert groups[code]["rollouts"] == ["broken"]
    assert groups[code]["message"] == failed["error"]["message"]
    assert groups[code]["stage"] == failed["error"]["stage"]


def test_what_limits_the_throughput_is_named(server, api):
    def limit() -> str | None:
        found = Overview.model_validate_json(api.get("/v1/overview").content).bottleneck
        return None if found is None else found.kind

    api.post("/v1/pause", json={"pool": "policy"}).raise_for_status()
    try:
        for number in range(3):
            order(api, f"held-{number}", wait=0)
        eventually(lambda: limit() == "pause", server.log_file)
    finally:
        api.post("/v1/resume", json={"pool": "policy"}).raise_for_status()
    for number in range(3):
        order(api, f"held-{number}")
    eventually(lambda: limit() is None, server.log_file)


def test_the_overview_comes_once_a_second_to_each_of_ten_readers(api, server):
    seen: list[list[str]] = []

    def read() -> None:
        with httpx.stream("GET", f"{server.url}/v1/overview/stream", timeout=30) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            data = []
            for line in response.iter_lines():
                if line.startswith("data: "):
                    data.append(line)
                if len(data) == 3:
                    break
            seen.append(data)

    threads = [threading.Thread(target=read) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(seen) == 10, server.log[-4_000:]
    times = [Overview.model_validate_json(line.removeprefix("data: ")).at for line in seen[0]]
    gaps = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(times)]
    assert all(gap >= 0.99 for gap in gaps), "once a second at most"
    different = {line for data in seen for line in data}
    assert len(different) <= 6, "readers share what is sent, however they started"


def test_events_are_chosen_by_kind(api):
    before = api_last_event(api)
    order(api, "chosen-1")
    api.post("/v1/pause").raise_for_status()
    api.post("/v1/resume").raise_for_status()
    order(api, "chosen-2")
    every = events_until(api, "chosen-2", after=before)
    pools = [event for event in every if event.kind.startswith("pool.")]
    assert [event.kind for event in pools] == ["pool.paused", "pool.resumed"]
    rollouts = events_until(api, "chosen-2", after=before, kind="rollout.")
    assert rollouts == [event for event in every if event.kind.startswith("rollout.")]
    both = events_until(api, "chosen-2", after=before, kind=["rollout.state", "pool.paused"])
    assert both == [event for event in every if event.kind in ("rollout.state", "pool.paused")]


def test_events_are_chosen_by_subject(api):
    order(api, "one-of-many")
    order(api, "another")
    events = events_until(api, "one-of-many", after=0, subject="one-of-many")
    assert {event.subject for event in events} == {"one-of-many"}
    assert [event.data["state"] for event in events][-1] == "completed"
    resumed = events_until(api, "one-of-many", after=events[1].event_id, subject="one-of-many")
    assert resumed == events[2:]


@pytest.mark.parametrize("query", [{}, {"kind": "rollout."}, {"kind": "node.dead"}])
def test_past_events_end_with_the_newest(api, query):
    order(api, "past")
    newest = api_last_event(api)
    sent = api.get("/v1/events", params={"after": 0, "follow": "false", **query}, timeout=30).text
    ids = [int(line.removeprefix("id: ")) for line in sent.splitlines() if line.startswith("id: ")]
    assert ids == sorted(ids)
    assert ids[0] == 0
    assert ids[-1] >= newest
    kinds = [line.removeprefix("event: ") for line in sent.splitlines() if line.startswith("event: ")]
    assert len(kinds) >= 3 or query.get("kind") == "node.dead"
    assert all(kind.startswith(query.get("kind", "")) for kind in kinds)


def test_past_events_after_the_newest_are_none(api):
    newest = api_last_event(api) + 1_000
    sent = api.get("/v1/events", params={"after": newest, "follow": "false"}, timeout=30).text
    ids = [int(line.removeprefix("id: ")) for line in sent.splitlines() if line]
    assert ids[0] == newest
    assert ids[-1] < newest


def test_an_unknown_kind_of_event_is_refused_with_a_suggestion(api):
    answer = api.get("/v1/events", params={"kind": "rollout.sate"})
    problem = Problem.model_validate_json(answer.content)
    assert answer.status_code == 422
    assert [field.path for field in problem.errors] == ["query.kind"]
    assert "did you mean rollout.state?" in problem.detail


def test_a_backend_that_joins_is_an_event(api):
    with api.stream("GET", "/v1/events", params={"after": 0, "kind": "backend.state"}, timeout=30) as response:
        line = next(line for line in response.iter_lines() if line.startswith("data: "))
    event = json.loads(line.removeprefix("data: "))
    assert event["data"]["state"] == "ready"
    assert event["data"]["was"] is None


@pytest.mark.parametrize("path", ["/v1/events?after=0", "/v1/events?after=0&kind=rollout.", "/v1/overview/stream"])
@pytest.mark.parametrize("is_reset", [True, False])
def test_readers_that_leave_while_events_are_written_are_no_error(server, api, path, is_reset):
    before = len(server.log)
    writing = threading.Event()

    def write() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            number = 0
            while not writing.is_set():
                number += 1
                task = {"environment": "echo", "instance": {"number": number}}
                client.post("/v1/rollouts", json={"task": task}, timeout=60).raise_for_status()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for amount in (16, 400, 4_000, 16_000) * 3:
            leave(server.url, path, amount if "events" in path else min(amount, 3_000), reset=is_reset)
    finally:
        writing.set()
        writer.join(60)
    name = path.partition("?")[0]
    eventually(lambda: server.log[before:].count(f" path={name} ") >= 12, server.log_file)
    # On a busy machine, the start of a process may hold up the event loop.
    said = "\n".join(line for line in server.log[before:].splitlines() if "hangs.heartbeat" not in line)
    assert "Traceback" not in said
    assert "[error" not in said
    assert "[warning" not in said
    api.post("/v1/abort", json={}).raise_for_status()


def leave(url: str, path: str, amount: int, *, reset: bool) -> None:
    """Read this many bytes of a stream, and leave."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
        got = 0
        while got < amount:
            part = connection.recv(4_096)
            assert part, "the stream ended early"
            got += len(part)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_trajectory_is_read_in_ranges_with_its_text(api):
    order(api, "to-look-at")
    trajectory = api.get("/v1/rollouts/to-look-at/trajectory").json()
    outline = api.get("/v1/rollouts/to-look-at/outline").json()
    assert outline["has_text"]
    assert [each["tokens"] for each in outline["segments"]] == [
        len(each["token_ids"]) for each in trajectory["segments"]
    ]
    assert [turn["turn"] for turn in outline["segments"][0]["turns"]] == [0]
    ids, text = trajectory["segments"][0]["token_ids"], ""
    for start in range(0, len(ids), 100):
        query = {"segment": 0, "start": start, "count": 100}
        part = api.get("/v1/rollouts/to-look-at/tokens", params=query).json()
        assert part["ids"] == ids[start : start + 100]
        text += part["text"]
    assert "Say 1." in text
    assert "echo hello" in text


@pytest.mark.parametrize(
    ("path", "status", "field"),
    [
        ("/v1/rollouts/nobody/outline", 404, None),
        ("/v1/rollouts/nobody/tokens", 404, None),
        ("/v1/rollouts/looked-at/tokens?segment=7", 422, "query.segment"),
        ("/v1/rollouts/looked-at/tokens?count=20001", 422, "query.count"),
        ("/v1/rollouts/looked-at/tokens?start=-1", 422, "query.start"),
        ("/v1/rollouts/looked-at/outline?node=3", 404, None),
        ("/v1/rollouts/looked-at/tokens?node=0", 422, "query.node"),
    ],
)
def test_what_cannot_be_shown_is_refused(api, path, status, field):
    order(api, "looked-at")
    answer = api.get(path)
    assert answer.status_code == status, answer.text
    problem = Problem.model_validate_json(answer.content)
    assert [each.path for each in problem.errors] == ([field] if field else [])


def test_large_answers_are_compressed_for_those_who_accept_it(api):
    order(api, "large")
    path = "/v1/rollouts/large/tokens"
    plain = api.get(path, headers={"Accept-Encoding": "identity"})
    packed = api.get(path, headers={"Accept-Encoding": "br, gzip;q=0.5"})
    refused = api.get(path, headers={"Accept-Encoding": "gzip;q=0"})
    assert "content-encoding" not in plain.headers
    assert packed.json() == plain.json() == refused.json()
    large = len(plain.content) >= 4_096
    assert packed.headers.get("content-encoding") == ("gzip" if large else None)
    assert "content-encoding" not in refused.headers


def test_a_reader_whose_key_is_taken_away_gets_no_more_events(tmp_path):
    keys = tmp_path / "keys.toml"
    one = '[[keys]]\nname = "{0}"\nrole = "{0}"\nkey = "{0}-key-of-enough-characters"\n'
    headers = {role: {"Authorization": f"Bearer {role}-key-of-enough-characters"} for role in ("read", "submit")}
    keys.write_text(one.format("read") + one.format("submit"))
    task = {"environment": "echo", "instance": {"number": 1}}
    with (
        scripted_engine(tmp_path, delay=0) as engine,
        service(tmp_path, engine.url, CONFIG, "--keys-file", str(keys)) as server,
        httpx.stream("GET", f"{server.url}/v1/events", headers=headers["read"], timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith("id: ")
        keys.write_text(one.format("submit"))
        server.process.send_signal(signal.SIGHUP)
        runs = f"{server.url}/v1/runs"
        eventually(lambda: httpx.get(runs, headers=headers["read"]).status_code == 401, server)
        httpx.post(
            f"{server.url}/v1/rollouts?wait=60", headers=headers["submit"], json={"task": task}, timeout=60
        ).raise_for_status()
        assert not [line for line in lines if line.startswith("data:")]
