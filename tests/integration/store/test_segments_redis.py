"""Trajectories of a Redis store are in the shared folder, and go when their rollouts go."""

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from api_schemas.rollouts import RolloutRequest
from api_schemas.tasks import Task
from rollout_service.base.errors import ConfigurationError, RecordLostError
from rollout_service.settings import RetentionSettings
from rollout_service.store.cluster_contract import DEAD_SECONDS, NodeReport
from rollout_service.store.contract import Lease
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.segments.proof import MARK_FILE
from tests.support.clocks import ManualClock
from tests.support.redis_server import RedisServer
from tests.support.store.rollouts import TRAJECTORY, completed

pytestmark = pytest.mark.redis


async def opened(
    config: RedisConfig, folder: Path, owner: str, clock: ManualClock | None = None
) -> RedisStore:
    return await RedisStore.open(
        config, is_gone=lambda other: other != owner, files=SharedFiles(folder), owner=owner, clock=clock
    )


def report(name: str) -> NodeReport:
    return NodeReport(name, name, "http://127.0.0.1:1", [], ["calc"], [], 1, "{}")


@pytest.fixture
def config(shared_redis: RedisServer) -> RedisConfig:
    return shared_redis.config()


@pytest.fixture
async def stores(config: RedisConfig, tmp_path: Path) -> AsyncIterator[list[RedisStore]]:
    """Open the stores of two services."""
    async with await opened(config, tmp_path, "one") as one, await opened(config, tmp_path, "two") as two:
        yield [one, two]


async def leased(store: RedisStore, rollout_id: str, owner: str = "worker") -> Lease:
    await store.submit(RolloutRequest(rollout_id=rollout_id, task=Task(environment="calc")))
    (lease,) = await store.claim(owner, limit=1, lease_seconds=100)
    return lease


def files(folder: Path) -> set[str]:
    return set(SharedFiles(folder).names()) - {MARK_FILE}


async def test_every_service_reads_a_trajectory_of_which_redis_has_only_a_reference(
    stores, tmp_path, shared_redis, config
):
    one, two = stores
    lease = await leased(one, "r1")
    assert await one.finish(lease, "worker", completed(lease, TRAJECTORY))
    assert await two.trajectory("r1") == TRAJECTORY
    assert len(files(tmp_path)) == 1
    assert len(shared_redis.do("GET", f"{config.root}:t:r1")) < 64


async def test_a_trajectory_goes_with_its_rollout(stores, tmp_path):
    one, two = stores
    for number in range(3):
        lease = await leased(one, f"r{number}")
        assert await one.finish(lease, "worker", completed(lease, TRAJECTORY))
    assert (await one.segments.totals()).records == 3
    assert await two.delete_expired(0) == 3
    assert (await one.segments.totals()).records == 0
    assert files(tmp_path)  # the first service still writes to it
    await one.close()
    await two.collect_garbage()
    assert not files(tmp_path)


async def test_a_lost_lease_keeps_no_trajectory(stores):
    one, two = stores
    lease = await leased(one, "r1")
    await one.release("worker")
    assert not await one.finish(lease, "worker", completed(lease, TRAJECTORY))
    assert (await two.segments.totals()).records == 0
    assert await two.trajectory("r1") is None


async def test_a_service_that_was_taken_for_dead_writes_to_another_file(stores, tmp_path):
    one, two = stores
    first = await leased(one, "r1")
    assert await one.finish(first, "worker", completed(first, TRAJECTORY))
    second = await leased(one, "r2")
    await two.delete_expired(0)
    await two.collect_garbage()  # the first service's file is sealed and deleted
    assert not files(tmp_path)
    assert await one.finish(second, "worker", completed(second, TRAJECTORY))
    assert await two.trajectory("r2") == TRAJECTORY


