"""Every kind of store keeps the `Store` contract, in examples and in a state machine."""

import itertools
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import anyio
import anyio.from_thread
import pytest
from anyio.from_thread import BlockingPortal
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from api_schemas.base import TraceContext
from api_schemas.rollouts import (
    AgentProgram,
    Rollout,
    RolloutPage,
    RolloutRequest,
    RolloutState,
    Span,
    Stage,
    StopReason,
    Usage,
)
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.tasks import Task
from api_schemas.trajectories import Message, Trajectory
from api_schemas.views.summaries import SummaryFilter
from rollout_service.base.errors import ConflictError, InvalidFieldError, StoreError
from rollout_service.cluster.identity import ServiceIdentity
from rollout_service.settings import RetentionSettings
from rollout_service.store import Lease, Store
from rollout_service.store.contract import MAX_RECORDS, EncodedSteps, UnsavedTurn, cancel_unfinished
from rollout_service.store.runs_contract import NewGroup
from tests.support import samples
from tests.support.clocks import ManualClock
from tests.support.store.rollouts import ENGINE_GONE, ended, leased, order
from tests.support.store.servers import PLACES
from tests.support.waiting import collect

START = 1_700_000_000.0
S = RolloutState
KINDS = ["sqlite", *PLACES, pytest.param("shards", marks=pytest.mark.redis)]


def trajectory(tokens: int) -> Trajectory:
    messages = [Message(role="user", content="1 + 1 = ?")]
    return samples.trajectory(samples.segment(list(range(tokens))), messages=messages)


async def take(store: Store, owner: str = "a", *, seconds: float = 10.0) -> Lease:
    [lease] = await store.claim(owner, limit=1, lease_seconds=seconds)
    return lease


async def test_a_rollout_from_submit_to_result(store, clock):
    request = order(question="1 + 1").model_copy(update={"metadata": {"step": 7}})
    queued, new = await store.submit(request)
    assert new
    assert (queued.state, queued.attempt, queued.task) == (S.QUEUED, 0, request.task)
    clock.now += 2
    lease = await take(store)
    assert (lease.request, lease.attempt, lease.retries) == (request, 1, [])
    assert (lease.created_at, lease.queued_seconds) == (datetime.fromtimestamp(START, UTC), 2)
    for state in (S.INIT, S.ROLLOUT, S.EVALUATE):
        assert await store.advance(lease, "a", state)
        assert (await known(store)).state is state
    clock.now += 3
    result = ended(
        lease,
        reward=0.5,
        reward_parts={"format": 0.5},
        stop_reason=StopReason.FINISHED,
        program=AgentProgram(harness="codex", exit_code=0, seconds=1.5, output="done"),
        usage=Usage(turns=2),
        trajectory=trajectory(5),
    )
    assert await store.finish(lease, "a", result)
    done = await known(store)
    assert done == result.model_copy(
        update={
            "attempt": 1,
            "trajectory": None,
            "metadata": {"step": 7},
            "finished_at": datetime.fromtimestamp(START + 5, UTC),
        }
    )
    assert await store.trajectory("r1") == trajectory(5)
    assert await store.counts() == {S.COMPLETED: 1}


async def known(store: Store, rollout_id: str = "r1") -> Rollout:
    rollout = await store.get(rollout_id)
    assert rollout is not None
    return rollout


@pytest.mark.parametrize("tokens", [0, 1, 50_000])
async def test_a_trajectory_of_any_size_comes_back_as_it_was(store, tokens):
    await store.submit(order())
    lease = await take(store)
    assert await store.finish(lease, "a", ended(lease, trajectory=trajectory(tokens)))
    assert await store.trajectory("r1") == trajectory(tokens)


async def test_unknown_and_unfinished_rollouts_have_no_trajectory(store):
    assert await store.get("r1") is None
    assert await store.trajectory("r1") is None
    await store.submit(order())
    assert await store.trajectory("r1") is None
    lease = await take(store)
    await store.finish(lease, "a", ended(lease, S.FAILED))
    assert await store.trajectory("r1") is None
    assert (await known(store)).error == ENGINE_GONE


async def test_repeating_a_request_changes_nothing_and_a_different_one_is_refused(store):
    await store.submit(order(x=1, y=2))
    again, new = await store.submit(order(y=2, x=1))
    assert not new
    assert again.state is S.QUEUED
    with pytest.raises(ConflictError, match="r1"):
        await store.submit(order(x=1, y=3))
    assert await store.counts() == {S.QUEUED: 1}
    with pytest.raises(ValueError, match="rollout_id"):
        await store.submit(RolloutRequest(task=Task(environment="calc")))


