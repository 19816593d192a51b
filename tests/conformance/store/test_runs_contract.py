"""Every kind of store keeps the contract of runs, groups and batches."""

import math
import threading
from dataclasses import replace

import anyio
import pytest

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.runs import FileTasks, Group, InlineTasks, RunRequest, RunState
from api_schemas.runs.auxiliary import RewardPart, RewardWeights
from api_schemas.tasks import Task
from rollout_service.base.errors import ConflictError, NotFoundError
from rollout_service.settings import RetentionSettings
from rollout_service.store import Store, rules
from rollout_service.store.codec.groups import group_json
from rollout_service.store.codec.trajectories import encode
from rollout_service.store.runs_contract import (
    BatchLease,
    BatchLeaseRequest,
    ClosedSample,
    GroupClosure,
    NoBatch,
)
from tests.support.runs import (
    TASKS,
    close_group,
    create_run,
    end_all,
    lease_batch,
    leased_batch,
    make_ready,
    new_group,
    run_request,
    trajectory,
    without_tokens,
)


async def test_a_run_is_made_once(store):
    first, new = await store.runs.create(run_request(), tasks=4, digest=None, version=3)
    again, newer = await store.runs.create(run_request(), tasks=4, digest=None, version=9)
    assert (new, newer) == (True, False)
    assert first == again
    assert (first.version, first.first_version, first.total, first.state) == (3, 3, 4, RunState.RUNNING)
    with pytest.raises(ConflictError):
        await store.runs.create(run_request(group_size=3), tasks=4, digest=None, version=0)
    with pytest.raises(NotFoundError):
        await store.runs.get("b")
    assert await store.runs.inline_tasks("a", first=1, limit=2) == TASKS[1:3]


async def test_the_cursor_moves_with_the_groups(store):
    await create_run(store)
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


async def test_members_report_their_versions(store):
    await create_run(store)
    await store.runs.start_groups("a", [new_group(0)])
    await end_all(store, version=4)
    (group,) = await store.runs.open_groups("a")
    assert {(member.oldest_version, member.newest_version) for member in group.members} == {(4, 5)}


async def test_a_retried_sample_is_counted(store):
    await create_run(store)
    await store.runs.start_groups("a", [new_group(0)])
    again = RolloutRequest(rollout_id="a.0.1.1", task=TASKS[0])
    await store.runs.retry_sample("a", 0, 1, again)
    await store.runs.mark_stragglers("a", 0, [0])
    (group,) = await store.runs.open_groups("a")
    assert [member.rollout_id for member in group.members] == ["a.0.0", "a.0.1.1"]
    assert [member.is_straggler for member in group.members] == [True, False]
    assert (await store.runs.get("a")).count("retried") == 1


async def test_an_open_group_is_extended_once(store):
    await create_run(store, group_size=4, batch_size=1)
    await store.runs.start_groups("a", [new_group(0)])
    more = [RolloutRequest(rollout_id=f"a.0.{sample}", task=TASKS[0]) for sample in (2, 3)]
    for _ in range(2):
        await store.runs.extend_group("a", 0, 2, more)
    await store.runs.extend_group("a", 1, 0, more)
    (group,) = await store.runs.open_groups("a")
    assert [(one.sample, one.rollout_id) for one in group.members] == [(n, f"a.0.{n}") for n in range(4)]
    await end_all(store)
    (group,) = await store.runs.open_groups("a")
    assert all(one.state is RolloutState.COMPLETED for one in group.members)
    samples = [ClosedSample(s, f"a.0.{s}", True, None, float(s), None) for s in range(4)]
    await store.runs.close_group("a", GroupClosure(0, None, samples, 0.5, 0.5, 0, 0))
    await store.runs.extend_group("a", 0, 4, [RolloutRequest(rollout_id="a.0.4", task=TASKS[0])])
    assert len((await store.runs.group("a", (await leased_batch(store)).groups[0])).samples) == 4
    assert await store.get("a.0.4") is None


