"""When a caller hangs up, no warning, error or traceback is logged, and nothing is leased to it."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import aclosing
from urllib.parse import urlsplit

import anyio
import httpx
import pytest

from api_schemas.events import Event
from api_schemas.rollouts import RolloutRequest
from api_schemas.tasks import Task
from rollout_client.client import RolloutClient
from tests.support.processes.relay import relay_to
from tests.support.processes.service import Running, eventually, scripted_engine, service

pytestmark = pytest.mark.slow(seconds=90)

HANG_UPS = 20
CONFIG = "[sandboxes.pressure]\nenabled = false\n"
RUN = {
    "run_id": "run",
    "source": {
        "kind": "inline",
        "tasks": [{"environment": "echo", "instance": {"number": number}} for number in range(4)],
    },
    "group_size": 2,
    "batch_size": 1,
    "filters": [],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("service")
    with (
        scripted_engine(folder, delay=0) as engine,
        service(folder, engine.url, CONFIG, "--log-level", "debug") as started,
    ):
        httpx.post(f"{started.url}/v1/runs", json=RUN).raise_for_status()
        run = lambda: httpx.get(f"{started.url}/v1/runs/run").json()  # noqa: E731
        eventually(lambda: sum(run()["counts"].get(name, 0) for name in ("ready", "batched")) == 4, started.log_file)
        yield started


def hang_up(url: str, request: str) -> bytes:
    """Send a request, reset the connection after the first bytes of the response, and return those bytes."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        head = f"{request} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        body = "{}" if request.startswith("POST") else ""
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        start = connection.recv(64)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return start


@pytest.mark.parametrize(
    "request_line",
    [
        "GET /v1/runs/run/export",
        "POST /v1/runs/run/lease?timeout=5&seconds=0.01",
        "POST /v1/runs/run/rescore",
        "GET /v1/environments/calc/dataset?limit=10000",
    ],
)
def test_hanging_up_is_not_an_error(server, request_line):
    before = len(server.log)
    for _ in range(HANG_UPS):
        assert hang_up(server.url, request_line).startswith(b"HTTP/1.1 20")
    path = request_line.split()[1].partition("?")[0]
    eventually(lambda: server.log[before:].count(f" path={path} ") >= HANG_UPS, server.log_file)
    said = server.log[before:]
    assert "Traceback" not in said
    assert "[error" not in said
    assert "[warning" not in said


@pytest.mark.parametrize("end", ["reset", "closed"])
def test_nothing_is_leased_to_a_caller_that_is_gone(server, end):
    run = f"/v1/runs/alone-{end}"
    httpx.post(
        f"{server.url}/v1/runs",
        json=RUN
        | {
            "run_id": f"alone-{end}",
            "source": {"kind": "inline", "tasks": [{"environment": "echo", "instance": {"number": 1}}]},
        },
    ).raise_for_status()
    held = httpx.post(f"{server.url}{run}/lease", params={"timeout": 60, "seconds": 600}, timeout=90).json()
    address = urlsplit(server.url)
    before = len(server.log)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        query = f"POST {run}/lease?timeout=3600&seconds=600 HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n"
        connection.sendall(query.encode())
        waiting = httpx.get(f"{server.url}{run}")  # its answer shows that the lease request was read
        assert waiting.is_success
        if end == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    eventually(lambda: f" path={run}/lease " in server.log[before:], server.log_file, seconds=30)
    httpx.post(f"{server.url}{run}/batches/{held['batch_id']}/nack").raise_for_status()
    again = httpx.post(f"{server.url}{run}/lease", params={"timeout": 60}, timeout=90)
    assert again.json()["batch_id"] == held["batch_id"]
    assert "Traceback" not in server.log[before:]


def test_a_wait_for_a_rollout_ends_with_its_caller(server):
    httpx.post(f"{server.url}/v1/pause", json={}).raise_for_status()
    address = urlsplit(server.url)
    order = {"rollout_id": "left-alone", "task": {"environment": "echo", "instance": {"number": 1}}}
    try:
        httpx.post(f"{server.url}/v1/rollouts", json=order).raise_for_status()
        before = len(server.log)
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            query = f"GET /v1/rollouts/left-alone?wait=3600 HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n"
            connection.sendall(query.encode())
        line = "path=/v1/rollouts/left-alone "
        eventually(lambda: line in server.log[before:], server.log_file, seconds=30)
    finally:
        httpx.post(f"{server.url}/v1/resume", json={}).raise_for_status()


@pytest.mark.parametrize("end", ["reset", "closed"])
def test_a_prorl_trainer_that_hangs_up_can_ask_for_its_job_again(server, end):
    job = f"prorl-{end}"
    body = json.dumps({"job_id": job, "instance": {"data_source": "echo", "number": 1}}).encode()
    address = urlsplit(server.url)
    head = f"POST /process HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    httpx.post(f"{server.url}/v1/pause", json={}).raise_for_status()
    try:
        before = len(server.log)
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            eventually(lambda: httpx.get(f"{server.url}/v1/rollouts/{job}").is_success, server.log_file)
            if end == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        eventually(lambda: " path=/process " in server.log[before:], server.log_file, seconds=30)
    finally:
        httpx.post(f"{server.url}/v1/resume", json={}).raise_for_status()
    headers = {"content-type": "application/json"}
    again = httpx.post(f"{server.url}/process", content=body, headers=headers, timeout=90)
    assert again.json()["resolved"], again.text
    assert "Traceback" not in server.log[before:]


async def test_a_reader_cut_off_before_the_first_event_misses_none(server):
    order = RolloutRequest(rollout_id="cut-off", task=Task(environment="echo", instance={"number": 1}))
    first: list[Event] = []

    async def read(client: RolloutClient) -> None:
        async with aclosing(client.events()) as events:
            first.append(await anext(events))

    with anyio.fail_after(90):
        async with (
            relay_to(server.url) as relay,
            RolloutClient(relay.url) as reader,
            RolloutClient(server.url) as client,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(read, reader)
            await relay.body_began.wait()
            relay.cut()
            await client.run(order)
            relay.mend()
    assert (first[0].subject, first[0].data["state"]) == ("cut-off", "queued")