async def test_the_callers_trace_is_kept_and_does_not_make_another_request(store):
    traced = TraceContext(traceparent=f"00-{'a' * 32}-{'b' * 16}-01", tracestate="vendor=1")
    await store.submit(order().model_copy(update={"trace": traced}))
    for other in (None, traced.model_copy(update={"traceparent": f"00-{'c' * 32}-{'d' * 16}-00"})):
        _, new = await store.submit(order().model_copy(update={"trace": other}))
        assert not new
    lease = await take(store)
    assert lease.request.trace == traced
    await store.advance(lease, "a", S.INIT)
    assert await store.retry(lease, "a", ENGINE_GONE, spans=[], delay_seconds=0.0, keep_turns=False)
    assert (await take(store)).request.trace == traced


async def test_a_conflict_does_not_affect_concurrent_submits(store):
    await store.submit(order("r0"))
    outcomes: dict[str, str] = {}

    async def submit(request: RolloutRequest) -> None:
        try:
            await store.submit(request)
        except ConflictError:
            outcomes[str(request.rollout_id)] = "conflict"

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(submit, order(f"r{number}"))
            group.start_soon(submit, order("r0", another=number))
    assert outcomes == {"r0": "conflict"}
    assert await store.counts() == {S.QUEUED: 20}


def are_oldest_of(store: Store, names: list[str], claimed: list[Lease], limit: int) -> bool:
    """Return whether a claim gave as many of these as it should, and of each shard the first."""
    found = [lease.rollout_id for lease in claimed]
    parts = [
        (
            [one for one in found if store.shard_of(one) == shard],
            [one for one in names if store.shard_of(one) == shard],
        )
        for shard in range(len(store.shards))
    ]
    return len(found) == min(limit, len(names)) and all(mine == there[: len(mine)] for mine, there in parts)


async def test_a_lease_that_ran_out_is_taken_over_and_its_owner_can_do_nothing(store, clock):
    await store.submit(order())
    lost = await take(store, "a", seconds=10)
    assert await store.advance(lost, "a", S.ROLLOUT)
    clock.now += 9
    await store.renew("a", ["r1"], lease_seconds=10)
    clock.now += 9
    assert await store.claim("b", limit=1, lease_seconds=10) == []
    clock.now += 1
    assert await store.claim("a", limit=1, lease_seconds=10) == [], "it is in the hand of its owner"
    lease = await take(store, "b")
    assert lease.attempt == 2
    assert (await known(store)).state is S.QUEUED
    before = await store.last_event()
    assert not await store.advance(lost, "a", S.EVALUATE)
    assert not await store.retry(lost, "a", ENGINE_GONE)
    assert not await store.finish(lost, "a", ended(lost, reward=1.0))
    assert not await store.finish(lease, "a", ended(lease, reward=1.0))
    assert await store.last_event() == before
    assert await store.finish(lease, "b", ended(lease, reward=0.25))
    assert (await known(store)).reward == 0.25


async def test_an_expired_lease_that_nobody_took_can_still_end(store, clock):
    await store.submit(order())
    lease = await take(store)
    clock.now += 100
    assert await store.finish(lease, "a", ended(lease))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("crashed", [False, True])
async def test_released_rollouts_are_requeued(store, clock, begun, crashed):
    await store.submit(order())
    lost = await take(store)
    if begun:
        await store.advance(lost, "a", S.ROLLOUT)
    clock.now += 3
    assert await store.release("b") == 0
    assert await store.recover("a") == 0
    assert await (store.recover("b") if crashed else store.release("a")) == 1
    clock.now += 4
    again = await take(store)
    assert again.attempt == (2 if begun and crashed else 1)
    assert again.queued_seconds == 4, "since it was given back"
    assert not await store.finish(lost, "a", ended(lost)), "the same owner, but an earlier lease"
    assert await store.finish(again, "a", ended(again))


async def test_a_new_service_takes_back_at_once_what_a_dead_one_held(store):
    program = "from rollout_service.cluster.identity import ServiceIdentity as I; print(I.create())"
    dead = (await anyio.run_process([sys.executable, "-c", program])).stdout.decode().strip()
    mine = str(ServiceIdentity.create())
    await store.submit(order("r1"))
    await store.submit(order("r2"))
    await store.claim(mine, limit=1, lease_seconds=1e6)
    await store.claim(dead, limit=1, lease_seconds=1e6)
    assert await store.recover(mine) == 1, "its own lease is live"
    assert [lease.rollout_id for lease in await store.claim(mine, limit=9, lease_seconds=10)] == ["r2"]


async def test_only_rollouts_of_the_named_pools_are_leased(store, clock):
    for number, pool in enumerate(("policy", "judge", "policy", "judge")):
        await store.submit(order(f"r{number}", pool=pool))
    assert await store.claim("a", limit=9, lease_seconds=10, pools=[]) == []
    judged = await store.claim("a", limit=9, lease_seconds=10, pools=["judge", "other"])
    assert [lease.rollout_id for lease in judged] == ["r1", "r3"]
    assert not await returns(store.wait_for_work()), "what there is waits for its pool"
    assert await store.release("a", ["r3", "unknown"]) == 1
    rest = await store.claim("a", limit=9, lease_seconds=10)
    assert are_oldest_of(store, ["r0", "r2", "r3"], rest, 9)