async def test_a_batch_is_leased_acknowledged_and_never_comes_again(store):
    await create_run(store)
    await make_ready(store, 0)
    assert await lease_batch(store) == NoBatch(over=False, due_in=math.inf)
    await make_ready(store, 1)
    batch = await leased_batch(store)
    assert (batch.batch_id, batch.groups, batch.delivery) == ("a.b0", [0, 1], 1)
    group = await store.runs.group("a", 0)
    assert [sample.rollout.trajectory for sample in group.samples] == [trajectory(0)] * 2
    await store.runs.acknowledge("a", 0)
    await store.runs.acknowledge("a", 0)
    with pytest.raises(ConflictError):
        await store.runs.give_back("a", 0)
    assert await lease_batch(store) == NoBatch(over=False, due_in=math.inf)
    run = await store.runs.get("a")
    assert (run.count("acknowledged"), run.count("batched"), run.count("batches:acknowledged")) == (2, 0, 1)


async def test_repeating_a_key_returns_the_same_batch(store):
    await create_run(store)
    await make_ready(store, 0, 1, 2, 3)
    first, again, other = (
        await leased_batch(store),
        await leased_batch(store),
        await leased_batch(store, "other"),
    )
    assert (first.number, again.number, other.number) == (0, 0, 1)
    assert again.delivery == 1


async def test_an_unacknowledged_batch_is_delivered_again(store, clock):
    await create_run(store)
    await make_ready(store, 0, 1)
    await leased_batch(store)
    waiting = await lease_batch(store, "other")
    assert waiting == NoBatch(over=False, due_in=60)
    clock.now += 60
    second = await leased_batch(store, "other")
    assert (second.number, second.delivery, second.groups) == (0, 2, [0, 1])
    await store.runs.give_back("a", 0)
    assert (await leased_batch(store, "third")).delivery == 3
    await store.runs.acknowledge("a", 0)


async def test_the_last_batch_may_be_smaller_and_ends_the_run(store):
    await create_run(store, source=InlineTasks(tasks=TASKS[:3]))
    await make_ready(store, 0, 1, 2)
    assert (await leased_batch(store)).groups == [0, 1]
    last = await leased_batch(store, "other")
    assert last.groups == [2]
    await store.runs.acknowledge("a", 0)
    assert (await store.runs.get("a")).state is RunState.RUNNING
    await store.runs.acknowledge("a", 1)
    assert (await store.runs.get("a")).state is RunState.FINISHED
    assert await lease_batch(store) == NoBatch(over=True, due_in=math.inf)


async def mask(store: Store, bound: int, *, usable: int = 0) -> list[int]:
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
        await store.runs.reclose_group("a", GroupClosure(group.number, reason, samples, None, None, left, left))
    return [group.number for group in groups]


async def test_stale_groups_are_dropped_and_counted(store):
    await create_run(store, max_staleness=1)
    await make_ready(store, 0, version=0)
    await make_ready(store, 1, 2, version=2)
    await store.runs.update("a", version=2)
    assert await lease_batch(store) == NoBatch(over=False, due_in=math.inf, stale=True)
    assert await mask(store, 1) == [0]
    assert await mask(store, 1) == []
    batch = await leased_batch(store)
    assert (batch.groups, batch.dropped, batch.version) == ([1, 2], {"stale": 1}, 2)
    run = await store.runs.get("a")
    assert (run.count("masked"), run.count("masked:stale")) == (2, 2)
    assert (await store.runs.update("a", version=1)).version == 2, "a version never goes back"


async def test_a_group_keeps_the_weights_of_its_rewards(store):
    await create_run(store, max_staleness=1)
    await store.runs.start_groups("a", [new_group(0), new_group(1)])
    await end_all(store)
    assert [group.reward_weights for group in await store.runs.open_groups("a")] == [None, None]
    weights = RewardWeights(perf=1.0, parallel=0.1 + 0.2, finish=1 / 3, at_version=7)
    samples = [
        ClosedSample(0, "a.0.0", True, None, 0.5, None),
        ClosedSample(1, "a.0.1", False, "engine_gone", None, None),
    ]
    closure = GroupClosure(
        0,
        None,
        samples,
        0.5,
        0.0,
        0,
        1,
        reward_weights=weights,
        measured_on=RewardPart.PERF,
        filtered_on=[RewardPart.PERF, RewardPart.PARALLEL],
    )
    await store.runs.close_group("a", closure)
    await store.runs.close_group("a", replace(closure, reward_weights=replace_version(weights, 8)))
    await close_group(store, 1)
    first, second = [await store.runs.group("a", number) for number in (0, 1)]
    assert [sample.reward_weights for sample in first.samples] == [weights, None]
    assert (first.measured_on, first.filtered_on) == ("perf", ["perf", "parallel"])
    exported = await store.runs.exported_samples("a", 0)
    assert [(one.sample.reward_weights, one.measured_on) for one in exported] == [
        (weights, "perf"),
        (None, "perf"),
    ]
    for head, group in zip(await store.runs.group_heads("a", [0, 1]), (first, second), strict=True):
        assert head.json == without_tokens(group)
    for new in ("reward_weights", "measured_on", "filtered_on"):
        assert new.encode() not in group_json(second), "a run without parts is as it was"
    stale = {group.number: group.reward_weights for group in await store.runs.stale_groups("a", 1)}
    assert stale == {0: weights, 1: None}