async def test_a_trajectory_whose_file_is_gone_is_lost_and_its_rollout_is_not(stores, tmp_path):
    one, two = stores
    lease = await leased(one, "r1")
    assert await one.finish(lease, "worker", completed(lease, TRAJECTORY))
    for name in files(tmp_path):
        SharedFiles(tmp_path).delete(name)
    with pytest.raises(RecordLostError, match="r1"):
        await two.trajectory("r1")
    rollout = await two.get("r1")
    assert rollout.reward == 1.0


async def test_a_service_with_another_folder_is_refused(stores, config, tmp_path_factory):
    assert stores
    with pytest.raises(ConfigurationError, match="folder"):
        await opened(config, tmp_path_factory.mktemp("other"), "three")


async def test_a_folder_of_another_store_is_refused(stores, shared_redis, tmp_path):
    assert stores
    with pytest.raises(ConfigurationError, match="another store"):
        await opened(shared_redis.config(), tmp_path, "three")


async def test_files_that_the_store_does_not_know_are_told_apart(stores, tmp_path):
    one, _ = stores
    lease = await leased(one, "r1")
    assert await one.finish(lease, "worker", completed(lease, TRAJECTORY))
    ledger = one.segments.ledger
    assert await ledger.unknown([*files(tmp_path), "cccccccccccc-1.segment"]) == ["cccccccccccc-1.segment"]


async def test_the_file_of_a_dead_node_is_closed_and_deleted_by_the_next_deletion_of_what_expired(
    config, tmp_path
):
    clock = ManualClock()
    dead = await opened(config, tmp_path, "one", clock)
    async with await opened(config, tmp_path, "two", clock) as leader:
        for store, name in ((dead, "one"), (leader, "two")):
            await store.cluster.join(report(name))
            await store.cluster.heartbeat(report(name))
            lease = await leased(store, f"of-{name}", name)
            assert await store.finish(lease, name, completed(lease, TRAJECTORY))
        await leader.runs.delete_expired(RetentionSettings())
        assert await leader.segments.ledger.orphans() == []
        for _ in range(4):
            clock.now += DEAD_SECONDS / 2
            await leader.cluster.heartbeat(report("two"))
        assert [node.state for node in await leader.cluster.nodes()] == ["dead", "ready"]
        assert await leader.trajectory("of-one") == TRAJECTORY
        while await leader.runs.delete_expired(RetentionSettings(rollout_seconds=0)):
            pass
        assert len(files(tmp_path)) == 1, "the leader still writes to its own"
        late = await leased(dead, "late", "two")
        assert await dead.finish(late, "two", completed(late, TRAJECTORY)), "it was only taken for dead"
        assert await leader.trajectory("late") == TRAJECTORY
    await dead.close()


async def test_the_deletion_of_what_expired_deletes_old_files_that_the_store_does_not_know(stores, tmp_path):
    one, two = stores
    lease = await leased(one, "r1")
    assert await one.finish(lease, "worker", completed(lease, TRAJECTORY))
    old, young = tmp_path / "cccccccccccc-1.segment", tmp_path / "dddddddddddd-1.segment"
    two_days_ago = time.time() - 2 * 86_400
    for path in (old, young, *(tmp_path / name for name in files(tmp_path))):
        path.touch()
        os.utime(path, None if path == young else (two_days_ago, two_days_ago))
    assert await two.runs.delete_expired(RetentionSettings()) == 0
    assert not old.exists()
    assert young.exists()
    assert await two.trajectory("r1") == TRAJECTORY


async def test_of_many_trajectories_the_lost_one_is_named(stores, tmp_path):
    one, two = stores
    for number in range(3):
        lease = await leased(one, f"r{number}")
        assert await one.finish(lease, "worker", completed(lease, TRAJECTORY))
        await one.segments.close()  # the next goes to another file
    ids = ["r2", "r0", "unknown", "r1"]
    assert [row["rollout_id"] for row in await two.whole_rows(ids)] == ["r2", "r0", "r1"]
    torn = min(files(tmp_path))
    (tmp_path / torn).write_bytes((tmp_path / torn).read_bytes()[:-1])
    with pytest.raises(RecordLostError, match="r0"):
        await two.whole_rows(ids)
