"""SQLite keeps the heads of groups, and no row of deleted runs."""

import sqlite3
from collections.abc import AsyncIterator

import pytest

from api_schemas.rollouts import RolloutRequest
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
)


@pytest.fixture
async def store(clock: ManualClock) -> AsyncIterator[SqliteStore]:
    async with await SqliteStore.open(":memory:", clock=clock) as made:
        yield made


async def stored_heads(store: SqliteStore) -> int:
    return await store._thread.read(lambda db: db.execute("SELECT count(*) FROM group_heads").fetchone()[0])


async def test_heads_are_made_anew_for_other_wire_models_and_kept_while_they_are_needed(store):
    await create_run(store)
    await make_ready(store, 0, 1)
    assert await stored_heads(store) == 2
    heads = await store.runs.group_heads("a", [1, 0])
    await store._thread.write(lambda db: db.execute("UPDATE group_heads SET form = x'00', json = x'' WHERE seq = 1"))
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