def replace_version(weights: RewardWeights, version: int) -> RewardWeights:
    return weights.model_copy(update={"at_version": version})


async def test_what_a_group_adds_to_the_counters_is_added_once(store):
    await create_run(store, max_staleness=1)
    await store.runs.start_groups("a", [new_group(0), new_group(1)])
    await end_all(store)
    counts = {"work:rollouts": 2, "work:perf": -500_000, "work:refused": 0}
    for number in (0, 1, 1):
        samples = [ClosedSample(s, f"a.{number}.{s}", True, None, float(s), None) for s in range(2)]
        closure = GroupClosure(number, None, samples, 0.5, 0.5, 0, 0, counts=counts)
        await store.runs.close_group("a", closure)
    await store.runs.reclose_group("a", closure)
    run = await store.runs.get("a")
    assert rules.work_counts(run.counters) == {"rollouts": 4, "perf": -1_000_000}
    assert rules.group_counts(run.counters) == {"ready": 2}
    assert rules.dropped_counts(run.counters) == {}


async def test_a_batch_that_grew_too_old_is_dissolved(store, clock):
    await create_run(store, max_staleness=1)
    await make_ready(store, 0, version=0)
    await make_ready(store, 1, version=2)
    await leased_batch(store)
    clock.now += 61
    await store.runs.update("a", version=2)
    assert await lease_batch(store, "other") == NoBatch(over=False, due_in=math.inf, stale=True)
    with pytest.raises(ConflictError, match="dissolved"):
        await store.runs.acknowledge("a", 0)
    assert await mask(store, 1) == [0]
    assert isinstance(await lease_batch(store, "other"), NoBatch)
    await make_ready(store, 2, version=2)
    assert (await leased_batch(store)).groups == [1, 2]


async def test_a_lease_is_renewed_while_it_is_held(store, clock):
    await create_run(store)
    await make_ready(store, 0, 1)
    await leased_batch(store)
    clock.now += 50
    until = await store.runs.renew_batch("a", 0, key="k", seconds=60)
    assert until.timestamp() == clock.now + 60
    clock.now += 59
    assert isinstance(await lease_batch(store, "other"), NoBatch)
    clock.now += 2
    await store.runs.renew_batch("a", 0, key=None, seconds=60)
    assert isinstance(await lease_batch(store, "other"), NoBatch), "it ran out, and nobody had it"
    clock.now += 61
    assert (await leased_batch(store, "other")).delivery == 2
    with pytest.raises(ConflictError, match="leased by another"):
        await store.runs.renew_batch("a", 0, key="k", seconds=60)
    with pytest.raises(ConflictError, match="leased by another"):
        await store.runs.give_back("a", 0, key="k")
    await store.runs.give_back("a", 0, key="other")
    await store.runs.give_back("a", 0, key="k")
    assert (await leased_batch(store, "other")).delivery == 3
    await store.runs.acknowledge("a", 0)
    with pytest.raises(ConflictError, match="acknowledged"):
        await store.runs.renew_batch("a", 0, key="other", seconds=60)
    with pytest.raises(NotFoundError):
        await store.runs.renew_batch("a", 1, key=None, seconds=60)


async def test_a_returned_batch_that_grew_too_old_is_dissolved_before_a_lease(store):
    await create_run(store, max_staleness=1)
    await make_ready(store, 0, version=0)
    await make_ready(store, 1, version=2)
    await leased_batch(store)
    assert await store.runs.stale_groups("a", 1) == [], "it is in the trainer's hands"
    await store.runs.give_back("a", 0)
    assert await mask(store, 1, usable=1) == [0]
    run = await store.runs.get("a")
    assert (run.count("ready"), run.count("masked:stale")) == (2, 1)
    assert (await leased_batch(store)).groups == [0, 1]
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


