"""SQLite keeps the heads of groups, and no row of deleted runs."""

import sqlite3
from collections.abc import AsyncIterator

import pytest

from api_schemas.rollouts import RolloutRequest
from api_schemas.runs import RunState
from rollout_service.base.errors import NotFoundError
from rollout_service.settings import RetentionSettings
from rollout_service.store.contract import EncodedSteps
from rollout_service.store.runs_contract import GroupClosure
from rollout_service.store.sqlite import SqliteStore
from tests.support.clocks import ManualClock
from tests.support.runs import (
    TASKS,
    close_group,
    create_run,
    end_all,
    leased_batch,
    make_ready,
    new_group,
    without_tokens,
)


@pytest.fixture
async def store(clock: ManualClock) -> AsyncIterator[SqliteStore]:
    async with await SqliteStore.open(":memory:", clock=clock) as made:
        yield made


async def stored_heads(store: SqliteStore) -> int:
    return await store._thread.read(lambda db: db.execute("SELECT count(*) FROM group_heads").fetchone()[0])


async def test_the_head_of_a_group_is_what_its_json_says_while_it_is_needed(store):
    await create_run(store)
    await make_ready(store, 0, 1)
    assert await stored_heads(store) == 2
    heads = await store.runs.group_heads("a", [1, 0])
    assert [head.number for head in heads] == [1, 0]
    for head in heads:
        assert head.json == without_tokens(await store.runs.group("a", head.number))
        assert head.tokens == [[3], [3]]
    with pytest.raises(NotFoundError):
        await store.runs.group_heads("a", [0, 7])
    await store._thread.write(
        lambda db: db.execute("UPDATE group_heads SET form = x'00', json = x'' WHERE seq = 1")
    )
    assert await store.runs.group_heads("a", [1, 0]) == heads, "one of other wire models is made anew"
    await store._thread.write(lambda db: db.execute("UPDATE group_heads SET tokens = '[[9]]' WHERE seq = 2"))
    assert [head.tokens for head in await store.runs.group_heads("a", [1, 0])] == [[[9]], [[3], [3]]]
    await leased_batch(store)
    await store.runs.acknowledge("a", 0)
    assert await stored_heads(store) == 0


async def test_a_dropped_group_has_no_head(store):
    await create_run(store)
    await store.runs.start_groups("a", [new_group(0), new_group(1)])
    await end_all(store)
    await close_group(store, 0, reason="zero_variance")
    await close_group(store, 1)
    assert await stored_heads(store) == 1
    await store.runs.reclose_group("a", GroupClosure(1, "stale", [], None, None, None, None))
    assert await stored_heads(store) == 0


async def all_rows(store: SqliteStore) -> dict[str, int]:
    tables = (
        "rollouts",
        "steps",
        "requests",
        "results",
        "runs",
        "groups",
        "batches",
        "tallies",
        "run_tasks",
        "group_heads",
    )

    def count(db: sqlite3.Connection) -> dict[str, int]:
        return {name: db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}

    return await store._thread.read(count)


async def test_no_row_is_left_of_what_was_deleted_by_age(store, clock):
    await create_run(store)
    await make_ready(store, 0, 1, 2, 3)
    await store.submit(RolloutRequest(rollout_id="plain", task=TASKS[0]))
    await end_all(store)
    await store.save_steps([EncodedSteps(name, b"steps") for name in ("a.0.0", "a.1.0", "plain")])
    for number in (0, 1):
        await leased_batch(store)
        await store.runs.acknowledge("a", number)
    clock.now += 11
    while await store.runs.delete_expired(RetentionSettings(ended_run_seconds=10, settled_group_seconds=10)):
        pass
    rows = await all_rows(store)
    assert rows == dict.fromkeys(rows, 0) | {"rollouts": 1, "requests": 1, "results": 1, "steps": 1}
    assert await store.runs.delete_expired(RetentionSettings(rollout_seconds=1)) == 1
    assert sum((await all_rows(store)).values()) == 0


async def with_retries(store: SqliteStore) -> None:
    """Create a dropped group whose second sample has three rollouts, and rollouts that only look like its own."""
    await create_run(store)
    await store.runs.start_groups("a", [new_group(0), new_group(1)])
    await end_all(store)
    for retry in (1, 2):
        again = RolloutRequest(rollout_id=f"a.0.1.{retry}", task=TASKS[0])
        await store.runs.retry_sample("a", 0, 1, again)
        await end_all(store)
    for name in ("a.0.1.9", "a.note"):
        await store.submit(RolloutRequest(rollout_id=name, task=TASKS[0]))
    await end_all(store)
    await close_group(store, 0, reason="too_few_usable")


async def groups_of_rollouts(store: SqliteStore) -> dict[str, tuple[int | None, int | None]]:
    def read(db: sqlite3.Connection) -> dict[str, tuple[int | None, int | None]]:
        rows = db.execute("SELECT rollout_id, run, group_number FROM rollouts")
        return {name: (run, number) for name, run, number in rows}

    return await store._thread.read(read)


GROUPS_OF_ROLLOUTS = {
    "a.0.0": (1, 0),
    "a.0.1": (1, 0),
    "a.0.1.1": (1, 0),
    "a.0.1.2": (1, 0),
    "a.1.0": (1, 1),
    "a.1.1": (1, 1),
    "a.0.1.9": (None, None),
    "a.note": (None, None),
}


async def test_the_rollouts_of_a_retried_sample_are_deleted_with_their_group(store):
    await with_retries(store)
    assert await groups_of_rollouts(store) == GROUPS_OF_ROLLOUTS
    assert await store.runs.delete_expired(RetentionSettings(settled_group_seconds=0)) == 1
    assert set(await groups_of_rollouts(store)) == {"a.1.0", "a.1.1", "a.0.1.9", "a.note"}
    assert await store.runs.delete_expired(RetentionSettings(rollout_seconds=0)) == 2, "they belong to no run"
    assert set(await groups_of_rollouts(store)) == {"a.1.0", "a.1.1"}


async def test_unacknowledged_records_are_never_deleted(store, clock):
    await create_run(store)
    await make_ready(store, 0)
    await store.runs.start_groups("a", [new_group(1)])
    await store.submit(RolloutRequest(rollout_id="queued", task=TASKS[0]))
    await store.runs.update("a", state=RunState.ENDED)
    before = await all_rows(store)
    clock.now += 1e9
    assert (
        await store.runs.delete_expired(
            RetentionSettings(ended_run_seconds=0, settled_group_seconds=0, rollout_seconds=0)
        )
        == 0
    )
    assert await all_rows(store) == before