async def test_only_rollouts_of_environments_that_suit_are_leased(store):
    for number, environment in enumerate(("calc", "code", "calc", "code")):
        await store.submit(order(f"r{number}", environment))
    assert await store.claim("a", limit=9, lease_seconds=10, waits={}) == []
    assert not await returns(store.wait_for_work())
    leases = await store.claim("a", limit=9, lease_seconds=10, waits={"code": 0.0, "other": 0.0})
    assert [lease.rollout_id for lease in leases] == ["r1", "r3"]
    assert not await returns(store.wait_for_work()), "what there is suits another node"
    assert [lease.rollout_id for lease in await store.claim("b", limit=9, lease_seconds=10)] == ["r0", "r2"]


async def test_a_rollout_waits_for_the_node_that_suits_it_best(store, clock):
    await store.submit(order())
    waits = {"calc": 2.0}
    assert await store.claim("a", limit=9, lease_seconds=10, waits=waits) == []
    assert not await returns(store.wait_for_work())
    clock.now += 1
    assert await store.claim("a", limit=9, lease_seconds=10, waits=waits) == []
    clock.now += 1
    assert await returns(store.wait_for_work()), "nobody else has taken it"
    [lease] = await store.claim("a", limit=9, lease_seconds=10, waits=waits)
    assert await store.retry(lease, "a", ENGINE_GONE, delay_seconds=1)
    clock.now += 1
    assert await store.claim("a", limit=9, lease_seconds=10, waits=waits) == [], "it is queued anew"
    assert len(await store.claim("b", limit=9, lease_seconds=10, waits={"calc": 0.0})) == 1


async def test_an_expired_lease_is_taken_over_only_by_a_node_that_suits(store, clock):
    await store.submit(order())
    await take(store, "a", seconds=10)
    clock.now += 10
    assert await store.claim("b", limit=1, lease_seconds=10, waits={"code": 0.0}) == []
    assert not await returns(store.wait_for_work())
    assert len(await store.claim("b", limit=1, lease_seconds=10, waits={"calc": 2.0})) == 1


async def test_a_retry_waits_and_remembers_why(store, clock):
    await store.submit(order())
    lease = await take(store)
    assert await store.retry(lease, "a", ENGINE_GONE, delay_seconds=5)
    assert await store.claim("a", limit=1, lease_seconds=10) == []
    assert (await known(store)).retries == [ENGINE_GONE]
    clock.now += 5
    again = await take(store)
    assert (again.attempt, again.retries) == (2, [ENGINE_GONE])


def saved_turn(lease: Lease, number: int) -> UnsavedTurn:
    data = f"turn {number} of lease {lease.token}".encode() + bytes(range(256))
    return UnsavedTurn(lease.rollout_id, lease.token, number, data)


async def end_attempt(store: Store, clock: ManualClock, lease: Lease, way: str, **how: Any) -> None:
    """End the attempt of a lease of 10 seconds that "a" holds, in one of the ways there are."""
    if way == "expire":
        clock.now += 10
    elif way == "recover":
        await store.recover("b")
    elif way == "retry":
        await store.retry(lease, "a", ENGINE_GONE, **how)
    elif way == "restart":
        await store.restart(lease, "a")
    elif way == "finish":
        await store.finish(lease, "a", ended(lease))
    else:
        await store.release("a")
        if way == "cancel":
            await store.cancel("r1")


@pytest.mark.parametrize("way", ["expire", "release", "recover", "retry"])
async def test_turns_outlive_an_interrupted_attempt(store, clock, way):
    await store.submit(order("r1"))
    await store.submit(order("r2"))
    lease, other = await store.claim("a", limit=2, lease_seconds=10)
    assert lease.saved_turns == 0
    turns = [saved_turn(lease, 0), saved_turn(other, 0), saved_turn(lease, 1)]
    assert await store.save_turns("a", turns) == len(turns)
    await end_attempt(store, clock, lease, way, keep_turns=True)
    again = await take(store, "b")
    assert (again.rollout_id, again.saved_turns) == ("r1", 2)
    assert await store.saved_turns("r1") == [turns[0].data, turns[2].data]
    assert await store.save_turns("b", [saved_turn(again, 2)]) == 1
    assert len(await store.saved_turns("r1")) == 3
    assert await store.saved_turns("unknown") == []


async def test_turns_are_saved_by_the_holder_alone_and_without_a_gap(store, clock):
    await store.submit(order())
    lost = await take(store, "a")
    assert await store.save_turns("a", [saved_turn(lost, 1)]) == 0, "turn 0 is missing"
    assert await store.save_turns("a", [saved_turn(lost, 0), saved_turn(lost, 0)]) == 1
    clock.now += 10
    lease = await take(store, "b")
    assert await store.save_turns("a", [saved_turn(lost, 1)]) == 0
    assert await store.save_turns("b", [replace(saved_turn(lease, 1), rollout_id="unknown")]) == 0
    assert await store.save_turns("b", [saved_turn(lease, 1)]) == 1
    await store.release("b")
    await take(store, "b")
    assert await store.save_turns("b", [saved_turn(lease, 2)]) == 0, "the same owner, but an earlier lease"