async def test_a_consumer_may_ask_for_stale_groups(store):
    await create_run(store, max_staleness=0)
    await make_ready(store, 0, 1, version=0)
    await store.runs.update("a", version=5)
    batch = await store.runs.lease(BatchLeaseRequest("a", "k", 60, allow_stale=True))
    assert isinstance(batch, BatchLease)


async def test_dropped_groups_are_reported_with_the_next_batch(store):
    await create_run(store)
    await store.runs.start_groups("a", [new_group(n) for n in range(4)])
    await end_all(store)
    for number in range(4):
        await close_group(store, number, reason=None if number % 2 else "zero_variance")
    batch = await leased_batch(store)
    assert (batch.groups, batch.dropped) == ([1, 3], {"zero_variance": 2})
    await close_group(store, 0)
    assert (await store.runs.get("a")).count("dropped:zero_variance") == 2, "dropped is for good"


async def test_tasks_are_appended_once(store):
    await create_run(store, source=InlineTasks(open=True))
    assert (await store.runs.append("a", TASKS[:2], offset=0, close=False)).tasks == 2
    assert (await store.runs.append("a", TASKS[:2], offset=0, close=False)).tasks == 2
    with pytest.raises(ConflictError, match="2 tasks, not 1"):
        await store.runs.append("a", TASKS, offset=1, close=False)
    closed = await store.runs.append("a", TASKS[2:], offset=2, close=True)
    assert (closed.tasks, closed.total) == (4, 4)
    assert (await store.runs.append("a", TASKS[2:], offset=2, close=True)).tasks == 4
    with pytest.raises(ConflictError, match="takes no more tasks"):
        await store.runs.append("a", TASKS, offset=None, close=False)


async def test_the_event_loop_encodes_no_tasks(store, monkeypatch):
    threads = set()

    def note(encode):
        return lambda *of, **how: threads.add(threading.current_thread()) or encode(*of, **how)

    for model, name in ((RunRequest, "model_dump"), (Task, "model_dump_json")):
        monkeypatch.setattr(model, name, note(getattr(model, name)))
    await create_run(store, source=InlineTasks(tasks=TASKS, open=True))
    assert (await store.runs.append("a", TASKS, offset=None, close=False)).tasks == 8
    assert threads
    assert threading.main_thread() not in threads


async def test_a_change_of_the_request_keeps_its_other_fields(store):
    await create_run(store, weight=2.0)
    await store.runs.update("a", changes={"priority": 3})
    request = (await store.runs.update("a", changes={"max_concurrent": 5})).request
    assert (request.priority, request.max_concurrent, request.weight) == (3, 5, 2.0)
    assert (await store.runs.get("a")).request == request


async def test_a_run_is_closed_without_tasks_once(store):
    await create_run(store, source=InlineTasks(tasks=TASKS[:2], open=True))
    closed = await store.runs.append("a", [], offset=2, close=True)
    assert closed.total == 2
    assert await store.runs.append("a", [], offset=2, close=True) == closed
    for offset, close in ((1, True), (2, False), (None, True)):
        with pytest.raises(ConflictError, match="takes no more tasks"):
            await store.runs.append("a", [], offset=offset, close=close)


async def test_a_run_that_was_never_open_is_not_closed(store):
    await create_run(store)
    with pytest.raises(ConflictError, match="takes no more tasks"):
        await store.runs.append("a", [], offset=4, close=True)


async def test_a_run_that_is_over_stays_over(store):
    await create_run(store)
    problem = ErrorInfo(code="c", boundary=Boundary.SERVICE, message="m")
    assert (await store.runs.update("a", state=RunState.PAUSED, problem=problem)).problem == problem
    assert (await store.runs.update("a", state=RunState.RUNNING)).problem is None
    await store.runs.update("a", state=RunState.ENDED)
    assert (await store.runs.update("a", state=RunState.ENDED)).state is RunState.ENDED
    with pytest.raises(ConflictError):
        await store.runs.update("a", state=RunState.RUNNING)
    assert list(await store.runs.active()) == []
    assert await lease_batch(store) == NoBatch(over=True, due_in=math.inf)


