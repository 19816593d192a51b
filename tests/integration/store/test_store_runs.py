"""Runs, groups and batches keep their contract in examples, and files of earlier releases are upgraded."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.runs import FileTasks, Group, InlineTasks, RunRequest, RunState
from api_schemas.tasks import Task
from api_schemas.trajectories import FinishReason, ForkReason, Segment, Trajectory
from rollout_service.errors import ConflictError, NotFoundError, StoreError
from rollout_service.store.codec.heads import group_json
from rollout_service.store.columns import COLUMNS
from rollout_service.store.runs_contract import (
    BatchLease,
    BatchLeaseRequest,
    ClosedSample,
    GroupClosure,
    NewGroup,
    NoBatch,
    RetentionPolicy,
)
from rollout_service.store.sqlite import SqliteStore, schema

pytestmark = pytest.mark.anyio

TASKS = [Task(environment="calc", instance={"n": n}) for n in range(4)]


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(clock: Clock) -> AsyncIterator[SqliteStore]:
    async with await SqliteStore.open(":memory:", clock=clock) as made:
        yield made


def order(**fields: object) -> RunRequest:
    given = {"run_id": "a", "source": InlineTasks(tasks=TASKS), "batch_size": 2, "group_size": 2}
    return RunRequest.model_validate(given | fields)


async def create(store: SqliteStore, **fields: object) -> None:
    request = order(**fields)
    tasks = len(request.source.tasks) if isinstance(request.source, InlineTasks) else 4
    await store.runs.create(request, tasks=tasks, digest=None, version=0)


def new_group(number: int, size: int = 2) -> NewGroup:
    requests = [RolloutRequest(rollout_id=f"a.{number}.{s}", task=TASKS[number % 4]) for s in range(size)]
    return NewGroup(number, number // 4, requests)


def trajectory(version: int) -> Trajectory:
    segment = Segment(
        token_ids=[5, 6, 7],
        loss_mask=[0, 1, 1],
        logprobs=[0.0, -0.5, -0.25],
        versions=[-1, version, version + 1],
        turn_ids=[-1, 0, 0],
        fork_reason=ForkReason.FIRST,
    )
    return Trajectory(
        segments=[segment],
        messages=[],
        finish_reasons=[FinishReason.STOP],
        fork_counts={ForkReason.FIRST: 1},
    )


async def end_all(store: SqliteStore, version: int = 0, *, made: Trajectory | None = None) -> None:
    for lease in await store.claim("w", limit=1_000, lease_seconds=1e6):
        result = Rollout(
            rollout_id=lease.rollout_id,
            state=RolloutState.COMPLETED,
            task=lease.request.task,
            pool="policy",
            reward=float(lease.rollout_id.endswith("1")),
            created_at=lease.created_at,
            trajectory=made or trajectory(version),
        )
        assert await store.finish(lease, "w", result)


async def close(store: SqliteStore, number: int, *, reason: str | None = None, version: int = 0) -> None:
    samples = [ClosedSample(s, f"a.{number}.{s}", True, None, float(s), None) for s in range(2)]
    await store.runs.close_group("a", GroupClosure(number, reason, samples, 0.5, 0.5, version, version))


async def make_ready(store: SqliteStore, *numbers: int, version: int = 0) -> None:
    assert await store.runs.start_groups("a", [new_group(number) for number in numbers]) == len(numbers)
    await end_all(store, version)
    for number in numbers:
        await close(store, number, version=version)


async def lease(store: SqliteStore, key: str = "k", seconds: float = 60) -> BatchLease | NoBatch:
    return await store.runs.lease(BatchLeaseRequest("a", key, seconds))


async def leased(store: SqliteStore, key: str = "k") -> BatchLease:
    batch = await lease(store, key)
    assert isinstance(batch, BatchLease)
    return batch


async def test_a_run_is_made_once(store: SqliteStore) -> None:
    first, new = await store.runs.create(order(), tasks=4, digest=None, version=3)
    again, newer = await store.runs.create(order(), tasks=4, digest=None, version=9)
    assert (new, newer) == (True, False)
    assert first == again
    assert (first.version, first.first_version, first.total, first.state) == (3, 3, 4, RunState.RUNNING)
    with pytest.raises(ConflictError):
        await store.runs.create(order(group_size=3), tasks=4, digest=None, version=0)
    with pytest.raises(NotFoundError):
        await store.runs.get("b")
    assert await store.runs.inline_tasks("a", first=1, limit=2) == TASKS[1:3]


async def test_the_cursor_moves_with_the_groups(store: SqliteStore) -> None:
    await create(store)
    assert await store.runs.start_groups("a", [new_group(1)]) == 0, "a task would be skipped"
    assert await store.runs.start_groups("a", [new_group(0), new_group(1)]) == 2
    assert await store.runs.start_groups("a", [new_group(1)]) == 0, "a task would come twice"
    run = await store.runs.get("a")
    assert (run.cursor, run.count("open")) == (2, 2)
    groups = await store.runs.open_groups("a")
    assert [[member.rollout_id for member in group.members] for group in groups] == [
        ["a.0.0", "a.0.1"],
        ["a.1.0", "a.1.1"],
    ]
    await store.runs.update("a", state=RunState.PAUSED)
    assert await store.runs.start_groups("a", [new_group(2)]) == 0


async def test_members_report_their_versions(store: SqliteStore) -> None:
    await create(store)
    await store.runs.start_groups("a", [new_group(0)])
    await end_all(store, version=4)
    (group,) = await store.runs.open_groups("a")
    assert {(member.oldest_version, member.newest_version) for member in group.members} == {(4, 5)}


async def test_a_retried_sample_is_counted(store: SqliteStore) -> None:
    await create(store)
    await store.runs.start_groups("a", [new_group(0)])
    again = RolloutRequest(rollout_id="a.0.1.1", task=TASKS[0])
    await store.runs.retry_sample("a", 0, 1, again)
    await store.runs.mark_stragglers("a", 0, [0])
    (group,) = await store.runs.open_groups("a")
    assert [member.rollout_id for member in group.members] == ["a.0.0", "a.0.1.1"]
    assert [member.is_straggler for member in group.members] == [True, False]
    assert (await store.runs.get("a")).count("retried") == 1


async def test_a_batch_is_leased_acknowledged_and_never_comes_again(store: SqliteStore) -> None:
    await create(store)
    await make_ready(store, 0)
    assert await lease(store) == NoBatch(over=False, due=math.inf)
    await make_ready(store, 1)
    batch = await leased(store)
    assert (batch.batch_id, batch.groups, batch.delivery) == ("a.b0", [0, 1], 1)
    group = await store.runs.group("a", 0)
    assert [sample.rollout.trajectory for sample in group.samples] == [trajectory(0)] * 2
    await store.runs.acknowledge("a", 0)
    await store.runs.acknowledge("a", 0)
    with pytest.raises(ConflictError):
        await store.runs.give_back("a", 0)
    assert await lease(store) == NoBatch(over=False, due=math.inf)
    run = await store.runs.get("a")
    assert (run.count("acknowledged"), run.count("batched"), run.count("batches:acknowledged")) == (2, 0, 1)


async def test_repeating_a_key_returns_the_same_batch(store: SqliteStore) -> None:
    await create(store)
    await make_ready(store, 0, 1, 2, 3)
    first, again, other = await leased(store), await leased(store), await leased(store, "other")
    assert (first.number, again.number, other.number) == (0, 0, 1)
    assert again.delivery == 1


async def test_an_unacknowledged_batch_is_delivered_again(store: SqliteStore, clock: Clock) -> None:
    await create(store)
    await make_ready(store, 0, 1)
    await leased(store)
    waiting = await lease(store, "other")
    assert waiting == NoBatch(over=False, due=clock.now + 60)
    clock.now += 60
    second = await leased(store, "other")
    assert (second.number, second.delivery, second.groups) == (0, 2, [0, 1])
    await store.runs.give_back("a", 0)
    assert (await leased(store, "third")).delivery == 3
    await store.runs.acknowledge("a", 0)


async def test_the_last_batch_may_be_smaller_and_ends_the_run(store: SqliteStore) -> None:
    await create(store, source=InlineTasks(tasks=TASKS[:3]))
    await make_ready(store, 0, 1, 2)
    assert (await leased(store)).groups == [0, 1]
    last = await leased(store, "other")
    assert last.groups == [2]
    await store.runs.acknowledge("a", 0)
    assert (await store.runs.get("a")).state is RunState.RUNNING
    await store.runs.acknowledge("a", 1)
    assert (await store.runs.get("a")).state is RunState.FINISHED
    assert await lease(store) == NoBatch(over=True, due=math.inf)


async def mask(store: SqliteStore, bound: int, *, usable: int = 0) -> list[int]:
    """Mask all but `usable` samples of each stale group; return the groups' numbers."""
    groups = await store.runs.stale_groups("a", bound)
    for group in groups:
        samples = [
            ClosedSample(s, f"a.{group.number}.{s}", True, None, float(s), None)
            if s < usable
            else ClosedSample(s, f"a.{group.number}.{s}", False, "stale", None, None)
            for s in range(2)
        ]
        left = bound if usable else None
        reason = None if usable else "stale"
        await store.runs.reclose_group(
            "a", GroupClosure(group.number, reason, samples, None, None, left, left)
        )
    return [group.number for group in groups]


