"""docs/how-to/deploy.md keeps its promises on the unit, proxy limits, probes and stores that 0.1 wrote."""

import getpass
import gzip
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from rollout_service.backup import Places, make_backup, restore_backup
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.server.api.routes import rollouts, runs
from rollout_service.settings import Settings
from rollout_service.store.runs_contract import BatchLease, BatchLeaseRequest
from rollout_service.store.sqlite import SqliteStore
from tests.support.api.server import api_server

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "deploy" / "systemd" / "rollout-service.service"
OLD_STORE = ROOT / "tests" / "data" / "store-0.1.sqlite3.gz"
"""A store of the first release: a run with four groups of two, one batch acknowledged, and a queued rollout."""
RUN = "delivery"
CONNECTIONS_SECONDS = 3
MAX_EXPOSURE = 4.0
PAGE = (ROOT / "docs" / "how-to" / "deploy.md").read_text()
KEY = "a-key-of-enough-characters-for-anyone"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts.sqlite3"
    path.write_bytes(gzip.decompress(OLD_STORE.read_bytes()))
    return path


def test_the_unit_is_valid(tmp_path: Path) -> None:
    """Replace the program's path and its user, which differ between deployments."""
    text = UNIT.read_text().replace("User=rollout\n", f"User={getpass.getuser()}\n")
    text = re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", text)
    (tmp_path / UNIT.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if UNIT.stem in line]
    assert (done.returncode, complaints) == (0, []), done.stderr


def test_the_unit_leaves_little_open() -> None:
    """Rate it as `systemd-analyze` does: from 0, which is best, to 10."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(UNIT)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"Overall exposure level.*: ([\d.]+)", done.stdout)
    assert found
    assert float(found[1]) < MAX_EXPOSURE, done.stdout


def test_the_unit_waits_longer_than_a_shutdown_takes() -> None:
    found = re.search(r"(?m)^TimeoutStopSec=(\d+)$", UNIT.read_text())
    assert found
    assert int(found[1]) > Settings().pipeline.drain_seconds + CONNECTIONS_SECONDS


def test_a_proxy_outlasts_every_wait_and_accepts_every_body() -> None:
    """If both times were equal, nginx would answer first, with a 504."""
    found = re.search(r"proxy_read_timeout (\d+)s;", PAGE)
    assert found
    assert int(found[1]) > max(rollouts.MAX_WAIT_SECONDS, runs.MAX_WAIT_SECONDS)
    found = re.search(r"client_max_body_size (\d+)m;", PAGE)
    assert found
    assert int(found[1]) << 20 >= Settings().max_body_bytes


def test_probes_answer_without_a_key_to_an_address_and_to_listed_names(tmp_path: Path) -> None:
    hosts = '["rollouts.example.com"]'
    with api_server(tmp_path, ROLLOUT_KEYS=KEY, ROLLOUT_ALLOWED_HOSTS=hosts) as server:
        for path, status in [("/health", 200), ("/ready", 503)]:
            assert httpx.get(server.url + path).status_code == status
            for host, named in [("rollouts.example.com", status), ("other.example.com", 421)]:
                assert httpx.get(server.url + path, headers={"host": host}).status_code == named
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).is_success


async def delivered(path: Path) -> tuple[str, list[float | None], int]:
    """Return the id, the rewards and the token count of a store's next batch."""
    async with await SqliteStore.open(path) as store:
        leased = await store.runs.lease(BatchLeaseRequest(RUN, "a trainer", 600.0, False))
        assert isinstance(leased, BatchLease)
        rewards, tokens = [], 0
        for number in leased.groups:
            group = await store.runs.group(RUN, number)
            for sample in group.samples:
                rewards.append(sample.reward)
                assert sample.rollout.trajectory is not None
                tokens += sum(len(segment.token_ids) for segment in sample.rollout.trajectory.segments)
        return leased.batch_id, rewards, tokens


async def test_a_store_of_the_first_release_is_whole_after_the_upgrade(old: Path) -> None:
    assert await delivered(old) == ("delivery.b1", [0.0] * 4, 4 * 64)
    async with await SqliteStore.open(old) as store:
        waiting = await store.get("waiting")
        assert waiting.task.instance == {"question": "1+1", "answer": 2}
        finished = await store.get(f"{RUN}.0.0")
        assert finished.reward == 0.0
        assert await store.trajectory(f"{RUN}.0.0") is not None
        leases = await store.claim("a pipeline", limit=10, lease_seconds=60)
        assert [lease.rollout_id for lease in leases] == ["waiting"]


async def test_a_batch_that_was_leased_is_leased_after_a_restore(old: Path, tmp_path: Path) -> None:
    restored = tmp_path / "restored" / "rollouts.sqlite3"
    async with (
        await SqliteStore.open(old) as store,
        SqliteLiveStore(tmp_path / "live.sqlite3"),
    ):
        leased = await store.runs.lease(BatchLeaseRequest(RUN, "another trainer", 600.0, False))
        assert isinstance(leased, BatchLease)
        make_backup(Places({"state": tmp_path}), tmp_path / "backup")
        await store.runs.give_back(RUN, 1)
    restore_backup(tmp_path / "backup", Places({"state": restored.parent}))
    async with await SqliteStore.open(restored) as store:
        await store.runs.give_back(RUN, 1)  # its holder's lease would also expire by itself
    assert (await delivered(restored))[0] == leased.batch_id