async def test_only_what_is_settled_is_pruned(store, clock):
    await create_run(store, source=FileTasks(path="/x.jsonl", environment="calc", epochs=None))
    await make_ready(store, 0, 1, 2, 3)
    await leased_batch(store)
    await store.runs.acknowledge("a", 0)
    await leased_batch(store, "held")
    assert await store.runs.prune("a", seconds=10, max_bytes=None) == 0
    clock.now += 10
    assert await store.runs.prune("a", seconds=10, max_bytes=None) == 2
    assert (await store.runs.group("a", 0)).samples[0].rollout.trajectory is None
    assert (await store.runs.group("a", 2)).samples[0].rollout.trajectory == trajectory(0)
    await store.runs.acknowledge("a", 1)
    assert await store.runs.prune("a", seconds=None, max_bytes=0) == 2


async def test_waiting_sees_every_change(store):
    shard = store.shards[store.shard_of("a")]
    seen = await shard.runs.wait_for_change(0)
    await create_run(store)
    seen = await shard.runs.wait_for_change(seen)
    await store.runs.start_groups("a", [new_group(0)])
    await end_all(store)
    seen = await shard.runs.wait_for_change(seen)
    delivered = await store.runs.wait_for_delivery("a", 0)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.runs.wait_for_delivery, "a", delivered)
            await close_group(store, 0)


async def test_a_group_that_does_not_fit_the_columns_is_delivered_as_json(store):
    await create_run(store)
    await store.runs.start_groups("a", [new_group(0)])
    large = trajectory(0).segments[0].model_copy(update={"token_ids": [5, 6, 2**31]})
    await end_all(store, made=trajectory(0).model_copy(update={"segments": [large]}))
    await close_group(store, 0)
    found = (await store.runs.group("a", 0)).samples[0].rollout.trajectory
    assert found.segments == [large]
    with pytest.raises(OverflowError):
        await store.runs.group_heads("a", [0])


async def test_the_head_of_a_group_is_what_its_json_says(store):
    await create_run(store)
    await make_ready(store, 0, 1)
    heads = await store.runs.group_heads("a", [1, 0])
    assert [head.number for head in heads] == [1, 0]
    for head in heads:
        assert head.json == without_tokens(await store.runs.group("a", head.number))
        assert head.tokens == [[3], [3]]
    await leased_batch(store)
    await store.runs.acknowledge("a", 0)
    assert await store.runs.group_heads("a", [1, 0]) == heads
    with pytest.raises(NotFoundError):
        await store.runs.group_heads("a", [0, 7])


async def test_a_surplus_is_dropped_and_what_is_under_way_is_cancelled(store):
    await create_run(store, surplus="cancel")
    await make_ready(store, 0, 1, 2)
    await store.runs.start_groups("a", [new_group(3)])
    assert (await leased_batch(store)).groups == [0, 1]
    (group,) = await store.runs.open_groups("a")
    assert (group.number, group.cancel_reason) == (3, "surplus")
    await store.runs.cancel_groups("a", "cancelled")
    (group,) = await store.runs.open_groups("a")
    assert group.cancel_reason == "surplus", "the first reason stays"
    expected = {0: "batched", 1: "batched", 2: "dropped:surplus", 3: "open"}
    assert await store.runs.group_states("a") == expected
    run = await store.runs.get("a")
    assert dict(run.counters) == {"batched": 2, "dropped:surplus": 1, "open": 1}


async def test_events_tell_what_became_of_a_run(store):
    await create_run(store, source=InlineTasks(tasks=TASKS[:3]))
    await make_ready(store, 0, 1)
    await store.runs.start_groups("a", [new_group(2)])
    await end_all(store)
    await close_group(store, 2, reason="zero_variance")
    await store.runs.update("a", version=1)
    await leased_batch(store)
    await store.runs.give_back("a", 0)
    await leased_batch(store)
    await store.runs.acknowledge("a", 0)
    events = [
        (event.kind, event.subject, event.data)
        for event in await store.events(after=0)
        if not event.kind.startswith("rollout.")
    ]
    assert events == [
        ("run.state", "a", {"state": "running"}),
        ("group.closed", "a.0", {"run": "a", "state": "ready"}),
        ("group.closed", "a.1", {"run": "a", "state": "ready"}),
        ("group.closed", "a.2", {"run": "a", "state": "dropped", "reason": "zero_variance"}),
        ("run.changed", "a", {}),
        ("batch.leased", "a.b0", {"run": "a", "delivery": 1}),
        ("batch.returned", "a.b0", {"run": "a", "delivery": 1}),
        ("batch.leased", "a.b0", {"run": "a", "delivery": 2}),
        ("batch.acknowledged", "a.b0", {"run": "a", "delivery": 2}),
        ("run.state", "a", {"state": "finished"}),
    ]