@pytest.mark.parametrize("way", ["finish", "cancel", "retry", "restart"])
async def test_turns_of_an_attempt_that_is_over_are_deleted(store, clock, way):
    await store.submit(order())
    lease = await take(store)
    await store.advance(lease, "a", S.ROLLOUT)
    await store.save_turns("a", [saved_turn(lease, 0)])
    await end_attempt(store, clock, lease, way)
    assert await store.saved_turns("r1") == []


def steps_of(rollout_id: str, number: int) -> EncodedSteps:
    return EncodedSteps(rollout_id, f"steps {number} of {rollout_id}".encode() + bytes(range(256)))


async def test_steps_are_kept_for_each_attempt_in_order(store):
    for name in ("r1", "r2", "r3"):
        await store.submit(order(name))
    attempts = [steps_of("r1", 0), steps_of("r2", 0), steps_of("r1", 1)]
    assert await store.save_steps([*attempts, steps_of("unknown", 0)]) == len(attempts)
    assert await store.save_steps([steps_of("r1", 2)]) == 1
    assert await store.saved_steps(["r2", "r3", "r1", "unknown"]) == {
        "r1": [steps_of("r1", number).data for number in range(3)],
        "r2": [steps_of("r2", 0).data],
    }
    assert await store.saved_steps([]) == {}
    assert await store.save_steps([]) == 0


async def test_steps_of_many_rollouts_are_written_and_read_at_once(store):
    names = [f"r{number}" for number in range(700)]
    for name in names:
        await store.submit(order(name))
    assert await store.save_steps([steps_of(name, 0) for name in names]) == len(names)
    assert len(await store.saved_steps(names)) == len(names)


async def test_a_rollout_keeps_the_steps_of_a_bounded_number_of_attempts(store):
    await store.submit(order())
    attempts = [steps_of("r1", number) for number in range(MAX_RECORDS + 3)]
    assert await store.save_steps(attempts) == MAX_RECORDS
    assert (await store.saved_steps(["r1"]))["r1"] == [one.data for one in attempts[:MAX_RECORDS]]


@pytest.mark.parametrize("way", ["finish", "retry", "restart", "release", "expire"])
async def test_steps_are_kept_however_their_attempt_ended(store, clock, way):
    await store.submit(order())
    lease = await take(store)
    await store.advance(lease, "a", S.ROLLOUT)
    await end_attempt(store, clock, lease, way)
    if way == "expire":
        await take(store, "b")
    assert await store.save_steps([steps_of("r1", 0)]) == 1
    assert await store.saved_steps(["r1"]) == {"r1": [steps_of("r1", 0).data]}


async def test_steps_are_deleted_with_their_rollout(store, clock):
    await store.submit(order())
    lease = await take(store)
    await store.finish(lease, "a", ended(lease))
    await store.save_steps([steps_of("r1", 0)])
    clock.now += 100
    while await store.runs.delete_expired(RetentionSettings(rollout_seconds=50)):
        pass
    assert await store.get("r1") is None
    await store.submit(order())
    assert await store.saved_steps(["r1"]) == {}


async def test_a_lease_tells_the_run_and_the_group(store):
    source = InlineTasks(tasks=[Task(environment="calc", instance={})])
    run = RunRequest(run_id="a", source=source, group_size=1, batch_size=1)
    await store.runs.create(run, tasks=1, version=0, digest=None)
    request = order("a.0.0")
    await store.runs.start_groups("a", [NewGroup(0, 0, [request])])
    await store.submit(order("alone"))
    leases = await store.claim("a", limit=2, lease_seconds=10)
    assert [(one.run_id, one.group) for one in leases] == [("a", 0), (None, None)]


async def test_a_restarted_rollout_is_queued_with_its_attempt_not_counted(store):
    await store.submit(order())
    lease = await take(store)
    await store.advance(lease, "a", S.ROLLOUT)
    span = Span(stage=Stage.ROLLOUT, attempt=1, started_at=lease.created_at, queued_seconds=0, seconds=2)
    assert await store.restart(lease, "a", spans=[span])
    assert not await store.restart(lease, "a")
    again = await take(store)
    assert (again.attempt, again.saved_turns, again.spans, again.retries) == (1, 0, [span], [])


async def test_stages_only_go_forward_within_an_attempt(store):
    await store.submit(order())
    lease = await take(store)
    assert await store.advance(lease, "a", S.ROLLOUT)
    for state in (S.INIT, S.QUEUED, S.COMPLETED):
        with pytest.raises(ValueError, match=state):
            await store.advance(lease, "a", state)
    with pytest.raises(ValueError, match="is not a result"):
        await store.finish(lease, "a", ended(lease, S.EVALUATE))
    with pytest.raises(ValueError, match="is not a result"):
        await store.finish(replace(lease, rollout_id="r2"), "a", ended(lease))
    assert (await known(store)).state is S.ROLLOUT