async def test_stale_groups_are_dropped_and_counted(store: SqliteStore) -> None:
    await create(store, max_staleness=1)
    await make_ready(store, 0, version=0)
    await make_ready(store, 1, 2, version=2)
    await store.runs.update("a", version=2)
    assert await lease(store) == NoBatch(over=False, due=math.inf, stale=True)
    assert await mask(store, 1) == [0]
    assert await mask(store, 1) == []
    batch = await leased(store)
    assert (batch.groups, batch.dropped, batch.version) == ([1, 2], {"stale": 1}, 2)
    run = await store.runs.get("a")
    assert (run.count("masked"), run.count("masked:stale")) == (2, 2)
    assert (await store.runs.update("a", version=1)).version == 2, "a version never goes back"


async def test_a_batch_that_grew_too_old_is_dissolved(store: SqliteStore, clock: Clock) -> None:
    await create(store, max_staleness=1)
    await make_ready(store, 0, version=0)
    await make_ready(store, 1, version=2)
    await leased(store)
    clock.now += 61
    await store.runs.update("a", version=2)
    assert await lease(store, "other") == NoBatch(over=False, due=math.inf, stale=True)
    with pytest.raises(ConflictError, match="dissolved"):
        await store.runs.acknowledge("a", 0)
    assert await mask(store, 1) == [0]
    assert isinstance(await lease(store, "other"), NoBatch)
    await make_ready(store, 2, version=2)
    assert (await leased(store)).groups == [1, 2]


