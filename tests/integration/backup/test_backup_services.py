"""A backup of a service at work is restored on an empty machine, and everything is there."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_service.backup.manifest import STATES
from rollout_service.base import private_files
from tests.support.processes.service import Running, eventually, scripted_engine, service
from tests.support.redis_server import RedisServer, redis_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROLLOUTS = 30
NOT_KEPT = {"hangs.json", "stacks.txt", "run-dirs", "saved-sandboxes"}
"""Files of a state folder that matter only to the process that wrote them, or only on its machine."""
BRIEF = ("-wal", "-shm", "-journal", ".lock", ".draft")
PATIENCE_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Machine:
    """A service's folder, and the store that it shares, if it shares one."""

    folder: Path
    servers: Sequence[RedisServer] = ()
    place: str = ""
    """The settings of the place for trajectories, if it is not a folder."""

    @property
    def config(self) -> str:
        if not self.servers:
            return ""
        place = self.place or f'folder = "{self.folder / "shared"}"\n'
        return f"[store]\nurl = {[server.url for server in self.servers]}\n{place}"

    def serve(self) -> Any:
        self.folder.mkdir(exist_ok=True)
        return service(self.folder, None, self.config)

    def command(self, name: str, backup: Path) -> dict[str, Any]:
        """Back up or restore with the settings of this machine's service."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "service.toml").write_text(self.config)
        command = [sys.executable, "-m", "rollout_service.cli", name, str(backup), "--json"]
        command += ["--config", str(self.folder / "service.toml")]
        done = subprocess.run(
            [*command, "--state-dir", str(self.folder / "state")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "engine").mkdir()
    with scripted_engine(tmp_path / "engine", delay=0.2) as started:
        yield started


ON_REDIS = (
    pytest.mark.redis,
    pytest.mark.extended("rollout_service/backup/", "rollout_service/store/redis/"),
)


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("redis", marks=ON_REDIS),
        pytest.param("shards", marks=ON_REDIS),
        pytest.param("objects", marks=[*ON_REDIS, pytest.mark.seaweedfs]),
    ]
)
def machines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Machine, Machine]]:
    """Yield a machine, and an empty one."""
    if request.param == "sqlite":
        yield Machine(tmp_path / "a"), Machine(tmp_path / "b")
        return
    places = ["", ""]
    if request.param == "objects":
        request.getfixturevalue("as_service")
        objects = request.getfixturevalue("shared_objects")
        places = [objects.settings(objects.address()) for _ in places]
    shards = 2 if request.param == "shards" else 1
    with ExitStack() as stack:
        servers = [stack.enter_context(redis_server()) for _ in range(2 * shards)]
        yield (
            Machine(tmp_path / "a", servers[:shards], places[0]),
            Machine(tmp_path / "b", servers[shards:], places[1]),
        )


def open_session(server: Running, user: str) -> dict[str, Any]:
    body = {"user": user, "train": True}
    found: dict[str, Any] = httpx.post(f"{server.url}/v1/sessions", json=body, timeout=30).json()
    return found


def ask(server: Running, session: dict[str, Any], text: str) -> httpx.Response:
    path = httpx.URL(session["url"]).path
    return httpx.post(
        f"{server.url}{path}/v1/chat/completions",
        json={"model": "policy", "messages": [{"role": "user", "content": text}]},
        headers={"authorization": f"Bearer {session['key']}"},
        timeout=60,
    )


def turns(server: Running, session: dict[str, Any]) -> list[Any]:
    session_id = session["session"]["session_id"]
    found = httpx.get(f"{server.url}/v1/sessions/{session_id}", timeout=30).raise_for_status()
    shown: list[Any] = found.json()["turns"]
    return shown


def test_everything_is_there_after_a_restore(tmp_path, engine, machines):
    before, after = machines
    with before.serve() as server:
        spec = {"url": engine.url}
        httpx.post(f"{server.url}/v1/backends", json=spec, timeout=60).raise_for_status()
        alice, bob = open_session(server, "alice"), open_session(server, "bob")
        for session in (alice, alice, bob):
            assert ask(server, session, "Hello?").is_success
        eventually(lambda: len(turns(server, alice)) == 2, server.log_file, PATIENCE_SECONDS)
        server.submit_all(range(ROLLOUTS))
        eventually(lambda: server.counts().get("completed", 0) >= 5, server.log_file, PATIENCE_SECONDS)
        completed = server.counts()["completed"]
        made = before.command("backup", tmp_path / "backup")
        assert {name: made["counts"][name] for name in ("rollouts", "sessions")} == {
            "rollouts": ROLLOUTS,
            "sessions": 2,
        }
        eventually(lambda: server.counts() == {"completed": ROLLOUTS}, server.log_file, PATIENCE_SECONDS)
        assert "trying again" not in server.log, "the service noticed nothing"
    check_every_file_is_kept(before.folder / "state", tmp_path / "backup")
    shutil.rmtree(before.folder / "state")
    assert after.command("restore", tmp_path / "backup") == made
    with after.serve() as server:
        assert server.counts()["completed"] >= completed
        assert sum(server.counts().values()) == ROLLOUTS
        eventually(lambda: server.counts() == {"completed": ROLLOUTS}, server.log_file, PATIENCE_SECONDS)
        for number in range(ROLLOUTS):
            found = httpx.get(f"{server.url}/v1/rollouts/r{number}/trajectory", timeout=30)
            assert found.raise_for_status().json()["segments"]
        assert len(turns(server, alice)) == 2
        assert ask(server, alice, "Hello again?").is_success, "her key is still hers"
        deleted = httpx.delete(f"{server.url}/v1/sessions", params={"user": "alice"}, timeout=60)
        assert deleted.raise_for_status().json()["sessions"] == 1
        page = httpx.get(f"{server.url}/v1/sessions", timeout=30).json()
        assert [each["session_id"] for each in page["sessions"]] == [bob["session"]["session_id"]]


def check_every_file_is_kept(state: Path, backup: Path) -> None:
    """Check that nobody adds a file to the state folder of which backups know nothing."""
    names = {path.name for path in state.iterdir()} - NOT_KEPT
    names = {name for name in names if not name.endswith(BRIEF)}
    assert names <= {*private_files.DATABASES, *private_files.DOCUMENTS}
    assert names == {path.name for path in (backup / STATES / "state").iterdir()}
