"""Deleting a session, or a user, leaves nothing of them in any file, and names what a trainer may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from api_schemas.sessions import DeletedSessions
from rollout_service.live.parts.deletion import SessionDeletion
from rollout_service.store.codec import trajectories as trajectory_codec
from rollout_service.store.codec import turn_marks
from rollout_service.store.steps_contract import EncodedSteps
from tests.support.live.parts import LiveBench, live_bench

pytestmark = pytest.mark.anyio


async def delete(bench: LiveBench, **which: Any) -> DeletedSessions:
    return await SessionDeletion(bench.live, bench.store, bench.store.runs).delete(**which)


def read_all(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir() if file.is_file())


async def traces(bench: LiveBench, rollout_id: str) -> list[bytes]:
    """Return what the files would have of a rollout: its encoded tokens and marks, and what is in them."""
    rollout = await bench.store.get(rollout_id)
    assert rollout is not None
    trajectory = await bench.store.trajectory(rollout_id)
    assert trajectory is not None
    tokens = trajectory_codec.encode(trajectory)
    marks = turn_marks.encode(rollout.turn_marks).encode()
    return [tokens[20:60], marks[20:80], b"said after", b"answer 0"]


async def test_no_byte_of_a_user_is_left_in_any_file(tmp_path: Path) -> None:
    async with live_bench(tmp_path) as bench:
        await bench.create_run(live={"next_state": True})
        await bench.serve("s", [1.0, -1.0], user="u")
        await bench.drive()
        await bench.store.save_steps([EncodedSteps("run.0.0", b"a command of the user")])
        found = [*await traces(bench, "run.0.0"), b"a command of the user"]
        before = await anyio.to_thread.run_sync(read_all, tmp_path)
        assert found[0] in before
        assert found[1] in before
        assert found[2] in before
        assert found[-1] in before
        deleted = await delete(bench, user="u")
        assert (deleted.sessions, deleted.turns, deleted.undelivered, deleted.leased) == (1, 2, 1, [])
        left = await anyio.to_thread.run_sync(read_all, tmp_path)
        assert [trace for trace in found if trace in left] == []
        assert await bench.store.save_steps([EncodedSteps("run.0.0", b"what came later")]) == 0
        assert await bench.lease() is None
        assert (await bench.store.runs.get("run")).count("dropped:deleted") == 1


async def test_what_was_leased_is_named_and_comes_again_without_tokens() -> None:
    async with live_bench() as bench:
        await bench.create_run(batch_size=2, live={"max_user_share": 0.5})
        await bench.serve("s", [1.0], user="u")
        await bench.serve("t", [1.0], user="v")
        await bench.drive()
        assert await bench.lease() is not None
        deleted = await delete(bench, session_id="s")
        assert deleted.undelivered == 0
        (leased,) = deleted.leased
        assert (leased.session_id, leased.part, leased.run_id, leased.batch_id) == ("s", 0, "run", "run.b0")
        await bench.store.runs.give_back("run", 0)
        again = await bench.lease(key="another")
        assert again is not None
        by_group = {group.number: group.samples[0] for group in again.groups}
        emptied = next(sample for sample in by_group.values() if not sample.usable)
        assert (emptied.masked_because, emptied.reward) == ("deleted", None)
        assert emptied.rollout.trajectory is None
        assert emptied.rollout.turn_marks == []
        kept = next(sample for sample in by_group.values() if sample.usable)
        assert kept.rollout.trajectory is not None
        await bench.store.runs.acknowledge("run", 0)
        assert (await delete(bench, session_id="s")).sessions == 0


async def test_a_part_that_waits_in_a_run_is_never_delivered() -> None:
    async with live_bench() as bench:
        await bench.create_run()
        await bench.serve("s", [1.0], user="u")
        await bench.closer.step()
        await bench.delivery.step()
        deleted = await delete(bench, user="u")
        assert (deleted.undelivered, deleted.leased) == (1, [])
        await bench.drive()
        assert await bench.lease() is None
        counts = await bench.live.counts()
        assert (counts["served"], counts["dropped:opted_out"], counts["waiting"]) == (1, 1, 0)


async def test_a_store_that_cannot_erase_drops_what_waits_and_names_the_rest() -> None:
    async with live_bench() as bench:
        await bench.create_run()
        await bench.serve("leased", [1.0], user="u")
        await bench.drive()
        assert await bench.lease() is not None
        await bench.serve("waiting", [1.0], user="u")
        await bench.drive()
        deleted = await SessionDeletion(bench.live, bench.store).delete(user="u")
        assert [(part.session_id, part.batch_id) for part in deleted.leased] == [("leased", "run.b0")]
        assert deleted.undelivered == 1
        assert await bench.lease(key="another") is None
        assert (await bench.store.runs.get("run")).count("dropped:deleted") == 1
        names = [f"run.{number}.0" for number in range(2)]
        assert await bench.store.save_steps([EncodedSteps(name, b"steps") for name in names]) == 0


async def test_others_keep_what_they_have() -> None:
    async with live_bench() as bench:
        await bench.create_run()
        await bench.serve("s", [1.0], user="u")
        await bench.serve("t", [1.0], user="v")
        await bench.drive()
        assert (await delete(bench, user="u")).sessions == 1
        batches = [await bench.lease(key=str(number)) for number in range(2)]
        sessions = [
            sample.rollout.session.session_id
            for batch in batches
            if batch is not None
            for group in batch.groups
            for sample in group.samples
            if sample.rollout.session is not None
        ]
        assert sessions == ["t"]