async def test_cancel_of_a_queued_rollout_is_final(store):
    await store.submit(order())
    assert await store.cancel("r1") is S.QUEUED
    assert await store.cancel("r1") is S.CANCELLED
    cancelled = await known(store)
    assert (cancelled.state, cancelled.stop_reason) == (S.CANCELLED, StopReason.CANCELLED)
    assert cancelled.finished_at is not None
    assert await store.claim("a", limit=1, lease_seconds=10) == []


async def test_what_fails_an_attempt_while_everything_is_cancelled_is_cancelled_too(store, monkeypatch):
    lease = await leased(store, "r1", "a")
    assert await store.advance(lease, "a", S.INIT)
    listed = store.list

    async def fail_meanwhile(**which: Any) -> RolloutPage:
        page = await listed(**which)
        await store.retry(lease, "a", ENGINE_GONE)
        return page

    monkeypatch.setattr(store, "list", fail_meanwhile)
    assert await cancel_unfinished(store) == ["r1"]
    assert (await known(store)).state is S.CANCELLED


async def test_a_request_to_cancel_is_no_change_of_state(store, clock):
    lease = await leased(store, "r1", "a")
    assert await store.advance(lease, "a", S.ROLLOUT)
    (before,) = (await store.summaries(SummaryFilter())).rows
    for _ in range(2):
        clock.now += 5
        await store.cancel("r1")
    assert (await store.summaries(SummaryFilter())).rows == [before]
    asked = [event for event in await store.events(after=0) if event.kind == "rollout.cancel_requested"]
    assert [event.time.timestamp() for event in asked] == [clock.now - 5]


async def test_a_cancelled_rollout_has_no_error(store):
    lease = await leased(store, "r1", "a")
    assert await store.retry(lease, "a", ENGINE_GONE)
    await store.cancel("r1")
    (row,) = (await store.summaries(SummaryFilter())).rows
    assert (row.state, row.error_code) == (S.CANCELLED, None)
    assert "code" not in (await store.events(after=0))[-1].data


@pytest.mark.parametrize("way", ["expire", "release", "recover", "retry", "restart"])
async def test_a_cancelled_rollout_is_never_queued_again(store, clock, way):
    await store.submit(order())
    lease = await take(store)
    await store.cancel("r1")
    await end_attempt(store, clock, lease, way)
    assert await store.claim("b", limit=1, lease_seconds=10) == []
    assert (await known(store)).state is S.CANCELLED
    assert await store.counts() == {S.CANCELLED: 1}


async def test_every_change_of_state_is_an_event(store):
    assert await store.last_event() == 0
    await store.submit(order())
    lease = await take(store)
    await store.advance(lease, "a", S.INIT)
    await store.retry(lease, "a", ENGINE_GONE)
    lease = await take(store)
    await store.advance(lease, "a", S.INIT)
    await store.cancel("r1")
    own = await store.record("backend.failed", "b1", {"why": ["x"], "big": 2**70})
    await store.finish(lease, "a", ended(lease, reward=1.0, stop_reason=StopReason.FINISHED))
    events = await store.events(after=0)
    assert [event.event_id for event in events] == list(range(1, len(events) + 1))
    assert events[-2] == own
    assert [(event.kind, event.data) for event in events if event != own] == [
        ("rollout.state", {"state": "queued", "attempt": 0}),
        ("rollout.state", {"state": "init", "attempt": 1}),
        ("rollout.state", {"state": "queued", "attempt": 1, "code": "engine_gone"}),
        ("rollout.state", {"state": "init", "attempt": 2}),
        ("rollout.cancel_requested", {"state": "init", "attempt": 2}),
        ("rollout.state", {"state": "completed", "attempt": 2, "reward": 1.0, "stop_reason": "finished"}),
    ]
    assert await store.events(after=3, limit=2) == events[3:5]


async def test_pages_cover_everything_once(store, clock):
    for number in range(10):
        clock.now += 1
        await store.submit(order(f"r{number}"))
    for number in (2, 3, 7):
        await store.cancel(f"r{number}")
    assert await pages(store, None) == [f"r{n}" for n in range(10)]
    assert await pages(store, S.CANCELLED) == ["r2", "r3", "r7"]
    assert (await store.list(limit=1)).counts == {S.QUEUED: 7, S.CANCELLED: 3}
    for cursor in ("x", "-1", "1" * 30, "\N{SUPERSCRIPT TWO}"):
        with pytest.raises(InvalidFieldError, match="cursor"):
            await store.list(cursor=cursor)


async def pages(store: Store, state: RolloutState | None) -> list[str]:
    found: list[str] = []
    cursor = None
    for _ in range(10):
        page = await store.list(state=state, cursor=cursor, limit=3)
        found += [rollout.rollout_id for rollout in page.rollouts]
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise AssertionError("the pages do not end")


