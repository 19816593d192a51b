"""Deleting a session, or a user, leaves nothing of them in any file, and names what a trainer may hold."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.runs import Batch
from api_schemas.sessions import DeletedSessions
from rollout_service.live.parts.deletion import SessionDeletion
from rollout_service.store.codec import trajectories as trajectory_codec
from rollout_service.store.codec.rollouts import encode_turn_marks
from rollout_service.store.contract import EncodedSteps
from tests.support.live.parts import LiveBench, live_bench
from tests.support.live.service import stored


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[LiveBench]:
    redis = None if request.param == "sqlite" else request.getfixturevalue("shared_redis").config()
    async with live_bench(redis=redis) as made:
        yield made


async def delete(bench: LiveBench, **which: Any) -> DeletedSessions:
    return await SessionDeletion(bench.live, bench.store).delete(**which)


async def traces(bench: LiveBench, rollout_id: str) -> list[bytes]:
    """Return what the files would have of a rollout: its encoded tokens and marks, and what is in them."""
    rollout = await bench.store.get(rollout_id)
    trajectory = await bench.store.trajectory(rollout_id)
    assert trajectory is not None
    tokens = trajectory_codec.encode(trajectory)
    marks = encode_turn_marks(rollout.turn_marks).encode()
    return [tokens[20:60], marks[20:80], b"said after", b"answer 0"]


def sessions_in(batch: Batch | None) -> list[str]:
    """Return the sessions of the usable samples of a batch, which has tokens of no other."""
    samples = [sample for group in batch.groups for sample in group.samples] if batch is not None else []
    assert all((sample.rollout.trajectory is not None) == sample.usable for sample in samples)
    return [one.rollout.session.session_id for one in samples if one.usable and one.rollout.session]


async def test_no_byte_of_a_user_is_left_in_any_file(tmp_path):
    async with live_bench(tmp_path) as bench:
        await bench.create_run(live={"next_state": True})
        await bench.serve("s", [1.0, -1.0], user="u")
        await bench.drive()
        await bench.store.save_steps([EncodedSteps("run.0.0", b"a command of the user")])
        found = [*await traces(bench, "run.0.0"), b"a command of the user"]
        before = stored(tmp_path)
        assert all(trace in before for trace in (*found[:3], found[-1]))
        deleted = await delete(bench, user="u")
        assert (deleted.sessions, deleted.turns, deleted.undelivered, deleted.leased) == (1, 2, 1, [])
        left = stored(tmp_path)
        assert [trace for trace in found if trace in left] == []
        assert await bench.store.save_steps([EncodedSteps("run.0.0", b"what came later")]) == 0
        assert await bench.lease() is None
        assert (await bench.store.runs.get("run")).count("dropped:deleted") == 1


async def test_what_was_leased_is_named_and_comes_again_without_tokens(bench):
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
    assert sessions_in(again) == ["t"]
    emptied = next(one for group in again.groups for one in group.samples if not one.usable)
    assert (emptied.masked_because, emptied.reward) == ("deleted", None)
    assert (emptied.rollout.session, emptied.rollout.turn_marks) == (None, [])
    await bench.store.runs.acknowledge("run", 0)
    assert (await delete(bench, session_id="s")).sessions == 0


async def test_a_part_that_waits_in_a_run_is_never_delivered(bench):
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


@pytest.mark.parametrize("min_usable", [1, 2])
async def test_a_sample_of_an_open_group_is_never_delivered(bench, min_usable):
    await bench.create_run(group_size=2, min_usable=min_usable, filters=[])
    await bench.serve("a", [1.0], user="u", group="task")
    await bench.serve("b", [-1.0], user="v", group="task")
    for _ in range(3):
        await bench.closer.step()
        await bench.delivery.step()
        await bench.manager.step()
    await bench.work(limit=1)
    assert dict(await bench.store.runs.group_states("run")) == {0: "open"}
    (first,) = [part for part in await bench.live.parts() if part.rollout_id]
    deleted = await delete(bench, session_id=first.session_id)
    assert (deleted.undelivered, deleted.leased) == (1, [])
    await bench.drive()
    other = {"a": "b", "b": "a"}[first.session_id]
    assert sessions_in(await bench.lease()) == ([other] if min_usable == 1 else [])


async def test_what_replaced_a_failed_rollout_is_deleted_too(bench):
    await bench.create_run()
    await bench.serve("s", [1.0], user="u")
    await bench.closer.step()
    await bench.delivery.step()
    await bench.manager.step()
    (lease,) = await bench.store.claim("here", limit=1, lease_seconds=60)
    await bench.environment.recorded.open(lease.request)  # it has claimed the part
    lost = ErrorInfo(code="engine_lost", boundary=Boundary.INFERENCE, message="the engine is gone")
    await bench.store.finish(lease, "here", await bench.failed(lease, lost))
    await bench.drive()
    assert [part.rollout_id for part in await bench.live.parts()] == ["run.0.0"]
    assert await bench.store.trajectory("run.0.0.1") is not None
    await delete(bench, user="u")
    assert await bench.store.trajectory("run.0.0.1") is None
    assert await bench.lease() is None


async def test_others_keep_what_they_have(bench):
    await bench.create_run()
    await bench.serve("s", [1.0], user="u")
    await bench.serve("t", [1.0], user="v")
    await bench.drive()
    assert (await delete(bench, user="u")).sessions == 1
    batches = [await bench.lease(key=str(number)) for number in range(2)]
    assert [name for batch in batches for name in sessions_in(batch)] == ["t"]
