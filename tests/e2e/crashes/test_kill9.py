"""After kill -9 of the server amid 64 rollouts and a restart, each rollout ends exactly once, and nothing is left."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from api_schemas.events import Event
from rollout_service.cluster.identity import is_gone
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.sqlite import SqliteStore
from tests.support.api.server import api_server
from tests.support.processes.service import Running, eventually, scripted_engine
from tests.support.redis_server import redis_server
from tests.support.turns import called, turn_of

pytestmark = pytest.mark.slow(seconds=100)

ROLLOUTS = 32
TURNS = 4
END_SECONDS = 120.0
RECLAIM_SECONDS = 5.0
ENVIRONMENT = '''
name = "echo"
image = "base"
prompt = "Greet {{ instance.number }}."
tools = ["bash"]
[limits]
max_turns = 4
[sandbox]
memory = "256M"
[evaluate]
command = """
printf '{"reward": %d.0}' "$(wc -l < "$ROLLOUT_WORKDIR/greetings")" > "$ROLLOUT_RESULT"
"""
'''


@contextmanager
def server(folder: Path, engine_url: str, provider: str, redis: RedisConfig | None) -> Iterator[Running]:
    (folder / "echo").mkdir(exist_ok=True)
    (folder / "echo" / "environment.toml").write_text(ENVIRONMENT)
    config = folder / "rollout.toml"
    config.write_text(
        f'[sandbox]\nprovider = "{provider}"\nrun_dir = "{folder / "run"}"\n'
        "[pipeline]\ninit_workers = 4\nrollout_workers = 8\ndrain_seconds = 1\n"
        + (f'[store]\nurl = "{redis.url}"\nprefix = "{redis.prefix}"\n' if redis is not None else "")
    )
    flags = ["--config", str(config), "--backend", engine_url, "--environment", str(folder / "echo")]
    with api_server(folder, *flags, sandbox=provider) as running:
        running.wait_until_ready()
        yield running


def in_use(running: Running) -> list[dict]:
    sandboxes = running.get("/v1/sandboxes")
    return [sandbox for sandbox in sandboxes if sandbox["state"] != "warm"]


def ended(running: Running) -> int:
    standing = running.counts()
    return sum(standing.get(state, 0) for state in ("completed", "failed", "cancelled"))


def alive(process: psutil.Process) -> bool:
    """Return whether this very process is running, and not just a later one with its pid."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def mounts_below(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line]


def mentioning(folder: Path) -> list[int]:
    """Return the pids of processes whose command lines name a folder: the sandboxes', whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(str(folder / "run") in word for word in process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("provider", "store"),
    [
        pytest.param("local", "redis", marks=(pytest.mark.redis, pytest.mark.extended("rollout_service/store/redis/"))),
        pytest.param("apptainer", "sqlite", marks=pytest.mark.apptainer),
    ],
)
async def test_kill_9_in_the_middle_loses_nothing_and_leaves_nothing(folder, provider, store):
    ids = [f"r{number}" for number in range(ROLLOUTS)]
    log = folder / "server.log"
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server()).config() if store == "redis" else None
        turn = turn_of(called("bash", command="echo hello >> greetings"))
        engine_url = stack.enter_context(scripted_engine(folder, turn, delay=0.3)).url
        with server(folder, engine_url, provider, redis) as running:
            running.submit_all(range(ROLLOUTS))
            eventually(lambda: ended(running) >= 8 and running.counts().get("rollout", 0) >= 4, log, END_SECONDS)
            before_kill = {rollout["rollout_id"] for rollout in completed(running)}
            begun = running.process.children(recursive=True)
            assert begun
            running.stop(signal.SIGKILL)
            running.ended(30)
            killed = time.monotonic()
        eventually(lambda: not any(alive(child) for child in begun), log, RECLAIM_SECONDS)
        eventually(lambda: list((folder / "run").iterdir()) == [], log, RECLAIM_SECONDS)
        assert time.monotonic() - killed < RECLAIM_SECONDS, "nothing outlives the server, restarted or not"
        assert mounts_below(folder) == []
        with server(folder, engine_url, provider, redis) as running:
            eventually(lambda: ended(running) == ROLLOUTS, log, END_SECONDS)
            results = {rollout["rollout_id"]: rollout for rollout in completed(running)}
            assert set(results) == set(ids), log.read_text()[-4_000:]
            assert before_kill <= set(results)
            for rollout_id, rollout in results.items():
                assert (rollout["usage"]["turns"], rollout["reward"]) == (TURNS, TURNS)
                assert rollout["attempt"] == 1 or rollout_id not in before_kill
                trajectory = running.get(f"/v1/rollouts/{rollout_id}/trajectory")
                assert len(trajectory["finish_reasons"]) == TURNS
            assert any(rollout["attempt"] == 2 for rollout in results.values())
            eventually(lambda: in_use(running) == [], log)
        await check_each_ended_once(folder / "state" / "rollouts.sqlite3", redis, ids)
    assert mentioning(folder) == []
    assert mounts_below(folder) == []
    assert [path for path in (folder / "run").rglob("*") if path.is_dir()] == []


def completed(running: Running) -> list[dict]:
    return running.get("/v1/rollouts", state="completed", limit=1000)["rollouts"]


async def check_each_ended_once(database: Path, redis: RedisConfig | None, ids: list[str]) -> None:
    opened = SqliteStore.open(database) if redis is None else RedisStore.open(redis, is_gone=is_gone)
    async with await opened as store:
        events: list[Event] = await store.events(after=0, limit=100_000)
    ends = Counter(event.subject for event in events if event.data.get("state") in ("completed", "failed", "cancelled"))
    assert ends == dict.fromkeys(ids, 1)
