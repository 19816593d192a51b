"""Whatever happens to Redis under a service, it says so, loses nothing, and goes on by itself afterwards."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandboxes.host.ports import free_port
from tests.support.processes.service import Running, eventually, scripted_engine, service
from tests.support.redis_server import RedisServer

pytestmark = [pytest.mark.redis, pytest.mark.timeout(150)]
LONG = pytest.mark.extended("rollout_service/store/")


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


def test_rollouts_go_through_and_results_survive_restarts_of_everything(folder, engine, own_redis):
    with on_redis(folder, engine, own_redis) as server:
        assert server.submit("r1", wait=60).json()["state"] == "completed", server.log
        trajectory = server.get("/v1/rollouts/r1/trajectory")
        assert trajectory["segments"]
        server.stop()
        assert server.ended(30) == -signal.SIGTERM
    own_redis.kill()
    own_redis.start()
    with on_redis(folder, engine, own_redis) as server:
        found = server.get("/v1/rollouts/r1")
        assert (found["state"], found["reward"]) == ("completed", 1.0)
        assert server.get("/v1/rollouts/r1/trajectory") == trajectory
        assert server.submit("r2", wait=60).json()["state"] == "completed"
    assert not (folder / "state" / "rollouts.sqlite3").exists()


@pytest.mark.parametrize(
    ("way", "hint"),
    [
        ("slow", "too slow"),
        pytest.param("read-only", "primary", marks=LONG),
        pytest.param("flushed", None, marks=LONG),
    ],
)
def test_an_outage_of_redis_is_reported_and_survived(folder, engine, own_redis, way, hint):
    with on_redis(folder, engine, own_redis) as server:
        assert server.submit("r1", wait=60).json()["state"] == "completed"
        for number in range(2, 12):
            server.submit(f"r{number}").raise_for_status()
        with broken(own_redis, way):
            if hint is not None:
                eventually(lambda: is_reported(server, hint), server)
        server.wait_until_ready()
        eventually(lambda: all(server.state(f"r{number}") == "completed" for number in range(1, 12)), server)
        assert server.submit("r100", wait=60).json()["state"] == "completed"
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
        "read-only": (("REPLICAOF", "127.0.0.1", free_port()), ("REPLICAOF", "NO", "ONE")),
        "flushed": (("FUNCTION", "FLUSH"), ("PING",)),
    }[way]
    server.do(*breaks)
    yield
    server.do(*mends)


def is_reported(server: Running, hint: str) -> bool:
    """Return whether `/ready` says what to do, once something was to be written."""
    server.submit("r1000")
    answer = server.ready()
    return answer.status_code == 503 and any(hint in reason for reason in answer.json()["reasons"])
