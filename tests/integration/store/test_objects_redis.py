"""Trajectories of a Redis store are in a real object store, and whatever fails there loses and leaves nothing."""

import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from rollout_service.base.errors import ConfigurationError, StoreError
from rollout_service.settings import StoreSettings
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.segments import s3
from rollout_service.store.segments.files import files_of
from rollout_service.store.segments.objects import ObjectFiles
from rollout_service.store.segments.proof import MARK_FILE
from tests.support.store.object_server import READER, SERVICE, STRANGER, ObjectServer, keys, object_server
from tests.support.store.rollouts import TRAJECTORY, completed, finish, leased
from tests.support.store.sharded import opened_shards, shard_configs

pytestmark = [pytest.mark.redis, pytest.mark.seaweedfs, pytest.mark.usefixtures("as_service")]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def address(shared_objects: ObjectServer) -> str:
    return shared_objects.address()


@pytest.fixture(scope="module")
def own_objects() -> Iterator[ObjectServer]:
    """Run an object store that the tests may break."""
    with object_server() as server:
        yield server


async def opened(config: RedisConfig, server: ObjectServer, address: str, owner: str) -> RedisStore:
    files = s3.open_objects(address, endpoint=server.endpoint)
    return await RedisStore.open(config, is_gone=lambda other: other != owner, files=files, owner=owner)


@pytest.fixture
async def stores(config, shared_objects, address) -> AsyncIterator[list[RedisStore]]:
    """Open the stores of two services."""
    async with (
        await opened(config, shared_objects, address, "one") as one,
        await opened(config, shared_objects, address, "two") as two,
    ):
        yield [one, two]


def segments(server: ObjectServer, address: str) -> set[str]:
    return server.objects(address).keys() - {MARK_FILE}


async def test_each_shard_has_its_trajectories_under_a_prefix_of_its_own(shared_shards, shared_objects, address):
    settings = StoreSettings(
        url=["redis://one", "redis://two"], objects=address, objects_endpoint=shared_objects.endpoint
    )
    files = [files_of(settings, number) for number in range(2)]
    names = [f"r{number}" for number in range(8)]
    async with opened_shards(shard_configs(*shared_shards), files=files, owner="one") as store:
        await finish(store, *names)
        assert {store.shard_of(name) for name in names} == {0, 1}
        for name in names:
            assert await store.trajectory(name) == TRAJECTORY
    kept = Counter(name.partition("/")[0] for name in shared_objects.objects(address) if MARK_FILE not in name)
    assert kept == Counter(f"shard-{store.shard_of(name)}" for name in names)


@pytest.mark.parametrize(
    ("user", "bucket", "why", "hint"),
    [
        (READER, "trajectories", "access is denied", "s3:PutObject"),
        (STRANGER, "trajectories", "refuses the credentials", "AWS_PROFILE"),
        ("operator", "no-such-bucket", "the bucket does not exist", "Create the bucket"),
    ],
)
async def test_a_bucket_that_cannot_be_used_stops_the_start(
    config, shared_objects, monkeypatch, user, bucket, why, hint
):
    for name, value in keys(user).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=why) as caught:
        await opened(config, shared_objects, shared_objects.address(bucket), "one")
    assert hint in caught.value.hint
    assert not any(value in f"{caught.value} {caught.value.hint}" for value in keys(user).values())


DIES = """
import os, signal, sys
import anyio
from rollout_service.store.segments.s3 import open_objects
from rollout_service.store.redis import RedisConfig, RedisStore
from tests.support.store.rollouts import TRAJECTORY, completed, leased

url, prefix, address, endpoint = sys.argv[1:]

async def main():
    files = open_objects(address, endpoint=endpoint)
    put = files.store

    def put_and_die(name, data):
        put(name, data)
        if name.endswith(".segment"):
            os.kill(os.getpid(), signal.SIGKILL)

    files.store = put_and_die
    store = await RedisStore.open(RedisConfig(url, prefix), is_gone=lambda _: False, files=files, owner="dies")
    lease = await leased(store, "r1")
    await store.finish(lease, "worker", completed(lease, TRAJECTORY))

anyio.run(main)
"""


async def test_an_object_whose_writer_was_killed_before_it_told_redis_is_deleted(
    stores, config, shared_objects, address
):
    arguments = [config.url, config.prefix, address, shared_objects.endpoint]
    done = await anyio.run_process([sys.executable, "-c", DIES, *arguments], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    one, two = stores
    [left] = segments(shared_objects, address)
    assert (await one.get("r1")).reward is None
    await one.release("worker")
    (lease,) = await one.claim("worker", limit=1, lease_seconds=100)
    assert await one.finish(lease, "worker", completed(lease, TRAJECTORY))
    await two.collect_garbage()
    assert left not in segments(shared_objects, address)
    assert await two.trajectory("r1") == TRAJECTORY


async def test_a_server_that_goes_away_and_comes_back_loses_nothing(config, own_objects):
    address = own_objects.address()
    async with await opened(config, own_objects, address, "one") as store:
        await finish(store, "r1")
        lease = await leased(store, "r2")
        own_objects.kill()
        with pytest.raises(StoreError, match="cannot be reached") as caught:
            await store.finish(lease, "worker", completed(lease, TRAJECTORY))
        assert "no restart is needed" in caught.value.hint
        with pytest.raises(StoreError, match="cannot be reached"):
            await store.trajectory("r1")
        await store.segments.watch.check()
        assert "cannot be reached" in str(store.segments.watch.problem)
        own_objects.start()
        await store.segments.watch.check()
        assert store.segments.watch.problem is None
        assert await store.finish(lease, "worker", completed(lease, TRAJECTORY))
        for name in ("r1", "r2"):
            assert await store.trajectory(name) == TRAJECTORY


async def test_a_server_that_does_not_answer_is_given_up_and_used_again(config, own_objects, monkeypatch):
    monkeypatch.setattr(s3, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(s3, "RETRY_SECONDS", 1.0)
    address = own_objects.address()
    async with await opened(config, own_objects, address, "one") as store:
        lease = await leased(store, "r1")
        with own_objects.paused(), pytest.raises(StoreError, match="did not answer in time"):
            await store.finish(lease, "worker", completed(lease, TRAJECTORY))
        assert await store.finish(lease, "worker", completed(lease, TRAJECTORY))
        assert await store.trajectory("r1") == TRAJECTORY
        assert await store.delete_expired(0) == 1
        await store.collect_garbage()
        assert not segments(own_objects, address), "nor is the object left that was written too late"


def test_keys_that_were_exchanged_in_a_file_are_used(own_objects, tmp_path, monkeypatch):
    for name in keys(SERVICE):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setattr(s3, "KEYS_SECONDS", 1.0)  # they are asked for all the time, but for a moment
    write_keys(tmp_path, STRANGER)
    files: ObjectFiles = s3.open_objects(own_objects.address(), endpoint=own_objects.endpoint)
    with pytest.raises(OSError, match="refuses the credentials"):
        files.store("a", b"1")
    write_keys(tmp_path, SERVICE)
    time.sleep(0.3)
    files.store("a", b"1")
    (tmp_path / "credentials").unlink()
    time.sleep(0.3)
    with pytest.raises(OSError, match="there are no credentials"):
        files.store("a", b"1")


def write_keys(folder: Path, user: str) -> None:
    lines = [f"{name.lower()} = {value}" for name, value in keys(user).items()]
    (folder / "credentials").write_text("\n".join(["[default]", *lines, ""]))