async def test_groups_whose_rollouts_exist_with_another_request_do_not_start(store):
    await create_run(store)
    await store.submit(RolloutRequest(rollout_id="a.1.0", task=TASKS[3]))
    with pytest.raises(ConflictError, match=r"a\.1\.0 already exists"):
        await store.runs.start_groups("a", [new_group(0), new_group(1)])
    run = await store.runs.get("a")
    assert (run.cursor, dict(run.counters)) == (0, {})
    assert await store.get("a.0.0") is None
    assert await store.runs.open_groups("a") == []


async def test_the_oldest_tokens_beyond_a_size_are_pruned(store, clock):
    source = FileTasks(path="/x.jsonl", environment="calc", epochs=None)
    await create_run(store, source=source, batch_size=1)
    for number in range(150):
        clock.now += 1
        await make_ready(store, number)
        await leased_batch(store)
        await store.runs.acknowledge("a", number)
    assert await store.runs.prune("a", seconds=None, max_bytes=10**9) == 0
    assert await store.runs.prune("a", seconds=140, max_bytes=None) == 10
    group = await store.runs.group("a", 149)
    size = 2 * len(encode(trajectory(0)))
    assert group.samples[0].rollout.trajectory is not None
    assert await store.runs.prune("a", seconds=None, max_bytes=20 * size) == 120
    assert await store.runs.prune("a", seconds=None, max_bytes=20 * size) == 0
    for number, is_there in ((129, False), (130, True)):
        found = (await store.runs.group("a", number)).samples[0].rollout.trajectory
        assert (found is not None) is is_there
    assert await store.runs.prune("a", seconds=None, max_bytes=0) == 20


async def test_settled_groups_and_ended_runs_are_deleted_by_age(store, clock):
    await create_run(store)
    await make_ready(store, 0, 1, 2, 3)
    await store.submit(RolloutRequest(rollout_id="plain", task=TASKS[0]))
    await end_all(store)
    await leased_batch(store)
    await store.runs.acknowledge("a", 0)
    await leased_batch(store)
    retention = RetentionSettings(ended_run_seconds=10, settled_group_seconds=10)
    clock.now += 9
    assert await store.runs.delete_expired(retention) == 0
    clock.now += 1
    assert await store.runs.delete_expired(retention) == 2
    assert await store.runs.delete_expired(retention) == 0, "a batch is not acknowledged"
    assert await store.runs.closed_groups("a") == [2, 3]
    assert await store.runs.rollout_ids("a") == ["a.2.0", "a.2.1", "a.3.0", "a.3.1"]
    for gone in (0, 7):
        with pytest.raises(NotFoundError):
            await store.runs.group("a", gone)
    assert sum((await store.counts()).values()) == len((await store.list()).rollouts) == 5
    assert (await store.runs.get("a")).count("acknowledged") == 2
    await store.runs.acknowledge("a", 1)
    assert (await store.runs.get("a")).state is RunState.FINISHED
    clock.now += 11
    while await store.runs.delete_expired(retention):
        pass
    with pytest.raises(NotFoundError):
        await store.runs.get("a")
    assert await store.runs.list() == []
    assert [one.rollout_id for one in (await store.list()).rollouts] == ["plain"]
    assert await store.runs.delete_expired(RetentionSettings(rollout_seconds=100)) == 0
    assert await store.runs.delete_expired(RetentionSettings(rollout_seconds=1)) == 1
    assert (await store.list()).rollouts == []
    await create_run(store)
    assert (await store.runs.get("a")).cursor == 0, "the id is free again"


async def test_replaced_rollouts_are_pruned_with_their_group(store):
    await create_run(store)
    await store.runs.start_groups("a", [new_group(0)])
    await end_all(store, made=trajectory(0))
    await store.runs.retry_sample("a", 0, 1, RolloutRequest(rollout_id="a.0.1.1", task=TASKS[0]))
    await end_all(store, made=trajectory(0))
    await close_group(store, 0, reason="too_few_usable")
    assert await store.trajectory("a.0.1") == trajectory(0)
    assert await store.runs.prune("a", seconds=None, max_bytes=0) == 1
    assert [await store.trajectory(name) for name in ("a.0.0", "a.0.1", "a.0.1.1")] == [None] * 3


