"""What a store's folder lacks is named, and another folder takes its place without a restart."""

import os
import shutil
from pathlib import Path

import pytest

from rollout_service.base.errors import ConfigurationError, RecordLostError
from rollout_service.cluster.identity import is_gone
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.redis.lost_trajectories import begin_again, look
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.segments.proof import MARK_FILE
from tests.support.store.rollouts import TRAJECTORY, completed, finish, leased

pytestmark = pytest.mark.redis


async def opened(config: RedisConfig, folder: Path, owner: str = "one") -> RedisStore:
    return await RedisStore.open(config, is_gone=is_gone, files=SharedFiles(folder), owner=owner)


async def test_the_trajectories_of_a_deleted_file_are_named_and_no_others(config, tmp_path):
    files = SharedFiles(tmp_path)
    async with await opened(config, tmp_path) as one, await opened(config, tmp_path, "two") as two:
        assert not (await look(one.connection, files)).lost
        await finish(one, "a", "b")
        gone = files.sizes().keys() - {MARK_FILE}
        await finish(two, "c")
        for name in gone:
            files.delete(name)
        report = await look(one.connection, files)
        assert (report.problem, report.referenced) == (None, 3)
        assert {(each.rollout_id, each.file, each.environment) for each in report.lost} == {
            (name, *gone, "calc") for name in ("a", "b")
        }
        assert report.by_run() == {None: 2}


async def test_a_file_that_was_cut_off_has_lost_only_its_end(config, tmp_path):
    async with await opened(config, tmp_path) as store:
        await finish(store, "a", "b")
        files = SharedFiles(tmp_path)
        [(name, size)] = [found for found in files.sizes().items() if found[0] != MARK_FILE]
        os.truncate(tmp_path / name, size - 1)
        report = await look(store.connection, files)
        assert [each.rollout_id for each in report.lost] == ["b"]


async def test_a_folder_that_is_there_is_not_replaced(config, tmp_path):
    async with await opened(config, tmp_path) as store:
        with pytest.raises(ConfigurationError, match="is the store's") as caught:
            await begin_again(store.connection, SharedFiles(tmp_path))
        assert caught.value.hint


async def test_a_lost_folder_is_replaced_and_what_turns_up_is_read_again(config, tmp_path):
    folder = tmp_path / "shared"
    async with await opened(config, folder) as store:
        await finish(store, "a")
        folder.rename(tmp_path / "lost")
        report = await look(store.connection, SharedFiles(folder))
        assert report.problem is not None
        assert [each.rollout_id for each in report.lost] == ["a"]
        await begin_again(store.connection, SharedFiles(folder))
        await store.segments.watch.check()
        await finish(store, "b")
        assert await store.trajectory("b") is not None
        with pytest.raises(RecordLostError, match="a"):
            await store.trajectory("a")
        for name in SharedFiles(tmp_path / "lost").sizes().keys() - {MARK_FILE}:
            shutil.copy(tmp_path / "lost" / name, folder)
        assert await store.trajectory("a") is not None
        assert not (await look(store.connection, SharedFiles(folder))).lost


async def test_no_result_is_stored_in_the_folder_before_by_a_service_that_still_sees_it(config, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    async with await opened(config, old) as store:
        await finish(store, "a")
        await begin_again(store.connection, SharedFiles(new))
        lease = await leased(store, "b")
        with pytest.raises(Exception, match="other services of this store use"):
            await store.finish(lease, "worker", completed(lease, TRAJECTORY))
        old.rename(tmp_path / "away")
        new.rename(old)
        assert await store.finish(lease, "worker", completed(lease, TRAJECTORY))
        assert await store.trajectory("b") is not None
