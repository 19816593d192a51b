"""A job's state is backed up from its folder, whether the job runs or not, and restored into another job's folder."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import anyio
import psutil
import pytest
import structlog

from api_schemas.rollouts import RolloutState
from rollout_service.backup import make_backup, restore_backup
from rollout_service.backup.slurm_jobs import _claimed, job_places
from rollout_service.base import private_files
from rollout_service.base.errors import ConfigurationError, StoreError
from rollout_service.base.private_files import write_private
from rollout_service.cluster.identity import is_gone
from rollout_service.cluster.slurm import redis_server as redis_server_of_jobs
from rollout_service.cluster.slurm.folder import JobFolder, Submitted
from rollout_service.cluster.slurm.redis_server import wait_for_files
from rollout_service.cluster.slurm.spec import JobSpec, Resources
from rollout_service.live.register import UserHashes
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.sqlite import SqliteStore
from tests.support.redis_server import program, redis_server
from tests.support.store.rollouts import TRAJECTORY, completed, order
from tests.support.waiting import collect, until


def job(folder: Path, *, nodes: int = 1, redis_server: str = "redis-server") -> JobFolder:
    made = JobFolder(folder)
    made.create()
    spec = JobSpec(name=folder.name, resources=Resources(nodes=nodes), redis_server=redis_server)
    made.save(Submitted(job="", spec=spec))
    return made


async def live(state: Path) -> str:
    """Make what a node keeps; return the hash of a user."""
    async with SqliteLiveStore(state / private_files.LIVE_STORE, "network"):
        pass
    return UserHashes.load(state / private_files.USERS_SALT).hash("alice", "default")


async def test_a_job_of_one_node(tmp_path):
    one, other = job(tmp_path / "one"), job(tmp_path / "other")
    async with await SqliteStore.open(one.state(None) / private_files.STORE, disk="network") as store:
        await store.submit(order("r"))
    alice = await live(one.state(None))
    with job_places(one, is_running=False) as places:
        make_backup(places, tmp_path / "backup")
    with job_places(other, is_running=False) as places:
        restore_backup(tmp_path / "backup", places)
    assert other.key == one.key
    assert await live(other.state(None)) == alice
    async with await SqliteStore.open(other.state(None) / private_files.STORE, disk="network") as store:
        assert await store.counts() == {RolloutState.QUEUED: 1}


async def opened(config: RedisConfig, job_folder: JobFolder) -> RedisStore:
    return await RedisStore.open(config, is_gone=is_gone, files=SharedFiles(job_folder.path / "shared"), owner="node")


@pytest.mark.redis
@pytest.mark.parametrize("is_running", [True, False])
async def test_a_job_of_several_nodes_with_its_own_redis(tmp_path, is_running):
    one, other = (job(tmp_path / name, nodes=2, redis_server=program()) for name in ("one", "other"))
    users = [await live(one.state(slot)) for slot in range(2)]
    with redis_server() as server:
        server.stop()
        server.folder.joinpath("redis.conf").unlink()
        server.options = {"dir": str(one.path / "redis")}
        server.start()
        write_private(one.path / "redis" / "address", server.url.encode())
        (one.path / "redis" / "password").touch(0o600)
        async with await opened(server.config("one"), one) as store:
            await store.submit(order("r"))
            [lease] = await store.claim("node", limit=1, lease_seconds=60)
            assert await store.finish(lease, "node", completed(lease, TRAJECTORY))
        if not is_running:
            server.stop()
        with job_places(one, is_running=is_running) as places:
            manifest = make_backup(places, tmp_path / "backup")
    assert (manifest.states, manifest.counts["rollouts"]) == (["node-0", "node-1"], 1)
    with job_places(other, is_running=False) as places:
        restore_backup(tmp_path / "backup", places)
    assert [await live(other.state(slot)) for slot in range(2)] == users
    with job_places(other, is_running=False) as places:
        [shared] = places.shared
        async with await opened(shared.redis, other) as store:
            assert await store.trajectory("r") == TRAJECTORY


@pytest.mark.redis
def test_a_backup_that_is_killed_leaves_no_redis_on_the_files_of_the_job(tmp_path):
    script = f"""
import time
from pathlib import Path
from tests.integration.backup.test_backup_slurm import job, job_places, program
with job_places(job(Path({str(tmp_path / "job")!r}), nodes=2, redis_server=program()), is_running=False):
    print(flush=True)
    time.sleep(60)
"""
    with psutil.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as killed:
        assert killed.stdout.readline()
        [redis] = killed.children()
        killed.kill()
    redis.wait(10)


async def test_a_job_that_begins_during_a_backup_waits_with_its_redis(tmp_path, monkeypatch):
    monkeypatch.setattr(redis_server_of_jobs, "LOOK_SECONDS", 0.01)
    made, claims = job(tmp_path / "job", nodes=2), []
    with structlog.testing.capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            with _claimed(made):
                tasks.start_soon(collect, claims, partial(wait_for_files, made, anyio.Event()))
                await until(lambda: logs)
                assert claims == []
    [claim] = claims
    with pytest.raises(StoreError, match="another Redis has the files") as caught, job_places(made, is_running=False):
        raise AssertionError("it began")
    assert "run the command again" in caught.value.hint
    claim.release()


async def test_a_job_that_is_to_end_waits_for_no_backup(tmp_path):
    made, stopping = job(tmp_path / "job", nodes=2), anyio.Event()
    stopping.set()
    with _claimed(made):
        assert await wait_for_files(made, stopping) is None


@pytest.mark.redis
async def test_nodes_that_joined_a_job_have_their_own_state_alone(tmp_path):
    home, guest = job(tmp_path / "home", nodes=2), job(tmp_path / "guest")
    guest.save(Submitted(job="", spec=JobSpec(name="guest", join=home.path)))
    await live(guest.state(0))
    with job_places(guest, is_running=False) as places:
        assert (places.shared, places.owns_store) == ((), False)
        assert make_backup(places, tmp_path / "backup").states == ["node-0"]


async def test_without_the_program_the_error_says_what_to_install(tmp_path):
    with (
        pytest.raises(ConfigurationError, match="there is no program") as caught,
        job_places(job(tmp_path / "job", nodes=2, redis_server="no-redis"), is_running=False),
    ):
        raise AssertionError("it began")
    assert "install-redis" in caught.value.hint