async def test_a_lease_is_renewed_while_it_is_held(store: SqliteStore, clock: Clock) -> None:
    await create(store)
    await make_ready(store, 0, 1)
    await leased(store)
    clock.now += 50
    until = await store.runs.renew_batch("a", 0, key="k", seconds=60)
    assert until.timestamp() == clock.now + 60
    clock.now += 59
    assert isinstance(await lease(store, "other"), NoBatch)
    clock.now += 2
    await store.runs.renew_batch("a", 0, key=None, seconds=60)
    assert isinstance(await lease(store, "other"), NoBatch), "it ran out, and nobody had it"
    clock.now += 61
    assert (await leased(store, "other")).delivery == 2
    with pytest.raises(ConflictError, match="leased by another"):
        await store.runs.renew_batch("a", 0, key="k", seconds=60)
    await store.runs.acknowledge("a", 0)
    with pytest.raises(ConflictError, match="acknowledged"):
        await store.runs.renew_batch("a", 0, key="other", seconds=60)
    with pytest.raises(NotFoundError):
        await store.runs.renew_batch("a", 1, key=None, seconds=60)


async def test_a_returned_batch_that_grew_too_old_is_dissolved_before_a_lease(store: SqliteStore) -> None:
    await create(store, max_staleness=1)
    await make_ready(store, 0, version=0)
    await make_ready(store, 1, version=2)
    await leased(store)
    assert await store.runs.stale_groups("a", 1) == [], "it is in the trainer's hands"
    await store.runs.give_back("a", 0)
    assert await mask(store, 1, usable=1) == [0]
    run = await store.runs.get("a")
    assert (run.count("ready"), run.count("masked:stale")) == (2, 1)
    assert (await leased(store)).groups == [0, 1]
    (head,) = await store.runs.group_heads("a", [0])
    assert [len(one) for one in head.tokens] == [1, 0], "stale tokens are left out"
    assert [len(one) for one in await store.runs.columns("a", 0)] == head.tokens[0]
    for read in (Group.model_validate_json(head.json), await store.runs.group("a", 0)):
        assert [sample.rollout.trajectory is None for sample in read.samples] == [False, True]
        assert read.samples[1].rollout.reward == 1.0
    assert [sample.usable for sample in head.samples] == [True, False]
    exported = await store.runs.exported_samples("a", 0)
    assert all(one.sample.rollout.trajectory is not None for one in exported)
    await store.runs.reclose_group("a", GroupClosure(0, "stale", [], None, None, None, None))
    assert (await store.runs.get("a")).count("batched") == 2, "only what waits is revised"


