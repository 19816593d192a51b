"""Groups: their members while they are open, and all that a trainer or an export gets once they are closed.

Decoding happens in threads. A group that retention has deleted is as unknown as one that never closed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from api_schemas.rollouts import RolloutState
from api_schemas.views.summaries import SummaryOrder
from rollout_service.groups.shares import Owner
from rollout_service.store import rules
from rollout_service.store.base import BaseRuns, unknown_group
from rollout_service.store.codec import groups as group_codec
from rollout_service.store.codec import rollouts as rollout_codec
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.codec.groups import StoredGroup, StoredGroups
from rollout_service.store.codec.record import Row
from rollout_service.store.codec.runs import SIZE
from rollout_service.store.lists_contract import LOOKED_AT, GroupSelection
from rollout_service.store.redis.replies import RolloutRow, decode_fields
from rollout_service.store.redis.runs.database import RunDatabase
from rollout_service.store.redis.runs.records import (
    ClosedRecord,
    Command,
    GroupStatus,
    OpenRecord,
    fields_read,
    size_read,
)
from rollout_service.store.redis.runs.transaction import by_number, chunks, open_records
from rollout_service.store.runs_contract import ClosedSample, GroupClosure, GroupHead, OpenGroup

if TYPE_CHECKING:
    from rollout_service.store.redis.rollouts import RedisRollouts


# A page goes through the states of groups by their numbers, which have no gaps.

STATES_AT_ONCE = 2_000
RECORDS_AT_ONCE = 10_000
"""The most records of a history in one read: 0.8 MB."""
GROUPS_AT_ONCE = 512
"""The most records of groups in one read of a listing; each has about 0.3 KB."""
MEMBERS_AT_ONCE = 1_000
"""The most rollouts that one read looks at, which takes Redis about a millisecond."""
MAX_HEAD_BYTES = 65_536
"""A larger head is not kept in memory of Redis, but made again when its group is delivered."""
_ROW = ("state", "reward", "code", "tokens", "environment")
_MEMBER = ("state", "reward", "changed_at", "oldest_version", "newest_version", "is_erased")


class GroupReader(BaseRuns):
    def __init__(self, database: RunDatabase, rollouts: RedisRollouts) -> None:
        self._database = database
        self._rollouts = rollouts

    async def _groups(
        self, run_id: str, which: GroupSelection, order: SummaryOrder, after: int | None, limit: int
    ) -> StoredGroups:
        run, _, _ = await self._database.look(run_id)
        count = run.record.cursor
        if order == "newest":
            numbers = range(min(count, count if after is None else after) - 1, -1, -1)
        else:
            numbers = range(0 if after is None else after + 1, count)
        found, last = await self._matching(run_id, which, numbers, limit)
        rows = await self._stored(run_id, found)
        members = await self._rows([name for group in rows for name in group.members])
        return StoredGroups(rows, members, last)

    async def _matching(
        self, run_id: str, which: GroupSelection, numbers: Sequence[int], limit: int
    ) -> tuple[dict[int, GroupStatus], int | None]:
        """Return up to `limit` groups that match, and the number after which to go on, None if none is left."""
        keys, found, last = self._database.keys(run_id), dict[int, GroupStatus](), None
        for some in chunks(numbers[:LOOKED_AT], STATES_AT_ONCE):
            _, (states,) = await self._database.read([("HMGET", keys.states, *some)])
            for number, text in zip(some, states, strict=True):
                status = None if text is None else GroupStatus.parse(text.decode())
                if status is not None and _is_wanted(status, which):
                    if len(found) == limit:
                        return found, last
                    found[number] = status
                last = number
        return found, last if len(numbers) > LOOKED_AT else None

    async def _stored(self, run_id: str, found: Mapping[int, GroupStatus]) -> list[StoredGroup]:
        if not found:
            return []
        keys, numbers = self._database.keys(run_id), list(found)
        records: list[Command] = [
            ("GETRANGE", keys.history, number * SIZE, number * SIZE + SIZE - 1) for number in numbers
        ]
        _, (started, closed, *history) = await self._database.read(
            [("HMGET", keys.open, *numbers), ("HMGET", keys.closed, *numbers), *records]
        )
        parts = zip(found.items(), started, closed, history, strict=True)
        return [_stored_group(number, status, *stored) for (number, status), *stored in parts]

    async def _rows(self, rollout_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        root, found = self._database.root, dict[str, dict[str, Any]]()
        for some in chunks(rollout_ids, MEMBERS_AT_ONCE):
            _, replies = await self._database.read([fields_read(root, name, _ROW) for name in some])
            rows = ((name, decode_fields(_ROW, reply)) for name, reply in zip(some, replies, strict=True))
            found |= {name: row for name, row in rows if row["state"] is not None}
        return found

    async def _history(self, run_id: str) -> tuple[Sequence[bytes], Mapping[str, int]]:
        run, _, _ = await self._database.look(run_id)
        key, parts = self._database.keys(run_id).history, []
        for first in range(0, run.record.cursor, RECORDS_AT_ONCE):
            last = (first + RECORDS_AT_ONCE) * SIZE - 1
            _, (data,) = await self._database.read([("GETRANGE", key, first * SIZE, last)])
            parts.append(data)
        return parts, run.record.counters

    async def open_groups(self, run_id: str) -> Sequence[OpenGroup]:
        keys = self._database.keys(run_id)
        _, _, (reply,) = await self._database.look(run_id, [("HGETALL", keys.open)])
        return await self._with_members(open_records(reply))

    async def _with_members(self, groups: Mapping[int, OpenRecord | ClosedRecord]) -> Sequence[OpenGroup]:
        root, found = self._database.root, dict[str, tuple[RolloutRow, float]]()
        for some in chunks([one for group in groups.values() for one in group.members], MEMBERS_AT_ONCE):
            now, replies = await self._database.read([fields_read(root, one, _MEMBER) for one in some])
            rows = (decode_fields(_MEMBER, reply) for reply in replies)
            found |= {one: (row | {"rollout_id": one}, now) for one, row in zip(some, rows, strict=True)}
        made = []
        for number, group in groups.items():
            decoded = [
                run_codec.decode_member(*found[rollout_id], sample=sample, is_straggler=sample in group.cut)
                for sample, rollout_id in enumerate(group.members)
            ]
            members = [member for member in decoded if member is not None]
            pairs = zip(group.members, decoded, strict=True)
            lost = [rollout_id for rollout_id, member in pairs if member is None]
            if isinstance(group, OpenRecord):
                made.append(OpenGroup(number, members, group.reason, lost))
            else:
                weights = run_codec.decode_weights(group.summary)
                made.append(OpenGroup(number, members, None, lost, weights))
        return made

    async def _closing(self, run_id: str, closure: GroupClosure) -> tuple[int, bytes | None]:
        """Return the bytes of the trajectories of a group that is about to be closed, and the head to store.

        There is no head for a group that is dropped, while a rollout of it could change, or if it would be too large.
        """
        keys, ids = self._database.keys(run_id), [sample.rollout_id for sample in closure.samples]
        _, (started, closed, *replies) = await self._database.read(
            [
                ("HGET", keys.open, closure.number),
                ("HGET", keys.closed, closure.number),
                *(size_read(self._database.root, one) for one in ids),
            ]
        )
        size = sum(int(stored or 0) for _, stored in replies)
        is_final = all(state is not None and RolloutState(state.decode()).terminal for state, _ in replies)
        epoch = _epoch(started, closed)
        if closure.reason is not None or not is_final or epoch is None:
            return size, None
        row = {
            "run_id": run_id,
            "number": closure.number,
            "epoch": epoch,
            "samples": run_codec.encode_samples(closure.samples),
            "summary": run_codec.encode_summary(closure),
        }
        rows = await self._rollouts.whole_rows(ids)
        return size, await anyio.to_thread.run_sync(_pack_head, row, rows)

    async def _group(self, run_id: str, number: int) -> tuple[Row, Sequence[Row]]:
        row = await self._closed(run_id, number)
        ids = [sample.rollout_id for sample in run_codec.decode_samples(row["samples"])]
        return row, await self._whole_rows(ids)

    async def _whole_rows(self, rollout_ids: Sequence[str]) -> Sequence[Row]:
        return await self._rollouts.whole_rows(rollout_ids)

    async def _trajectories(self, run_id: str, number: int) -> Sequence[bytes]:
        row = await self._closed(run_id, number)
        kept = rules.delivered_rollouts(run_codec.decode_samples(row["samples"]))
        rows = await self._rollouts.whole_rows(kept)
        found = {row["rollout_id"]: row["trajectory"] for row in rows}
        return [found[one] for one in kept if found.get(one) is not None]

    async def _heads(self, run_id: str, numbers: Sequence[int]) -> Sequence[GroupHead | None]:
        keys = self._database.keys(run_id)
        _, (closed, heads) = await self._database.read(
            [("HMGET", keys.closed, *numbers), ("HMGET", keys.heads, *numbers)]
        )
        for number, record in zip(numbers, closed, strict=True):
            if record is None:
                raise unknown_group(run_id, number)
        return await anyio.to_thread.run_sync(_unpack_heads, run_id, numbers, closed, heads)

    async def _closed(self, run_id: str, number: int) -> Mapping[str, Any]:
        keys = self._database.keys(run_id)
        _, (data, status) = await self._database.read([("HGET", keys.closed, number), ("HGET", keys.states, number)])
        if data is None or status is None:
            raise unknown_group(run_id, number)
        state = GroupStatus.parse(status.decode())
        return ClosedRecord.decode(data).row(run_id, number) | {
            "state": state.state,
            "reason": state.reason,
            "batch_number": state.batch,
        }

    async def closed_groups(self, run_id: str) -> Sequence[int]:
        keys = self._database.keys(run_id)
        _, _, (numbers,) = await self._database.look(run_id, [("HKEYS", keys.closed)])
        return sorted(int(number) for number in numbers)

    async def group_states(self, run_id: str) -> Mapping[int, str]:
        keys = self._database.keys(run_id)
        _, _, (reply,) = await self._database.look(run_id, [("HGETALL", keys.states)])
        return {number: GroupStatus.parse(text.decode()).counter for number, text in by_number(reply).items()}

    async def _samples(self, run_id: str, numbers: Sequence[int]) -> AsyncIterator[tuple[int, list[ClosedSample]]]:
        """Yield the samples of those of these groups that are closed and not deleted."""
        for some in chunks(numbers, GROUPS_AT_ONCE):
            _, (records,) = await self._database.read([("HMGET", self._database.keys(run_id).closed, *some)])
            for pair in await anyio.to_thread.run_sync(_decode_samples, some, records):
                yield pair

    async def rollout_ids(self, run_id: str) -> Sequence[str]:
        groups = self._samples(run_id, await self.closed_groups(run_id))
        return [sample.rollout_id async for _, samples in groups for sample in samples]

    async def _owners(self, run_id: str, numbers: Sequence[int]) -> Mapping[int, Sequence[Owner]]:
        return {
            number: [sample.owner for sample in samples if sample.owner is not None]
            async for number, samples in self._samples(run_id, numbers)
        }

    async def _rollouts_of(self, run_id: str, user: str) -> Sequence[str]:
        """Return the first rollout of each sample."""
        groups = self._samples(run_id, await self.closed_groups(run_id))
        found = {
            sample.rollout_id
            async for _, samples in groups
            for sample in samples
            if sample.owner is not None and sample.owner.user == user
        }
        members = [member.rollout_id for group in await self.open_groups(run_id) for member in group.members]
        for row in await self._rollouts.rows(members):
            session = rollout_codec.decode_rollout(row, rollout_codec.Shown.WORK).session
            found |= {row["rollout_id"]} if session is not None and session.user == user else set()
        return rules.first_rollouts(found)


def _is_wanted(status: GroupStatus, which: GroupSelection) -> bool:
    return which.state in (None, status.state) and which.reason in (None, status.reason)


def _stored_group(
    number: int, status: GroupStatus, started: bytes | None, closed: bytes | None, record: bytes
) -> StoredGroup:
    opened = None if started is None else OpenRecord.decode(started)
    ended = None if closed is None else ClosedRecord.decode(closed)
    group = opened or ended
    return StoredGroup(
        number=number,
        state=status.state,
        reason=status.reason,
        batch=status.batch,
        members=[] if group is None else group.members,
        summary=None if ended is None else ended.summary,
        record=record,
    )


def _epoch(started: bytes | None, closed: bytes | None) -> int | None:
    if started is not None:
        return OpenRecord.decode(started).epoch
    return None if closed is None else ClosedRecord.decode(closed).epoch


def _decode_samples(numbers: Sequence[int], records: Sequence[bytes | None]) -> list[tuple[int, list[ClosedSample]]]:
    pairs = zip(numbers, records, strict=True)
    return [
        (number, run_codec.decode_samples(ClosedRecord.decode(data).samples))
        for number, data in pairs
        if data is not None
    ]


def _pack_head(row: Row, members: Sequence[Row]) -> bytes | None:
    """Return the head of a group as bytes; None if it cannot be made or is too large to keep."""
    head = group_codec.encode_head(row, members)
    if head is None:
        return None
    packed = b"\n".join([head["form"].hex().encode(), head["tokens"].encode(), head["json"]])
    return packed if len(packed) <= MAX_HEAD_BYTES else None


def _unpack_heads(
    run_id: str, numbers: Sequence[int], closed: Sequence[bytes], heads: Sequence[bytes | None]
) -> list[GroupHead | None]:
    return [
        None if packed is None else _unpack_head(ClosedRecord.decode(data).row(run_id, number), packed)
        for number, data, packed in zip(numbers, closed, heads, strict=True)
    ]


def _unpack_head(row: dict[str, Any], packed: bytes) -> GroupHead | None:
    form, tokens, text = packed.split(b"\n", 2)
    stored = {"form": bytes.fromhex(form.decode()), "tokens": tokens.decode(), "json": text}
    return group_codec.decode(row | stored)