async def test_replaced_rollouts_are_deleted_with_their_group(store):
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
    assert await store.runs.delete_expired(RetentionSettings(settled_group_seconds=0)) == 1
    assert {one.rollout_id for one in (await store.list()).rollouts} == {
        "a.1.0",
        "a.1.1",
        "a.0.1.9",
        "a.note",
    }
    assert await store.runs.delete_expired(RetentionSettings(rollout_seconds=0)) == 2, "they belong to no run"
    assert {one.rollout_id for one in (await store.list()).rollouts} == {"a.1.0", "a.1.1"}


async def test_unacknowledged_groups_are_never_deleted(store, clock):
    await create_run(store)
    await make_ready(store, 0)
    await store.runs.start_groups("a", [new_group(1)])
    await store.submit(RolloutRequest(rollout_id="queued", task=TASKS[0]))
    await store.runs.update("a", state=RunState.ENDED)
    clock.now += 1e9
    everything = RetentionSettings(ended_run_seconds=0, settled_group_seconds=0, rollout_seconds=0)
    assert await store.runs.delete_expired(everything) == 0
    assert await store.runs.group_states("a") == {0: "ready", 1: "open"}
    assert len((await store.list()).rollouts) == 5
    assert [run.run_id for run in await store.runs.active()] == ["a"], "a group is open"


async def test_groups_dropped_in_a_row_are_counted_until_one_is_kept(store, clock):
    await create_run(store, source=InlineTasks(tasks=TASKS, epochs=None))

    async def close(number: int, reason: str | None, failure: str | None = None) -> None:
        await store.runs.start_groups("a", [new_group(number)])
        await end_all(store)
        samples = [ClosedSample(s, f"a.{number}.{s}", reason is None, None, None, None) for s in range(2)]
        closure = GroupClosure(number, reason, samples, None, None, None, None, failure=failure)
        await store.runs.close_group("a", closure)

    async def in_a_row() -> tuple[dict[str, int], dict[str, int]]:
        counters = (await store.runs.get("a")).counters
        return rules.dropped_in_a_row(counters), rules.failed_in_a_row(counters)

    await close(0, "too_few_usable", "broken")
    await close(1, "too_few_usable", "broken")
    await close(2, "cancelled")
    assert await in_a_row() == ({"too_few_usable": 2}, {"broken": 2})
    await close(3, "too_few_usable", "other")
    assert await in_a_row() == ({"too_few_usable": 3}, {"other": 1})
    await close(4, "zero_variance")
    assert await in_a_row() == ({"too_few_usable": 3, "zero_variance": 1}, {})
    problem = ErrorInfo(code="groups_dropped", boundary=Boundary.REQUEST, message="nothing is kept")
    await store.runs.update("a", problem=problem)
    await close(5, None)
    assert await in_a_row() == ({}, {})
    assert (await store.runs.get("a")).problem is None, "the run goes on, and delivers"
    await close(6, "zero_variance")
    await store.runs.update("a", state=RunState.PAUSED, problem=problem)
    run = await store.runs.update("a", state=RunState.RUNNING)
    assert (run.problem, rules.dropped_in_a_row(run.counters)) == (None, {})
    assert rules.dropped_counts(run.counters)["zero_variance"] == 2
    await close(7, "zero_variance")
    clock.now += 5
    run = await store.runs.update("a", state=RunState.RUNNING)
    assert rules.dropped_in_a_row(run.counters) == {}, "a run that was not paused begins to count again, too"
    assert run.changed_at.timestamp() == clock.now


async def test_how_long_an_agent_works_is_measured_by_the_stores_clock(store, clock):
    await create_run(store)
    await store.runs.start_groups("a", [new_group(0)])
    [first, *_] = await store.claim("w", limit=9, lease_seconds=60)
    clock.now += 5
    await store.advance(first, "w", RolloutState.ROLLOUT)
    clock.now += 7
    [group] = await store.runs.open_groups("a")
    assert [member.rolling_seconds for member in group.members] == [7, None]