async def test_a_consumer_may_ask_for_stale_groups(store: SqliteStore) -> None:
    await create(store, max_staleness=0)
    await make_ready(store, 0, 1, version=0)
    await store.runs.update("a", version=5)
    batch = await store.runs.lease(BatchLeaseRequest("a", "k", 60, allow_stale=True))
    assert isinstance(batch, BatchLease)


async def test_dropped_groups_are_reported_with_the_next_batch(store: SqliteStore) -> None:
    await create(store)
    await store.runs.start_groups("a", [new_group(n) for n in range(4)])
    await end_all(store)
    for number in range(4):
        await close(store, number, reason=None if number % 2 else "zero_variance")
    batch = await leased(store)
    assert (batch.groups, batch.dropped) == ([1, 3], {"zero_variance": 2})
    await close(store, 0)
    assert (await store.runs.get("a")).count("dropped:zero_variance") == 2, "dropped is for good"


async def test_tasks_are_appended_once(store: SqliteStore) -> None:
    await create(store, source=InlineTasks(open=True))
    assert (await store.runs.append("a", TASKS[:2], offset=0, close=False)).tasks == 2
    assert (await store.runs.append("a", TASKS[:2], offset=0, close=False)).tasks == 2
    with pytest.raises(ConflictError, match="2 tasks, not 1"):
        await store.runs.append("a", TASKS, offset=1, close=False)
    closed = await store.runs.append("a", TASKS[2:], offset=2, close=True)
    assert (closed.tasks, closed.total) == (4, 4)
    assert (await store.runs.append("a", TASKS[2:], offset=2, close=True)).tasks == 4
    with pytest.raises(ConflictError, match="takes no more tasks"):
        await store.runs.append("a", TASKS, offset=None, close=False)


async def test_a_run_that_is_over_stays_over(store: SqliteStore) -> None:
    await create(store)
    problem = ErrorInfo(code="c", boundary=Boundary.SERVICE, message="m")
    assert (await store.runs.update("a", state=RunState.PAUSED, problem=problem)).problem == problem
    assert (await store.runs.update("a", state=RunState.RUNNING)).problem is None
    await store.runs.update("a", state=RunState.ENDED)
    assert (await store.runs.update("a", state=RunState.ENDED)).state is RunState.ENDED
    with pytest.raises(ConflictError):
        await store.runs.update("a", state=RunState.RUNNING)
    assert list(await store.runs.active()) == []
    assert await lease(store) == NoBatch(over=True, due=math.inf)