async def returns(wait: Awaitable[Any]) -> bool:
    """Return whether a wait ends at once."""
    with anyio.move_on_after(0.05) as scope:
        await wait
    return not scope.cancelled_caught


async def woken_by(wait: Callable[[], Awaitable[Any]], act: Callable[[], Awaitable[Any]]) -> Any:
    """Return the result of a wait that begins before `act`."""
    answers: list[Any] = []
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(collect, answers, wait)
            await anyio.wait_all_tasks_blocked()
            assert not answers
            await act()
    return answers[0]


async def test_waiting_for_work(store, clock):
    assert await store.claim("a", limit=2, lease_seconds=10) == []
    assert not await returns(store.wait_for_work())
    await woken_by(store.wait_for_work, lambda: store.submit(order("r1")))
    await store.submit(order("r2"))
    await store.claim("a", limit=1, lease_seconds=10)
    assert await returns(store.wait_for_work()), "a full claim may have left something"
    lease = await take(store)
    assert await store.claim("a", limit=1, lease_seconds=10) == []
    await woken_by(store.wait_for_work, lambda: store.retry(lease, "a", ENGINE_GONE, delay_seconds=5))
    assert await store.claim("a", limit=1, lease_seconds=10) == []
    assert not await returns(store.wait_for_work())
    clock.now += 5
    assert await returns(store.wait_for_work()), "the delay is over"
    await take(store)
    assert await store.claim("a", limit=1, lease_seconds=10) == []
    clock.now += 10
    assert await store.claim("a", limit=1, lease_seconds=10) == [], "its own leases are no work for it"
    assert not await returns(store.wait_for_work())
    assert await store.claim("b", limit=1, lease_seconds=5)
    assert not await store.claim("a", limit=9, lease_seconds=5)
    clock.now += 5
    assert await returns(store.wait_for_work()), "another's lease ran out"


async def test_waiting_for_cancels(store):
    await store.submit(order())
    await take(store)
    await store.cancel_requested("a")
    await woken_by(store.wait_for_cancels, lambda: store.cancel("r1"))
    assert await returns(store.wait_for_cancels())
    assert await store.cancel_requested("a") == ["r1"]
    assert not await returns(store.wait_for_cancels())


async def test_waiting_for_events(store):
    assert not await returns(store.wait_for_events(after=0))
    assert await woken_by(lambda: store.wait_for_events(after=0), lambda: store.submit(order())) == 1
    assert await returns(store.wait_for_events(after=0))
    assert not await returns(store.wait_for_events(after=1))
    assert await store.wait_for_events(after=2) == 1, "there never was such an event, or it was lost"


async def test_a_rollout_that_has_waited_is_found_behind_many_that_have_not(store, clock):
    for number in range(300):
        await store.submit(order(f"r{number}"))
    held = await store.claim("b", limit=300, lease_seconds=100)
    assert len(held) == 300
    await store.submit(order("old"))
    clock.now += 4
    await store.release("b")  # so these are older, but have not waited
    await store.submit(order("young"))
    found = await store.claim("a", limit=9, lease_seconds=10, waits={"calc": 3.0})
    assert [lease.rollout_id for lease in found] == ["old"]
    clock.now += 3
    found = await store.claim("a", limit=302, lease_seconds=10, waits={"calc": 3.0})
    assert are_oldest_of(store, [*(f"r{number}" for number in range(300)), "young"], found, 302)


async def test_an_owner_is_told_what_it_holds(store):
    assert await store.held("a") == {}
    for number in range(3):
        await store.submit(order(f"r{number}"))
    first = await store.claim("a", limit=2, lease_seconds=10)
    await store.claim("b", limit=1, lease_seconds=10)
    assert await store.held("a") == {lease.rollout_id: lease.token for lease in first}
    await store.release("a", ["r0"])
    again = await take(store)
    assert await store.held("a") == {"r0": again.token, "r1": first[1].token}
    assert again.token > first[0].token
    assert store.rewinds == 0


@pytest.mark.parametrize("way", ["finish", "cancel", "release"])
async def test_waiting_for_a_result(store, way):
    assert await store.wait_for_result("r1") is None
    await store.submit(order())

    async def end() -> None:
        if way == "cancel":
            await store.cancel("r1")
            return
        lease = await take(store)
        if way == "finish":
            await store.finish(lease, "a", ended(lease))
        else:
            await store.cancel("r1")
            await store.release("a")

    result = await woken_by(lambda: store.wait_for_result("r1"), end)
    assert result.state is (S.COMPLETED if way == "finish" else S.CANCELLED)
    assert await store.wait_for_result("r1") == result


async def test_a_cancelled_caller_leaves_no_lease_behind_unseen(store):
    await store.submit(order())
    leases: list[Lease] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        leases = await store.claim("a", limit=1, lease_seconds=10)
    assert [lease.rollout_id for lease in leases] == ["r1"]


