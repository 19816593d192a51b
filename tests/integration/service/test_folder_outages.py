"""Whatever happens to the folders and the bucket of a service at work, it says so, loses and duplicates nothing."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes.service import Running, eventually, scripted_engine, service
from tests.support.store.disks import SmallDisk, small_disk

pytestmark = [pytest.mark.redis, pytest.mark.timeout(300)]
LONG = pytest.mark.extended("rollout_service/store/")

ROLLOUTS = 40  # more than end before a slow machine sees the first three
LOG = 'log_format = "json"\n'
FEW_AT_ONCE = """
[sandboxes.pressure]
enabled = false
[pipeline]
init_workers = 2
init_queue = 2
rollout_workers = 4
rollout_queue = 2
evaluate_workers = 2
evaluate_queue = 2
"""
PATIENCE_SECONDS = 90.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_engine(tmp_path_factory.mktemp("engine"), delay=1) as started:
        yield started.url


@pytest.fixture
def disk(folder: Path) -> Iterator[SmallDisk]:
    with small_disk(folder / "disk") as mounted:
        yield mounted


def stuck_kinds(server: Running) -> set[str]:
    report: dict[str, Any] = httpx.get(f"{server.url}/v1/hangs", timeout=30).raise_for_status().json()
    return {finding["kind"] for finding in report["findings"] if finding["verdict"] == "stuck"}


def holds_work(server: Running, hint: str) -> None:
    """Check that a service at work reports its outage, and holds what it has."""
    eventually(lambda: hint in server.ready().text, server.log_file, PATIENCE_SECONDS)
    assert server.metric("rollout_store_failing") == 1
    eventually(lambda: "store" in stuck_kinds(server), server.log_file, PATIENCE_SECONDS)
    assert server.counts()["completed"] < ROLLOUTS, "results are held"
    assert server.counts()["queued"] > 0, "nothing is begun whose result would have to wait"


def goes_on(server: Running) -> None:
    """Check that a service completes everything, once."""
    eventually(lambda: server.counts() == {"completed": ROLLOUTS}, server.log_file, PATIENCE_SECONDS)
    eventually(lambda: server.ready().is_success, server.log_file, PATIENCE_SECONDS)
    assert server.metric("rollout_store_failing") == 0
    for number in range(ROLLOUTS):
        found = httpx.get(f"{server.url}/v1/rollouts/r{number}/trajectory", timeout=30)
        assert found.raise_for_status().json()["segments"]
    assert server.ends() == Counter(f"r{number}" for number in range(ROLLOUTS))


def move_away(disk: SmallDisk) -> None:
    (disk.folder / "shared").rename(disk.folder / "away")


def unmount(disk: SmallDisk) -> None:
    """Leave an empty folder where the file system was."""
    move_away(disk)
    (disk.folder / "shared").mkdir()


def bring_back(disk: SmallDisk) -> None:
    shutil.rmtree(disk.folder / "shared", ignore_errors=True)
    (disk.folder / "away").rename(disk.folder / "shared")


WAYS: dict[str, tuple[Callable[[SmallDisk], None], Callable[[SmallDisk], None], str]] = {
    "moved": (move_away, bring_back, "has no mark"),
    "unmounted": (unmount, bring_back, "has no mark"),
    "read-only": (
        lambda disk: disk.make_read_only("shared"),
        lambda disk: disk.make_writable("shared"),
        "for writing",
    ),
    "full": (SmallDisk.fill, SmallDisk.free, "Free space"),
}


@pytest.mark.parametrize(
    "way", ["moved", *(pytest.param(way, marks=LONG) for way in ("unmounted", "read-only", "full"))]
)
def test_an_outage_of_the_folder_is_reported_and_loses_nothing(folder, engine, own_redis, disk, way):
    break_it, mend, hint = WAYS[way]
    store = f'[store]\nurl = "{own_redis.url}"\nfolder = "{disk.folder / "shared"}"\n'
    with service(folder, engine, LOG + store + FEW_AT_ONCE) as server:
        server.submit_all(range(ROLLOUTS))
        eventually(lambda: server.counts().get("completed", 0) >= 3, server.log_file, PATIENCE_SECONDS)
        break_it(disk)
        holds_work(server, hint)
        mend(disk)
        goes_on(server)
        assert server.said_of_the_store() == ["the store fails", "the store works again"]


@LONG
@pytest.mark.seaweedfs
@pytest.mark.usefixtures("as_service")
def test_an_outage_of_the_object_store_is_reported_and_loses_nothing(folder, engine, own_redis):
    from tests.support.store.object_server import SERVICE, keys, object_server

    with object_server() as objects:
        place = objects.settings(objects.address())
        store = f'[store]\nurl = "{own_redis.url}"\n{place}'
        with service(folder, engine, LOG + store + FEW_AT_ONCE) as server:
            server.submit_all(range(ROLLOUTS))
            eventually(lambda: server.counts().get("completed", 0) >= 3, server.log_file, PATIENCE_SECONDS)
            objects.kill()
            holds_work(server, "objects_endpoint")
            assert "cannot be reached" in store_command(folder, "check")["problem"]
            objects.start()
            goes_on(server)
            assert server.said_of_the_store() == ["the store fails", "the store works again"]
            assert store_command(folder, "check")["lost"] == []
            assert not any(value in server.log for value in keys(SERVICE).values())


def store_command(folder: Path, *words: str) -> dict[str, Any]:
    """Run a command on the store of the service's settings; return what it prints."""
    command = [sys.executable, "-m", "rollout_service.cli", "store", *words, "--json"]
    done = subprocess.run(
        [*command, "--config", str(folder / "service.toml")], capture_output=True, text=True, check=False
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@LONG
def test_a_folder_that_is_lost_for_good_is_replaced_and_what_was_in_it_is_named(folder, engine, own_redis):
    shared = folder / "shared"
    store = f'[store]\nurl = "{own_redis.url}"\nfolder = "{shared}"\n'
    with service(folder, engine, LOG + store + FEW_AT_ONCE) as server:
        server.submit_all(range(ROLLOUTS))
        eventually(lambda: server.counts().get("completed", 0) >= 3, server.log_file, PATIENCE_SECONDS)
        shutil.rmtree(shared)
        holds_work(server, "store new-folder")
        report = store_command(folder, "new-folder")
        lost = {one["rollout_id"] for one in report["lost"]}
        assert len(lost) == server.counts()["completed"] == report["trajectories"]
        assert not shared.exists(), "nothing is changed without --yes"
        assert store_command(folder, "new-folder", "--yes")["problem"] is None
        eventually(lambda: server.counts() == {"completed": ROLLOUTS}, server.log_file, PATIENCE_SECONDS)
        eventually(lambda: server.ready().is_success, server.log_file, PATIENCE_SECONDS)
        for number in range(ROLLOUTS):
            found = httpx.get(f"{server.url}/v1/rollouts/r{number}/trajectory", timeout=30)
            assert found.is_success == (f"r{number}" not in lost)
        report = store_command(folder, "check")
        assert report["trajectories"] == ROLLOUTS
        assert {one["rollout_id"] for one in report["lost"]} == lost
        assert server.ends() == Counter(f"r{number}" for number in range(ROLLOUTS))
        server.stop()
        server.ended(30)
    with service(folder, engine, LOG + store) as server:
        assert server.counts() == {"completed": ROLLOUTS}, "it starts again, too"