async def test_only_what_is_settled_is_pruned(store: SqliteStore, clock: Clock) -> None:
    await create(store, source=FileTasks(path="/x.jsonl", environment="calc", epochs=None))
    await make_ready(store, 0, 1, 2, 3)
    await leased(store)
    await store.runs.acknowledge("a", 0)
    await leased(store, "held")
    assert await store.runs.prune("a", seconds=10, max_bytes=None) == 0
    clock.now += 10
    assert await store.runs.prune("a", seconds=10, max_bytes=None) == 2
    assert (await store.runs.group("a", 0)).samples[0].rollout.trajectory is None
    assert (await store.runs.group("a", 2)).samples[0].rollout.trajectory == trajectory(0)
    await store.runs.acknowledge("a", 1)
    assert await store.runs.prune("a", seconds=None, max_bytes=0) == 2


async def test_waiting_sees_every_change(store: SqliteStore) -> None:
    seen = await store.runs.wait_for_change(0)
    await create(store)
    seen = await store.runs.wait_for_change(seen)
    await store.runs.start_groups("a", [new_group(0)])
    await end_all(store)
    seen = await store.runs.wait_for_change(seen)
    delivered = await store.runs.wait_for_delivery(0)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.runs.wait_for_delivery, delivered)
            await close(store, 0)


