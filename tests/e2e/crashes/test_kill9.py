"""After kill -9 of the server amid 64 rollouts and a restart, each rollout ends exactly once, and nothing is left."""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from api_schemas.events import Event
from rollout_service.cluster.identity import is_gone
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.sqlite import SqliteStore
from tests.support.redis_server import redis_server

pytestmark = pytest.mark.slow(seconds=100)

ROLLOUTS = 32
TURNS = 4
START_SECONDS = 60.0
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
GREETING = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo hello >> greetings"}}\n</tool_call><|im_end|>'


@pytest.fixture
def folder() -> Iterator[Path]:
    """Create a folder with a short path, because sockets are created below it."""
    made = Path(tempfile.mkdtemp(prefix="k9-", dir="/tmp"))
    made.chmod(0o755)  # sandboxes run as another user, who must reach theirs
    yield made
    shutil.rmtree(made)


@contextmanager
def running(arguments: list[str], address: Path, log: Path) -> Iterator[tuple[psutil.Popen, str]]:
    """Run a module in a process that writes its URL to a file, and stop the process at the end of the block."""
    address.unlink(missing_ok=True)
    with log.open("ab") as output:
        process = psutil.Popen([sys.executable, "-m", *arguments], stdout=output, stderr=output)
    try:
        eventually(lambda: address.exists() or not process.is_running(), log)
        yield process, address.read_text().strip()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except psutil.TimeoutExpired:
                process.kill()
        process.wait(30)


def eventually(condition, log: Path, seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(log.read_text()[-4_000:])
        time.sleep(0.05)


@contextmanager
def scripted_engine(folder: Path) -> Iterator[str]:
    address = folder / "engine.address"
    arguments = ["rollout_service.testing", "--delay", "0.3", "--turn", GREETING]
    arguments += ["--address", str(address)]
    with running(arguments, address, folder / "engine.log") as (_, url):
        yield url


@contextmanager
def server(
    folder: Path, engine_url: str, provider: str, redis: RedisConfig | None
) -> Iterator[tuple[psutil.Popen, httpx.Client]]:
    (folder / "echo").mkdir(exist_ok=True)
    (folder / "echo" / "environment.toml").write_text(ENVIRONMENT)
    config = folder / "rollout.toml"
    config.write_text(
        f'[sandbox]\nprovider = "{provider}"\nrun_dir = "{folder / "run"}"\n'
        "[pipeline]\ninit_workers = 4\nrollout_workers = 8\ndrain_seconds = 1\n"
        + (f'[store]\nurl = "{redis.url}"\nprefix = "{redis.prefix}"\n' if redis is not None else "")
    )
    address, log = folder / "server.address", folder / "server.log"
    arguments = ["rollout_service.cli", "serve", "--config", str(config), "--port", "0"]
    arguments += ["--state-dir", str(folder / "state"), "--port-file", str(address)]
    arguments += ["--engine", "none", "--backend", engine_url, "--environment", str(folder / "echo")]
    with running(arguments, address, log) as (process, url), httpx.Client(base_url=url, timeout=30) as client:
        eventually(lambda: answers(client), log)
        yield process, client


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def counts(client: httpx.Client) -> dict[str, int]:
    return client.get("/v1/rollouts", params={"limit": 1}).raise_for_status().json()["counts"]


def in_use(client: httpx.Client) -> list[dict]:
    sandboxes = client.get("/v1/sandboxes").raise_for_status().json()
    return [sandbox for sandbox in sandboxes if sandbox["state"] != "warm"]


def ended(client: httpx.Client) -> int:
    standing = counts(client)
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
        pytest.param(
            "local", "redis", marks=(pytest.mark.redis, pytest.mark.extended("rollout_service/store/redis/"))
        ),
        pytest.param("apptainer", "sqlite", marks=pytest.mark.apptainer),
    ],
)
async def test_kill_9_in_the_middle_loses_nothing_and_leaves_nothing(folder, provider, store):
    ids = [f"r{number}" for number in range(ROLLOUTS)]
    log = folder / "server.log"
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server()).config() if store == "redis" else None
        engine_url = stack.enter_context(scripted_engine(folder))
        with server(folder, engine_url, provider, redis) as (process, client):
            for number, rollout_id in enumerate(ids):
                order = {
                    "rollout_id": rollout_id,
                    "task": {"environment": "echo", "instance": {"number": number}},
                }
                assert client.post("/v1/rollouts", json=order).status_code == httpx.codes.ACCEPTED
            eventually(lambda: ended(client) >= 8 and counts(client).get("rollout", 0) >= 4, log, END_SECONDS)
            before_kill = {rollout["rollout_id"] for rollout in completed(client)}
            begun = process.children(recursive=True)
            assert begun
            process.send_signal(signal.SIGKILL)
            process.wait(30)
            killed = time.monotonic()
        eventually(lambda: not any(alive(child) for child in begun), log, RECLAIM_SECONDS)
        eventually(lambda: list((folder / "run").iterdir()) == [], log, RECLAIM_SECONDS)
        assert time.monotonic() - killed < RECLAIM_SECONDS, "nothing outlives the server, restarted or not"
        assert mounts_below(folder) == []
        with server(folder, engine_url, provider, redis) as (_, client):
            eventually(lambda: ended(client) == ROLLOUTS, log, END_SECONDS)
            results = {rollout["rollout_id"]: rollout for rollout in completed(client)}
            assert set(results) == set(ids), log.read_text()[-4_000:]
            assert before_kill <= set(results)
            for rollout_id, rollout in results.items():
                assert (rollout["usage"]["turns"], rollout["reward"]) == (TURNS, TURNS)
                assert rollout["attempt"] == 1 or rollout_id not in before_kill
                trajectory = client.get(f"/v1/rollouts/{rollout_id}/trajectory").raise_for_status().json()
                assert len(trajectory["finish_reasons"]) == TURNS
            assert any(rollout["attempt"] == 2 for rollout in results.values())
            eventually(lambda: in_use(client) == [], log)
        await check_each_ended_once(folder / "state" / "rollouts.sqlite3", redis, ids)
    assert mentioning(folder) == []
    assert mounts_below(folder) == []
    assert [path for path in (folder / "run").rglob("*") if path.is_dir()] == []


def completed(client: httpx.Client) -> list[dict]:
    page = client.get("/v1/rollouts", params={"state": "completed", "limit": 1000}).raise_for_status()
    return page.json()["rollouts"]


async def check_each_ended_once(database: Path, redis: RedisConfig | None, ids: list[str]) -> None:
    opened = SqliteStore.open(database) if redis is None else RedisStore.open(redis, is_gone=is_gone)
    async with await opened as store:
        events: list[Event] = await store.events(after=0, limit=100_000)
    ends = Counter(
        event.subject for event in events if event.data.get("state") in ("completed", "failed", "cancelled")
    )
    assert ends == dict.fromkeys(ids, 1)
