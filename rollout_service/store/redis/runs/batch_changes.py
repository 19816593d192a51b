"""The changes of batches; each function plans one transaction from what was read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from rollout_service.base.ids import BatchId
from rollout_service.groups.filters import SURPLUS
from rollout_service.groups.shares import Owner
from rollout_service.store import rules
from rollout_service.store.base import unknown_batch
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.redis.runs import run_changes
from rollout_service.store.redis.runs.database import Replies
from rollout_service.store.redis.runs.records import BatchRecord, GroupStatus, WaitingGroup
from rollout_service.store.redis.runs.transaction import RunTransaction, by_number
from rollout_service.store.rules import BatchState
from rollout_service.store.runs_contract import BatchLease, BatchLeaseRequest, NoBatch

ACKNOWLEDGED = "acknowledged"


def lease(
    change: RunTransaction,
    request: BatchLeaseRequest,
    batches: Mapping[int, BatchRecord],
    waiting: Mapping[int, WaitingGroup],
    owners: Mapping[int, Sequence[Owner]],
) -> tuple[BatchLease | NoBatch, bool]:
    """Lease the batch that this consumer holds already, one that is free again, or a new one.

    Return also whether to cancel the open groups as surplus.
    """
    run, until = change.run.record, change.now + request.seconds
    out = [batches[number] for number in sorted(batches)]
    for batch in out:
        if batch.state is BatchState.LEASED and batch.lease_key == request.key and batch.lease_until > change.now:
            batch.lease_until = until
            change.put_batch(batch)
            return _leased(change, batch), False
    bound = None if request.allow_stale else rules.oldest_allowed(run)
    waiting = dict(waiting)
    for batch in out:
        if batch.state is BatchState.LEASED and batch.lease_until > change.now:
            continue
        if rules.is_stale(batch.oldest_version, bound):
            waiting |= {group.number: group for group in dissolve(change, batch)}
            continue
        batch.state, batch.lease_key, batch.lease_until = BatchState.LEASED, request.key, until
        batch.deliveries += 1
        batch.version = run.version
        change.put_batch(batch)
        change.batch_moved(batch, batch.state)
        return _leased(change, batch), False
    due = min((batch.lease_until for batch in out if batch.lease_until > change.now), default=math.inf)
    return _new_batch(change, request, waiting, owners, bound=bound, due_in=due - change.now)


def _new_batch(
    change: RunTransaction,
    request: BatchLeaseRequest,
    waiting: Mapping[int, WaitingGroup],
    owners: Mapping[int, Sequence[Owner]],
    *,
    bound: int | None,
    due_in: float,
) -> tuple[BatchLease | NoBatch, bool]:
    run = change.run.record  # dissolved batches have changed its counters
    ready = [waiting[number].ready(owners.get(number, ())) for number in sorted(waiting)]
    decision = rules.next_batch(run, ready, bound=bound, due_in=due_in)
    if isinstance(decision, NoBatch):
        return decision, False
    dropped = rules.dropped_counts(run.counters)
    batch = BatchRecord(
        number=change.run["batches"],
        state=BatchState.LEASED,
        lease_key=request.key,
        lease_until=change.now + request.seconds,
        deliveries=1,
        version=run.version,
        dropped=rules.added_counts(change.run.reported, dropped),
        groups=[waiting[number] for number in decision.groups],
    )
    change.run.set(batches=batch.number + 1, reported=json.dumps(dropped))
    change.put_batch(batch)
    change.batch_moved(batch, batch.state)
    for number in decision.groups:
        _take(change, number, GroupStatus(run_changes.BATCHED, str(batch.number)))
    for number in decision.surplus:
        _take(change, number, GroupStatus(rules.DROPPED.rstrip(":"), SURPLUS))
        change.settle_group(number, waiting[number].size)
        change.write_reason(number, SURPLUS)
    return _leased(change, batch), decision.cancels_open


def _take(change: RunTransaction, number: int, status: GroupStatus) -> None:
    change.do("HDEL", change.keys.ready, number)
    change.move_group(number, run_changes.READY.counter, status)


def _leased(change: RunTransaction, batch: BatchRecord) -> BatchLease:
    numbers = sorted(group.number for group in batch.groups)
    return run_codec.decode_batch(batch.row(), change.keys.run_id, numbers)


def dissolve(change: RunTransaction, batch: BatchRecord) -> Sequence[WaitingGroup]:
    """Dissolve a batch, so that its groups wait again; return them."""
    change.settle_batch(batch, BatchState.DISSOLVED)
    for group in batch.groups:
        change.move_group(group.number, run_changes.BATCHED, run_changes.READY)
        change.wait_for_batch(group)
    return batch.groups


def stale_groups(change: RunTransaction, replies: Replies, bound: int) -> list[int]:
    """Return the waiting groups that are older than this version, after dissolving returned batches with such."""
    waiting = read_waiting(replies[1])
    for batch in read_batches(replies[0]).values():
        if batch.state is BatchState.RETURNED and rules.is_stale(batch.oldest_version, bound):
            waiting |= {group.number: group for group in dissolve(change, batch)}
    return [number for number in sorted(waiting) if rules.is_stale(waiting[number].oldest_version, bound)]


def acknowledge(change: RunTransaction, replies: Replies, number: int) -> None:
    batch, state = _batch(change, replies, number)
    name = str(BatchId(change.keys.run_id, number))
    if not rules.check_acknowledge(name, state) or batch is None:
        return
    change.settle_batch(batch, BatchState.ACKNOWLEDGED)
    for group in batch.groups:
        change.move_group(group.number, run_changes.BATCHED, GroupStatus(ACKNOWLEDGED, str(number)))
        change.settle_group(group.number, group.size)
    change.run.count("batches:acknowledged")
    change.finish_if_done()


def renew(change: RunTransaction, replies: Replies, number: int, *, key: str | None, seconds: float) -> float:
    """Extend the lease of a batch; return when it expires, in Unix seconds."""
    batch, state = _batch(change, replies, number)
    name, holder = str(BatchId(change.keys.run_id, number)), batch.lease_key if batch else None
    rules.check_renewal(name, state, holder=holder, key=key)
    until = change.now + seconds
    if batch is not None:
        batch.lease_until = until
        change.put_batch(batch)
    return until


def give_back(change: RunTransaction, replies: Replies, number: int, *, key: str | None) -> None:
    batch, state = _batch(change, replies, number)
    name, holder = str(BatchId(change.keys.run_id, number)), batch.lease_key if batch else None
    if rules.check_return(name, state, holder=holder, key=key) and batch is not None:
        batch.state, batch.lease_until = BatchState.RETURNED, 0.0
        change.put_batch(batch)
        change.batch_moved(batch, batch.state)


def _batch(change: RunTransaction, replies: Replies, number: int) -> tuple[BatchRecord | None, BatchState]:
    """Return a batch and its state; None with the final state if it is settled."""
    stored, final = replies
    if stored is not None:
        batch = BatchRecord.decode(stored)
        return batch, batch.state
    if final is None:
        raise unknown_batch(change.keys.run_id, number)
    return None, BatchState(final.decode())


def read_batches(reply: Sequence[bytes]) -> dict[int, BatchRecord]:
    return {number: BatchRecord.decode(data) for number, data in by_number(reply).items()}


def read_waiting(reply: Sequence[bytes]) -> dict[int, WaitingGroup]:
    return {number: WaitingGroup.decode(number, data) for number, data in by_number(reply).items()}
