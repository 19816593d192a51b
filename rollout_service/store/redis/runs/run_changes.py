"""The changes of runs and of their open groups; each function plans one transaction from what was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import JsonValue

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import RolloutRequest
from api_schemas.runs import RunState
from api_schemas.tasks import Task
from rollout_service.groups.filters import DELETED
from rollout_service.store import rules
from rollout_service.store.codec import rollouts as rollout_codec
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.redis.runs.database import Replies
from rollout_service.store.redis.runs.records import ClosedRecord, GroupStatus, OpenRecord, WaitingGroup
from rollout_service.store.redis.runs.transaction import RunTransaction, open_records
from rollout_service.store.runs_contract import GroupClosure, NewGroup, RunRecord

OPEN = GroupStatus("open")
READY = GroupStatus("ready")
BATCHED = "batched"


def update(
    change: RunTransaction,
    _: Replies,
    *,
    state: RunState | None,
    version: int | None,
    changes: Mapping[str, JsonValue] | None,
    problem: ErrorInfo | None,
) -> RunRecord:
    run = change.run
    before = run.record
    run.set(state=rules.next_state(before, state).value)
    if version is not None:
        run.set(version=max(version, before.version))
    if changes:
        run.set(request=run_codec.encode_request(before.request.model_copy(update=changes)))
    if problem is not None:
        run.set(problem=problem.model_dump_json())
    elif state is RunState.RUNNING:
        run.set(problem=None)
    if state is RunState.RUNNING:
        _add(change, rules.restart_counts(before.counters))
    if run.record != before:
        change.touch()
        if run.changed_state is None:
            change.announce()
    return run.record


def append(
    change: RunTransaction,
    replies: Replies,
    tasks: Sequence[Task],
    texts: Sequence[str],
    *,
    offset: int | None,
    close: bool,
) -> RunRecord:
    """Append tasks, of which `texts` has the JSON."""
    run = change.run.record
    there = replies[0] if replies else ()
    first = run.tasks if offset is None else offset
    if rules.is_appended(run, run_codec.decode_tasks(there), tasks, offset=offset, close=close):
        return run
    rules.check_append(run, first)
    change.append_tasks(texts)
    count = first + len(tasks)
    change.run.set(tasks=count, total=count if close else None)
    change.touch()
    change.finish_if_done()
    change.announce()
    return change.run.record


def start_groups(change: RunTransaction, _: Replies, groups: Sequence[NewGroup]) -> int:
    if not rules.can_start(change.run.record, groups):
        return 0
    for group in groups:
        ids = [change.submit(request, group.number) for request in group.requests]
        record = OpenRecord(group.epoch, ids, opened_at=change.now)
        change.do("HSET", change.keys.open, group.number, record.encode())
        change.move_group(group.number, None, OPEN)
    change.run.set(cursor=groups[-1].number + 1)
    change.touch()
    return len(groups)


def extend_group(
    change: RunTransaction, replies: Replies, number: int, first: int, requests: Sequence[RolloutRequest]
) -> None:
    group = _open_group(replies)
    if group is None or len(group.members) != first:
        return
    group.members += [change.submit(request, number) for request in requests]
    change.do("HSET", change.keys.open, number, group.encode())


def retry_sample(change: RunTransaction, replies: Replies, number: int, sample: int, request: RolloutRequest) -> None:
    if (group := _open_group(replies)) is None:
        return
    group.earlier.append(group.members[sample])
    group.members[sample] = change.submit(request, number)
    change.do("HSET", change.keys.open, number, group.encode())
    change.run.count("retried")


def mark_stragglers(change: RunTransaction, replies: Replies, number: int, samples: Sequence[int]) -> None:
    if (group := _open_group(replies)) is None:
        return
    group.cut = sorted(samples)
    change.do("HSET", change.keys.open, number, group.encode())


def _open_group(replies: Replies) -> OpenRecord | None:
    return None if replies[0] is None else OpenRecord.decode(replies[0])


def cancel_groups(change: RunTransaction, replies: Replies, reason: str) -> None:
    """Record why the open groups are being cancelled; a reason that is recorded stays."""
    for number, group in open_records(replies[0]).items():
        if group.reason is None:
            group.reason = reason
            change.do("HSET", change.keys.open, number, group.encode())


def close_group(
    change: RunTransaction, replies: Replies, closure: GroupClosure, *, size: int, head: bytes | None
) -> None:
    """Keep or drop an open group; `replies` has its record, and for each sample whether it was erased since.

    `size` is the bytes of its trajectories.
    """
    stored, *erased = replies
    if stored is None or any(erased):
        return
    number, status, run = closure.number, GroupStatus(closure.state, closure.reason), change.run.record
    record = ClosedRecord.close(OpenRecord.decode(stored), closure, size=size)
    change.do("HDEL", change.keys.open, number)
    change.do("HSET", change.keys.closed, number, record.encode())
    change.move_group(number, OPEN.counter, status)
    _place(change, closure, size=size, head=head)
    change.group_closed(number, status)
    change.write_history(closure)
    if rules.ends_problem(run, closure):
        change.run.set(problem=None)
        change.touch()
        change.announce()
    _count(change, rules.closing_counts(closure, run.counters))


def reclose_group(change: RunTransaction, replies: Replies, closure: GroupClosure, *, head: bytes | None) -> None:
    """Close a group that waits for a batch again.

    `replies` has what it waits with, its record, and for each sample whether it was erased since.
    """
    waiting, stored, *erased = replies
    if waiting is None or stored is None or any(erased):
        return
    number, before = closure.number, ClosedRecord.decode(stored)
    samples, summary = run_codec.encode_samples(closure.samples), run_codec.encode_summary(closure)
    change.do("HSET", change.keys.closed, number, replace(before, samples=samples, summary=summary).encode())
    change.do("HDEL", change.keys.ready, number)
    change.do("HDEL", change.keys.heads, number)
    change.move_group(number, READY.counter, GroupStatus(closure.state, closure.reason))
    _place(change, closure, size=before.size, head=head)
    change.write_history(closure)
    masked = rules.masked_counts(closure.samples, run_codec.decode_samples(before.samples))
    _count(change, masked)
    change.announce()


def erase_sample(
    change: RunTransaction, replies: Replies, number: int, results: Mapping[str, bytes | None]
) -> int | None:
    """Erase the rollouts of a sample, of which `results` has the stored ones; return the batch of its group, if any.

    `replies` has the record of the group once it is closed, and its state.
    """
    for rollout_id, result in results.items():
        change.do("erase", rollout_id, "" if result is None else rollout_codec.erase_result(result.decode()))
    stored, status = replies
    if stored is None or status is None:
        return None
    state, record = GroupStatus.parse(status.decode()), ClosedRecord.decode(stored)
    _take_out(change, number, record, state, list(results))
    return state.batch


def _take_out(
    change: RunTransaction, number: int, record: ClosedRecord, state: GroupStatus, rollout_ids: Sequence[str]
) -> None:
    """Remove samples from a group, as far as it can still be delivered."""
    before = run_codec.decode_samples(record.samples)
    is_settled = state.state not in (READY.state, BATCHED)
    samples = rules.without_erased(before, rollout_ids, is_settled=is_settled)
    revised = replace(record, samples=run_codec.encode_samples(samples))
    change.do("HSET", change.keys.closed, number, revised.encode())
    change.do("HDEL", change.keys.heads, number)
    if is_settled:
        return
    if state == READY and not rules.is_worth_keeping(samples, change.run.record.request):
        change.do("HDEL", change.keys.ready, number)
        change.move_group(number, READY.counter, GroupStatus("dropped", DELETED))
        change.settle_group(number, record.size)
        change.write_reason(number, DELETED)
    _count(change, rules.masked_counts(samples, before))
    change.announce()


def _place(change: RunTransaction, closure: GroupClosure, *, size: int, head: bytes | None) -> None:
    """Let a kept group wait, and settle a dropped one."""
    if closure.reason is not None:
        change.settle_group(closure.number, size)
        return
    change.wait_for_batch(WaitingGroup(closure.number, closure.oldest_version, size))
    if head is not None:
        change.do("HSET", change.keys.heads, closure.number, head)


def _count(change: RunTransaction, counts: Mapping[str, int]) -> None:
    _add(change, counts)
    change.finish_if_done()


def _add(change: RunTransaction, counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        change.run.count(name, count)
