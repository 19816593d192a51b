"""Trajectories of a Redis store are in a shared folder or a bucket, and go when their rollouts go."""

import os
import time
from collections.abc import AsyncIterator

import pytest

from rollout_service.base.errors import RecordLostError
from rollout_service.settings import RetentionSettings
from rollout_service.store.cluster_contract import DEAD_SECONDS, NodeReport
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.redis.lost_trajectories import look
from rollout_service.store.segments import SegmentFiles
from rollout_service.store.segments.files import SharedFiles
from tests.support.clocks import ManualClock
from tests.support.store.rollouts import TRAJECTORY, completed, finish, leased
from tests.support.store.segments import segment_files
from tests.support.store.servers import PLACES, files_of

pytestmark = pytest.mark.redis


async def opened(config: RedisConfig, files: SegmentFiles, owner: str, clock: ManualClock | None = None) -> RedisStore:
    return await RedisStore.open(config, is_gone=lambda other: other != owner, files=files, owner=owner, clock=clock)


def report(name: str) -> NodeReport:
    return NodeReport(name, name, "http://127.0.0.1:1", [], ["calc"], [], 1, "{}")


async def records(store: RedisStore) -> int:
    """Return how many records are referenced."""
    return sum(map(int, await store.connection.command("HVALS", store.connection.key("segments:live"))))


@pytest.fixture(params=PLACES[1:])
def files(request: pytest.FixtureRequest) -> SegmentFiles:
    return files_of(request.param, request)


@pytest.fixture
async def stores(config: RedisConfig, files: SegmentFiles) -> AsyncIterator[list[RedisStore]]:
    """Open the stores of two services."""
    async with await opened(config, files, "one") as one, await opened(config, files, "two") as two:
        yield [one, two]


async def test_every_service_reads_a_trajectory_of_which_redis_has_only_a_reference(
    stores, files, shared_redis, config
):
    one, two = stores
    await finish(one, "r1")
    assert await two.trajectory("r1") == TRAJECTORY
    assert len(segment_files(files)) == 1
    assert len(shared_redis.do("GET", f"{config.root}:t:r1")) < 64


async def test_a_trajectory_goes_with_its_rollout(stores, files):
    one, two = stores
    await finish(one, "r0", "r1", "r2")
    assert await records(one) == 3
    assert await two.delete_expired(0) == 3
    assert await records(one) == 0
    await one.close()
    await two.collect_garbage()
    assert not segment_files(files)


async def test_a_lost_lease_keeps_no_trajectory(stores):
    one, two = stores
    lease = await leased(one, "r1")
    await one.release("worker")
    assert not await one.finish(lease, "worker", completed(lease, TRAJECTORY))
    assert await records(two) == 0
    assert await two.trajectory("r1") is None


async def test_a_trajectory_whose_file_is_gone_is_lost_and_nothing_else_is(stores, files):
    one, two = stores
    await finish(one, "r1")
    [gone] = segment_files(files)
    await finish(two, "r2")
    files.delete(gone)
    with pytest.raises(RecordLostError, match="r1"):
        await two.trajectory("r1")
    assert (await two.get("r1")).reward == 1.0
    assert await two.trajectory("r2") == TRAJECTORY
    assert [(each.rollout_id, each.file) for each in (await look(two.connection, files)).lost] == [("r1", gone)]


async def test_the_file_of_a_dead_node_is_closed_and_deleted_by_the_next_deletion_of_what_expired(config, tmp_path):
    clock, files = ManualClock(), SharedFiles(tmp_path)
    dead = await opened(config, files, "one", clock)
    async with await opened(config, files, "two", clock) as leader:
        for store, name in ((dead, "one"), (leader, "two")):
            await store.cluster.join(report(name))
            await store.cluster.heartbeat(report(name))
            await finish(store, f"of-{name}", owner=name)
        await leader.runs.delete_expired(RetentionSettings())
        assert await leader.segments.ledger.orphans() == []
        for _ in range(4):
            clock.now += DEAD_SECONDS / 2
            await leader.cluster.heartbeat(report("two"))
        assert [node.state for node in await leader.cluster.nodes()] == ["dead", "ready"]
        assert await leader.trajectory("of-one") == TRAJECTORY
        while await leader.runs.delete_expired(RetentionSettings(rollout_seconds=0)):
            pass
        assert len(segment_files(files)) == 1, "the leader still writes to its own"
        late = await leased(dead, "late", "two")
        assert await dead.finish(late, "two", completed(late, TRAJECTORY)), "it was only taken for dead"
        assert await leader.trajectory("late") == TRAJECTORY
    await dead.close()


async def test_the_deletion_of_what_expired_deletes_old_files_that_the_store_does_not_know(config, tmp_path):
    async with await opened(config, SharedFiles(tmp_path), "one") as store:
        await finish(store, "r1")
        known = segment_files(SharedFiles(tmp_path))
        old, young = tmp_path / "cccccccccccc-1.segment", tmp_path / "dddddddddddd-1.segment"
        two_days_ago = time.time() - 2 * 86_400
        for path in (old, young, *(tmp_path / name for name in known)):
            path.touch()
            os.utime(path, None if path == young else (two_days_ago, two_days_ago))
        assert await store.runs.delete_expired(RetentionSettings()) == 0
        assert (old.exists(), young.exists()) == (False, True)
        assert await store.trajectory("r1") == TRAJECTORY


async def test_of_many_trajectories_the_lost_one_is_named(stores, files):
    one, two = stores
    for number in range(3):
        await finish(one, f"r{number}")
        await one.segments.close()  # the next goes to another file
    ids = ["r2", "r0", "unknown", "r1"]
    assert [row["rollout_id"] for row in await two.whole_rows(ids)] == ["r2", "r0", "r1"]
    torn = min(segment_files(files))
    files.overwrite(torn, files.sizes()[torn] - 1, 1)
    with pytest.raises(RecordLostError, match="r0"):
        await two.whole_rows(ids)
