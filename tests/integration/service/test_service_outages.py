"""Whatever happens to Redis under a service, it says so, loses nothing, and goes on by itself afterwards."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandboxes.host.ports import free_port
from tests.support.processes.service import Running, scripted_engine, service
from tests.support.redis_server import RedisServer

pytestmark = [pytest.mark.redis, pytest.mark.timeout(150)]
LONG = pytest.mark.extended("rollout_service/store/")

PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_engine(tmp_path_factory.mktemp("engine"), delay=0.05) as started:
        yield started.url


@contextmanager
def on_redis(folder: Path, engine: str, server: RedisServer) -> Iterator[Running]:
    """Run the service with its store in a Redis."""
    config = f'[store]\nurl = "{server.url}"\nprefix = "service"\n'
    with service(folder, engine, config) as running:
        yield running


def order(number: int) -> dict[str, Any]:
    return {"rollout_id": f"r{number}", "task": {"environment": "echo", "instance": {"number": number}}}


def submit(server: Running, number: int, *, wait: float = 0) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/rollouts", params={"wait": wait}, json=order(number), timeout=90)


def state(server: Running, number: int) -> str:
    found = httpx.get(f"{server.url}/v1/rollouts/r{number}").raise_for_status()
    return str(found.json()["state"])


def ready(server: Running) -> httpx.Response:
    return httpx.get(f"{server.url}/ready", timeout=30)


def eventually(condition: Callable[[], bool], server: Running) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, server.log[-4_000:]
        time.sleep(0.05)


def test_rollouts_go_through_and_results_survive_restarts_of_everything(folder, engine, own_redis):
    with on_redis(folder, engine, own_redis) as server:
        assert submit(server, 1, wait=60).json()["state"] == "completed", server.log
        trajectory = httpx.get(f"{server.url}/v1/rollouts/r1/trajectory").json()
        assert trajectory["segments"]
        server.stop()
        assert server.ended(30) == -signal.SIGTERM
    own_redis.kill()
    own_redis.start()
    with on_redis(folder, engine, own_redis) as server:
        found = httpx.get(f"{server.url}/v1/rollouts/r1").json()
        assert (found["state"], found["reward"]) == ("completed", 1.0)
        assert httpx.get(f"{server.url}/v1/rollouts/r1/trajectory").json() == trajectory
        assert submit(server, 2, wait=60).json()["state"] == "completed"
    assert not (folder / "state" / "rollouts.sqlite3").exists()


@pytest.mark.parametrize(
    ("way", "hint"),
    [
        ("slow", "too slow"),
        pytest.param("full", "maxmemory", marks=LONG),
        pytest.param("read-only", "primary", marks=LONG),
        pytest.param("flushed", None, marks=LONG),
    ],
)
def test_an_outage_of_redis_is_reported_and_survived(folder, engine, own_redis, way, hint):
    with on_redis(folder, engine, own_redis) as server:
        assert submit(server, 1, wait=60).json()["state"] == "completed"
        for number in range(2, 12):
            submit(server, number).raise_for_status()
        with broken(own_redis, way):
            if hint is not None:
                eventually(lambda: is_reported(server, hint), server)
        eventually(lambda: ready(server).is_success, server)
        eventually(lambda: all(state(server, number) == "completed" for number in range(1, 12)), server)
        assert submit(server, 100, wait=60).json()["state"] == "completed"
        assert server.process.poll() is None
        assert "Traceback" not in server.log


@contextmanager
def broken(server: RedisServer, way: str) -> Iterator[None]:
    """Break a Redis for the block; one whose functions were deleted is mended by whoever calls them."""
    if way == "slow":
        with server.paused():
            yield
        return
    breaks, mends = {
        "full": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        "read-only": (("REPLICAOF", "127.0.0.1", free_port()), ("REPLICAOF", "NO", "ONE")),
        "flushed": (("FUNCTION", "FLUSH"), ("PING",)),
    }[way]
    server.do(*breaks)
    yield
    server.do(*mends)


@LONG
def test_the_log_has_one_line_for_the_beginning_of_each_outage_and_one_for_its_end(folder, engine, own_redis):
    config = f'log_format = "json"\n[store]\nurl = "{own_redis.url}"\n'
    with service(folder, engine, config) as server:
        for outage in range(2):
            for number in range(20 * outage, 20 * outage + 20):
                submit(server, number).raise_for_status()
            own_redis.kill()
            eventually(lambda: ready(server).status_code == 503, server)
            time.sleep(5)  # many calls are repeated
            own_redis.start()
            eventually(lambda: ready(server).is_success, server)
            last = 20 * outage + 19
            eventually(lambda last=last: state(server, last) == "completed", server)
        assert server.said_of_the_store() == ["the store fails", "the store works again"] * 2


def is_reported(server: Running, hint: str) -> bool:
    """Return whether `/ready` says what to do; a submission is what a full Redis refuses."""
    httpx.post(f"{server.url}/v1/rollouts", json=order(1_000), timeout=30)
    answer = ready(server)
    return answer.status_code == 503 and any(hint in reason for reason in answer.json()["reasons"])