async def test_a_text_that_cannot_be_encoded_fails_its_call_alone(store):
    with pytest.raises(UnicodeEncodeError):
        await store.cancel("\ud800")
    with pytest.raises(UnicodeEncodeError):
        await store.save_steps([EncodedSteps("r\ud800", b"")])
    assert await store.counts() == {}


async def test_a_closed_store_says_so(store):
    await store.submit(order())
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.get("r1")


@dataclass
class Known:
    """The state of a rollout that the contract requires."""

    body: int
    state: RolloutState = S.QUEUED
    attempt: int = 0
    owner: str | None = None
    lease: Lease | None = None
    until: float = 0.0
    not_before: float = 0.0
    cancel: bool = False
    retries: int = 0
    turns: list[bytes] = field(default_factory=list)
    reward: float | None = None
    history: list[RolloutState] = field(default_factory=list)


OWNERS = st.sampled_from(["a", "b"])
IDS = st.sampled_from(["r1", "r2", "r3", "r4"])
STAGES = [S.QUEUED, S.INIT, S.ROLLOUT, S.EVALUATE]


class StoreMachine(RuleBasedStateMachine):
    """A check of any sequence of calls against a model of the contract."""

    def __init__(self, kind: Callable[[ManualClock], AbstractAsyncContextManager[Store]]) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.stack = ExitStack()
        portal: BlockingPortal = self.stack.enter_context(anyio.from_thread.start_blocking_portal())
        self.call = portal.call
        self.store: Store = self.stack.enter_context(portal.wrap_async_context_manager(kind(self.clock)))
        self.known: dict[str, Known] = {}
        self.buried: set[str] = set()
        self.leases: list[tuple[str, Lease]] = []
        self.rewards = itertools.count(1)

    def teardown(self) -> None:
        self.stack.close()

    def pick(self, data: st.DataObject) -> tuple[str, Lease, Known | None]:
        """Return an owner, a lease that it was given, and the state of the rollout if it still holds it."""
        owner, lease = data.draw(st.sampled_from(self.leases))
        record = self.known[lease.rollout_id]
        return owner, lease, record if record.owner == owner and record.lease is lease else None

    @staticmethod
    def give_back(record: Known) -> None:
        record.owner = record.lease = None
        record.state = S.CANCELLED if record.cancel else S.QUEUED
        if record.cancel:
            record.turns = []

    @rule(rollout_id=IDS, body=st.integers(0, 1))
    def submit(self, rollout_id: str, body: int) -> None:
        record = self.known.get(rollout_id)
        if record is not None and record.body != body:
            with pytest.raises(ConflictError):
                self.call(lambda: self.store.submit(order(rollout_id, body=body)))
            return
        rollout, new = self.call(lambda: self.store.submit(order(rollout_id, body=body)))
        assert new == (record is None)
        if record is None:
            record = self.known[rollout_id] = Known(body)
            if rollout_id in self.buried:
                self.buried.remove(rollout_id)
                record.state = S.CANCELLED
        assert rollout.state is record.state

    @rule(rollout_id=IDS)
    def cancel(self, rollout_id: str) -> None:
        record = self.known.get(rollout_id)
        state = self.call(lambda: self.store.cancel(rollout_id))
        assert state == (record.state if record else None)
        if record is None:
            self.buried.add(rollout_id)
        elif not record.state.terminal:
            record.cancel = True
            if record.owner is None:
                record.state, record.turns = S.CANCELLED, []

    @rule(owner=OWNERS, limit=st.integers(1, 3), seconds=st.integers(1, 20))
    def claim(self, owner: str, limit: int, seconds: int) -> None:
        now = self.clock.now
        expired = {
            rollout_id: record
            for rollout_id, record in self.known.items()
            if record.owner not in (None, owner) and record.until <= now
        }
        expected = [
            rollout_id
            for rollout_id, record in self.known.items()
            if (record.state is S.QUEUED and record.owner is None and record.not_before <= now)
            or (rollout_id in expired and not record.cancel)
        ]
        leases = self.call(lambda: self.store.claim(owner, limit=limit, lease_seconds=seconds))
        assert are_oldest_of(self.store, expected, leases, limit)
        for rollout_id, record in expired.items():
            if record.cancel:
                is_over = self.call(lambda name=rollout_id: self.store.get(name)).state is S.CANCELLED
                assert is_over or len(self.store.shards) > 1, "a shard whose turn did not come"
                if is_over:
                    self.give_back(record)
        for lease in leases:
            record = self.known[lease.rollout_id]
            record.owner, record.lease, record.until = owner, lease, now + seconds
            record.state = S.QUEUED
            assert (lease.attempt, lease.saved_turns) == (record.attempt + 1, len(record.turns))
            self.leases.append((owner, lease))

    @rule(owner=OWNERS, ids=st.sets(IDS), seconds=st.integers(1, 20))
    def renew(self, owner: str, ids: set[str], seconds: int) -> None:
        lost = self.call(lambda: self.store.renew(owner, sorted(ids), lease_seconds=seconds))
        assert set(lost) == {i for i in ids if i not in self.known or self.known[i].owner != owner}
        for rollout_id in ids & self.known.keys():
            if self.known[rollout_id].owner == owner:
                self.known[rollout_id].until = self.clock.now + seconds

    @rule(owner=OWNERS)
    def release(self, owner: str) -> None:
        held = [record for record in self.known.values() if record.owner == owner]
        assert self.call(lambda: self.store.release(owner)) == len(held)
        for record in held:
            record.attempt -= record.state is not S.QUEUED
            self.give_back(record)

    @rule(owner=OWNERS)
    def recover(self, owner: str) -> None:
        held = [record for record in self.known.values() if record.owner not in (None, owner)]
        assert self.call(lambda: self.store.recover(owner)) == len(held)
        for record in held:
            self.give_back(record)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), state=st.sampled_from(STAGES[1:]))
    def advance(self, data: st.DataObject, state: RolloutState) -> None:
        owner, lease, record = self.pick(data)
        if record and STAGES.index(state) < STAGES.index(record.state):
            with pytest.raises(ValueError, match="back"):
                self.call(lambda: self.store.advance(lease, owner, state))
            return
        assert self.call(lambda: self.store.advance(lease, owner, state)) == (record is not None)
        if record:
            record.attempt += record.state is S.QUEUED
            record.state = state

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), number=st.integers(0, 3))
    def save_turn(self, data: st.DataObject, number: int) -> None:
        owner, lease, record = self.pick(data)
        saved = record is not None and len(record.turns) == number
        turn = saved_turn(lease, number)
        assert self.call(lambda: self.store.save_turns(owner, [turn])) == saved
        if record and saved:
            record.turns.append(turn.data)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), kept=st.integers(0, 3))
    def restart(self, data: st.DataObject, kept: int) -> None:
        owner, lease, record = self.pick(data)
        done = self.call(lambda: self.store.restart(lease, owner, kept_turns=kept))
        assert done == (record is not None)
        if record:
            record.attempt -= record.state is not S.QUEUED
            record.turns = record.turns[:kept]
            self.give_back(record)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), delay=st.integers(0, 10), keep=st.booleans())
    def retry(self, data: st.DataObject, delay: int, keep: bool) -> None:
        owner, lease, record = self.pick(data)
        done = self.call(lambda: self.store.retry(lease, owner, ENGINE_GONE, delay_seconds=delay, keep_turns=keep))
        assert done == (record is not None)
        if record:
            record.not_before = self.clock.now + delay
            record.retries += 1
            record.turns = record.turns if keep else []
            record.attempt += record.state is S.QUEUED
            self.give_back(record)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), state=st.sampled_from([S.COMPLETED, S.FAILED, S.CANCELLED]))
    def finish(self, data: st.DataObject, state: RolloutState) -> None:
        owner, lease, record = self.pick(data)
        reward = float(next(self.rewards))
        result = ended(lease, state, reward=reward)
        assert self.call(lambda: self.store.finish(lease, owner, result)) == (record is not None)
        if record:
            record.owner = record.lease = None
            record.state, record.reward, record.turns = state, reward, []

    @rule(seconds=st.integers(1, 15))
    def pass_time(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def the_store_is_what_the_contract_says(self) -> None:
        page = self.call(lambda: self.store.list(limit=10))
        expected = {
            rollout_id: (record.state, record.attempt, record.retries, record.reward)
            for rollout_id, record in self.known.items()
        }
        assert {r.rollout_id: (r.state, r.attempt, len(r.retries), r.reward) for r in page.rollouts} == expected
        states = [record.state for record in self.known.values()]
        assert page.counts == {state: states.count(state) for state in set(states)}

    @invariant()
    def turns_are_kept_until_the_rollout_ends(self) -> None:
        for rollout_id, record in self.known.items():
            assert self.call(lambda i=rollout_id: self.store.saved_turns(i)) == record.turns

    @invariant()
    def events_are_gapless_and_end_in_one_terminal_state(self) -> None:
        events = self.call(lambda: self.store.events(after=0))
        assert [event.event_id for event in events] == list(range(1, len(events) + 1))
        last: dict[str, RolloutState] = {}
        for event in events:
            if event.kind == "rollout.state":
                assert not (event.subject in last and last[event.subject].terminal)
                last[event.subject] = S(str(event.data["state"]))
        assert last == {rollout_id: record.state for rollout_id, record in self.known.items()}

    @invariant()
    def cancellations_reach_the_holder(self) -> None:
        for owner in ("a", "b"):
            asked = self.call(lambda owner=owner: self.store.cancel_requested(owner))
            held = [i for i, record in self.known.items() if record.owner == owner and record.cancel]
            assert sorted(asked) == sorted(held)


def test_any_sequence_of_calls_keeps_the_contract(kind):
    run_state_machine_as_test(lambda: StoreMachine(kind), settings=settings(stateful_step_count=30, deadline=None))