async def test_a_file_of_version_1_is_upgraded(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    old = sqlite3.connect(path, isolation_level=None)
    old.executescript(schema.MIGRATIONS[0])
    old.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    old.execute("PRAGMA user_version = 1")
    old.execute(
        "INSERT INTO rollouts (rollout_id, fingerprint, state, created_at, queued_at, changed_at)"
        " VALUES ('r', x'00', 'queued', 1, 1, 1)"
    )
    request = RolloutRequest(rollout_id="r", task=TASKS[0])
    old.execute("INSERT INTO requests VALUES (1, ?)", (request.model_dump_json(),))
    old.close()
    async with await SqliteStore.open(path) as store:
        rollout = await store.get("r")
        assert rollout is not None
        assert rollout.state is RolloutState.QUEUED
        await create(store)
        await store.runs.start_groups("a", [new_group(0)])
        await end_all(store)
        assert (await store.trajectory("r")) == trajectory(0)
    async with await SqliteStore.open(path) as store:
        assert (await store.runs.get("a")).cursor == 1


def without_tokens(group: Group) -> bytes:
    """Return a group's JSON as in the JSON response, with empty token columns."""
    told = json.loads(group_json(group))
    for sample in told["samples"]:
        for segment in (sample["rollout"]["trajectory"] or {"segments": []})["segments"]:
            segment |= {name: [] for name in COLUMNS}
    return json.dumps(told, separators=(",", ":")).encode()


async def stored_heads(store: SqliteStore) -> int:
    return await store._read(lambda db: db.execute("SELECT count(*) FROM group_heads").fetchone()[0])


async def test_the_head_of_a_group_is_what_its_json_says_while_it_is_needed(store: SqliteStore) -> None:
    await create(store)
    await make_ready(store, 0, 1)
    assert await stored_heads(store) == 2
    heads = await store.runs.group_heads("a", [1, 0])
    assert [head.number for head in heads] == [1, 0]
    for head in heads:
        assert head.json == without_tokens(await store.runs.group("a", head.number))
        assert head.tokens == [[3], [3]]
    with pytest.raises(NotFoundError):
        await store.runs.group_heads("a", [0, 7])
    await store._write(lambda db: db.execute("UPDATE group_heads SET form = x'00', json = x'' WHERE seq = 1"))
    assert await store.runs.group_heads("a", [1, 0]) == heads, "one of another release is made anew"
    await store._write(lambda db: db.execute("UPDATE group_heads SET tokens = '[[9]]' WHERE seq = 2"))
    assert [head.tokens for head in await store.runs.group_heads("a", [1, 0])] == [[[9]], [[3], [3]]]
    await leased(store)
    await store.runs.acknowledge("a", 0)
    assert await stored_heads(store) == 0


async def test_a_dropped_group_has_no_head(store: SqliteStore) -> None:
    await create(store)
    await store.runs.start_groups("a", [new_group(0), new_group(1)])
    await end_all(store)
    await close(store, 0, reason="zero_variance")
    await close(store, 1)
    assert await stored_heads(store) == 1
    await store.runs.reclose_group("a", GroupClosure(1, "stale", [], None, None, None, None))
    assert await stored_heads(store) == 0


async def test_a_group_that_does_not_fit_the_columns_is_delivered_as_json(store: SqliteStore) -> None:
    await create(store)
    await store.runs.start_groups("a", [new_group(0)])
    large = trajectory(0).segments[0].model_copy(update={"token_ids": [5, 6, 2**31]})
    await end_all(store, made=trajectory(0).model_copy(update={"segments": [large]}))
    await close(store, 0)
    found = (await store.runs.group("a", 0)).samples[0].rollout.trajectory
    assert found is not None
    assert found.segments == [large]
    with pytest.raises(OverflowError):
        await store.runs.group_heads("a", [0])


async def test_groups_of_a_file_of_version_3_are_delivered_as_before(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "store.sqlite3"
    async with await SqliteStore.open(path, clock=clock) as store:
        await create(store)
        await make_ready(store, 0, 1)
        heads = await store.runs.group_heads("a", [0, 1])
    old = sqlite3.connect(path, isolation_level=None)
    downgrade_to_4(old)
    for name in ("TRIGGER group_revised", "TRIGGER group_needs_no_head", "TABLE group_heads"):
        old.execute(f"DROP {name}")
    old.execute("PRAGMA user_version = 3")
    old.close()
    async with await SqliteStore.open(path, clock=clock) as store:
        assert await stored_heads(store) == 0
        assert await store.runs.group_heads("a", [0, 1]) == heads
        assert (await leased(store)).groups == [0, 1]
        await store.runs.acknowledge("a", 0)
        await make_ready(store, 2)
        assert await stored_heads(store) == 1


async def all_rows(store: SqliteStore) -> dict[str, int]:
    tables = (
        "rollouts",
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

    return await store._read(count)


async def test_settled_records_are_deleted_by_age(store: SqliteStore, clock: Clock) -> None:
    await create(store)
    await make_ready(store, 0, 1, 2, 3)
    await store.submit(RolloutRequest(rollout_id="plain", task=TASKS[0]))
    await end_all(store)
    await leased(store)
    await store.runs.acknowledge("a", 0)
    await leased(store)
    retention = RetentionPolicy(ended_runs=10, settled_groups=10)
    clock.now += 9
    assert await store.runs.delete_expired(retention) == 0
    clock.now += 1
    assert await store.runs.delete_expired(retention) == 2
    assert await store.runs.delete_expired(retention) == 0, "a batch is not acknowledged"
    assert await store.runs.closed_groups("a") == [2, 3]
    assert await store.runs.rollout_ids("a") == ["a.2.0", "a.2.1", "a.3.0", "a.3.1"]
    with pytest.raises(NotFoundError):
        await store.runs.group("a", 0)
    assert len((await store.runs.group("a", 2)).samples) == 2
    assert sum((await store.counts()).values()) == len((await store.list()).rollouts) == 5
    assert (await store.runs.get("a")).count("acknowledged") == 2
    await store.runs.acknowledge("a", 1)
    assert (await store.runs.get("a")).state is RunState.FINISHED
    clock.now += 11
    while await store.runs.delete_expired(retention):
        pass
    rows = await all_rows(store)
    assert rows == dict.fromkeys(rows, 0) | {"rollouts": 1, "requests": 1, "results": 1}
    with pytest.raises(NotFoundError):
        await store.runs.get("a")
    assert await store.runs.delete_expired(RetentionPolicy(rollouts=100)) == 0
    assert await store.runs.delete_expired(RetentionPolicy(rollouts=1)) == 1
    assert sum((await all_rows(store)).values()) == 0


async def with_retries(store: SqliteStore) -> None:
    """Create a dropped group whose second sample has three rollouts, and rollouts that only look like its own."""
    await create(store)
    await store.runs.start_groups("a", [new_group(0), new_group(1)])
    await end_all(store)
    for retry in (1, 2):
        again = RolloutRequest(rollout_id=f"a.0.1.{retry}", task=TASKS[0])
        await store.runs.retry_sample("a", 0, 1, again)
        await end_all(store)
    for name in ("a.0.1.9", "a.note"):
        await store.submit(RolloutRequest(rollout_id=name, task=TASKS[0]))
    await end_all(store)
    await close(store, 0, reason="too_few_usable")


async def groups_of_rollouts(store: SqliteStore) -> dict[str, tuple[int | None, int | None]]:
    def read(db: sqlite3.Connection) -> dict[str, tuple[int | None, int | None]]:
        rows = db.execute("SELECT rollout_id, run, group_number FROM rollouts")
        return {name: (run, number) for name, run, number in rows}

    return await store._read(read)


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


async def test_the_rollouts_of_a_retried_sample_are_deleted_with_their_group(store: SqliteStore) -> None:
    await with_retries(store)
    assert await groups_of_rollouts(store) == GROUPS_OF_ROLLOUTS
    assert await store.runs.delete_expired(RetentionPolicy(settled_groups=0)) == 1
    assert set(await groups_of_rollouts(store)) == {"a.1.0", "a.1.1", "a.0.1.9", "a.note"}
    assert await store.runs.delete_expired(RetentionPolicy(rollouts=0)) == 2, "they belong to no run"
    assert set(await groups_of_rollouts(store)) == {"a.1.0", "a.1.1"}


def downgrade_to_4(db: sqlite3.Connection) -> None:
    db.execute("DROP INDEX rollouts_of_group")
    for column in ("run", "group_number"):
        db.execute(f"ALTER TABLE rollouts DROP COLUMN {column}")
    db.execute("PRAGMA user_version = 4")


async def test_the_rollouts_of_a_file_of_version_4_find_their_groups(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    async with await SqliteStore.open(path) as store:
        await with_retries(store)
    old = sqlite3.connect(path, isolation_level=None)
    downgrade_to_4(old)
    old.close()
    async with await SqliteStore.open(path) as store:
        assert await groups_of_rollouts(store) == GROUPS_OF_ROLLOUTS
    upgraded = sqlite3.connect(path, isolation_level=None)
    with pytest.raises(sqlite3.IntegrityError, match="a terminal rollout never changes"):
        upgraded.execute("UPDATE rollouts SET run = 7")
    upgraded.close()


async def test_unacknowledged_records_are_never_deleted(store: SqliteStore, clock: Clock) -> None:
    await create(store)
    await make_ready(store, 0)
    await store.runs.start_groups("a", [new_group(1)])
    await store.submit(RolloutRequest(rollout_id="queued", task=TASKS[0]))
    await store.runs.update("a", state=RunState.ENDED)
    before = await all_rows(store)
    clock.now += 1e9
    assert await store.runs.delete_expired(RetentionPolicy(ended_runs=0, settled_groups=0, rollouts=0)) == 0
    assert await all_rows(store) == before


async def test_a_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    async with await SqliteStore.open(path):
        pass
    newer = sqlite3.connect(path, isolation_level=None)
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(StoreError, match="version 99"):
        await SqliteStore.open(path)
