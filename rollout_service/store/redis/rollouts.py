"""Rollouts, results, events and the queue in a Redis that services share.

Beyond the contract: leases run by Redis's clock; a change that any service makes wakes those who wait in all of them; a
claim or a result whose answer was lost is recognized when it is repeated, and takes effect once; the newest 100,000
events and tombstones are kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any
from uuid import uuid4

import anyio
import anyio.to_thread
from pydantic import JsonValue
from pydantic_core import to_json

from api_schemas.errors import ErrorInfo
from api_schemas.events import Event
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Span
from api_schemas.rollouts.trees import RolloutNodes
from api_schemas.views.summaries import RolloutSummary, SummaryFilter, SummaryOrder
from rollout_service.base.errors import RecordLostError, StoreError, describe
from rollout_service.store.base import BaseStore
from rollout_service.store.codec import rollouts as codec
from rollout_service.store.codec import summaries as summary_codec
from rollout_service.store.codec.record import fingerprint, id_taken
from rollout_service.store.contract import MAX_RECORDS, EncodedSteps, Lease, UnsavedTurn
from rollout_service.store.redis.connection import Argument, RedisConnection
from rollout_service.store.redis.lists import find_summaries
from rollout_service.store.redis.replies import RolloutRow, decode_counts, decode_row
from rollout_service.store.redis.runs.retention import DELETED_AT_ONCE
from rollout_service.store.redis.runs.transaction import chunks
from rollout_service.store.redis.signals import RolloutSignals
from rollout_service.store.redis.trajectories import InRedis, TrajectoryPlace

ROWS_AT_ONCE = 256
_INLINE_RESULT = 4_096
"""The longest result that is decoded on the event loop; one with a thousand sub-agents takes 0.1 s."""
_REFUSED = 2
"""The file of a result's trajectory was sealed, since this service was taken for dead."""
_STAGES = (RolloutState.INIT, RolloutState.ROLLOUT, RolloutState.EVALUATE)


class RedisRollouts(BaseStore):
    def __init__(
        self,
        connection: RedisConnection,
        *,
        is_gone: Callable[[str], bool],
        place: TrajectoryPlace | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Without a `place`, Redis itself keeps the trajectories; `clock` is that of the connection, if it has one."""
        super().__init__(connection)
        self._connection = connection
        self._place = place or InRedis()
        self._is_gone = is_gone
        self._signals = RolloutSignals(clock or time.monotonic)
        self._session, self._claims = uuid4().hex, 0
        self._lost_since: dict[str, int] = {}
        """Keyed by owner: the first claim whose answer was lost since the last one that arrived."""
        self._lost_results: set[tuple[str, int]] = set()
        """Leases whose results may have been written, since the answer was lost."""
        self._owners: set[str] = set()
        """Owners whose topics are followed."""
        connection.topics.listen("cluster", self._signals.cluster_changed)

    async def submit(self, request: RolloutRequest) -> tuple[Rollout, bool]:
        if request.rollout_id is None:
            raise ValueError("set the request's rollout_id before submitting it")
        values = (request.rollout_id, fingerprint(request), request.pool, request.model_dump_json())
        outcome, *rest = await self._connection.call("rollouts_submit", *values)
        if outcome == b"conflict":
            raise id_taken("rollout", request.rollout_id)
        return codec.decode_rollout(decode_row(rest[0])), outcome == b"new"

    async def claim(
        self,
        owner: str,
        *,
        limit: int,
        lease_seconds: float,
        pools: Collection[str] | None = None,
        waits: Mapping[str, float] | None = None,
    ) -> list[Lease]:
        if (problem := self._place.problem) is not None:  # begin nothing whose result would have to wait
            raise StoreError(str(problem), hint=problem.hint)
        await self._follow(owner)
        self._claims += 1
        of_pools = b"" if pools is None else to_json(sorted(pools))
        of_environments = b"" if waits is None else to_json(dict(sorted(waits.items())))
        number, since = self._claims, self._lost_since.get(owner, 0)
        try:
            due, wake, rows = await self._connection.call(
                "rollouts_claim",
                owner,
                limit,
                lease_seconds,
                of_pools,
                of_environments,
                self._session,
                number,
                since,
            )
            leases = [lease for lease in [await self._lease(row, owner) for row in rows] if lease is not None]
        except StoreError:
            self._lost_since.setdefault(owner, number)
            self._signals.work.forget()
            raise
        if since:
            self._lost_since.pop(owner, None)
        self._signals.work.looked(wake)
        self._signals.claimed(due_in=float(due) if due else math.inf, lease_seconds=lease_seconds)
        if len(rows) >= limit or len(leases) < len(rows):
            self._signals.work.forget()  # there may be more
        return leases

    async def renew(self, owner: str, rollout_ids: Sequence[str], *, lease_seconds: float) -> list[str]:
        lost: list[str] = []
        for some in chunks(rollout_ids, ROWS_AT_ONCE):
            answer = await self._connection.call("rollouts_renew", owner, lease_seconds, *some)
            lost += [rollout_id.decode() for rollout_id in answer]
        return sorted(lost)

    async def recover(self, owner: str) -> int:
        owners = await self._connection.command("HKEYS", self._connection.key("holders"))
        others = [each for each in (name.decode() for name in owners) if each != owner]
        return sum([await self._take_back(other, None, counted=True) for other in others if self._is_gone(other)])

    async def release(self, owner: str, rollout_ids: Sequence[str] | None = None) -> int:
        return await self._take_back(owner, rollout_ids, counted=False)

    async def advance(self, lease: Lease, owner: str, state: RolloutState) -> bool:
        if state not in _STAGES:
            raise ValueError(f"a leased rollout cannot advance to {state}")
        outcome = await self._connection.call("rollouts_advance", *_held(lease, owner), state.value)
        if outcome not in (b"done", b"lost"):
            raise ValueError(f"{lease.rollout_id} cannot go back from {outcome.decode()} to {state}")
        return bool(outcome == b"done")

    async def retry(
        self,
        lease: Lease,
        owner: str,
        error: ErrorInfo,
        *,
        spans: Sequence[Span] = (),
        delay_seconds: float = 0.0,
        keep_turns: bool = False,
    ) -> bool:
        values = (
            error.model_dump_json(),
            error.code,
            codec.encode_spans(spans),
            delay_seconds,
            int(keep_turns),
        )
        return bool(await self._connection.call("rollouts_retry", *_held(lease, owner), *values))

    async def restart(self, lease: Lease, owner: str, *, spans: Sequence[Span] = (), kept_turns: int = 0) -> bool:
        values = (*_held(lease, owner), codec.encode_spans(spans), kept_turns)
        return bool(await self._connection.call("rollouts_restart", *values))

    async def save_turns(self, owner: str, turns: Sequence[UnsavedTurn]) -> int:
        rows = [(turn.rollout_id, turn.token, turn.number, turn.data) for turn in turns]
        return await self._save("rollouts_save_turns", owner, rows)

    async def save_steps(self, attempts: Sequence[EncodedSteps]) -> int:
        # A record of one or two kilobytes would keep a whole file of trajectories alive after these were pruned.
        rows = [(attempt.rollout_id, attempt.data) for attempt in attempts]
        return await self._save("rollouts_save_steps", MAX_RECORDS, rows)

    async def _save(self, function: str, first: Argument, rows: Sequence[Sequence[Argument]]) -> int:
        saved = 0
        for some in chunks(rows, ROWS_AT_ONCE):
            saved += await self._connection.call(function, first, *chain.from_iterable(some))
        return saved

    async def finish(self, lease: Lease, owner: str, result: Rollout) -> bool:
        written, encoded = await codec.encode_finished(lease, result)
        versions = codec.version_range(result.trajectory)
        outcome = (
            "" if result.reward is None else repr(float(result.reward)),
            result.stop_reason.value if result.stop_reason else "",
            result.error.code if result.error else "",
            *("" if version is None else version for version in versions.values()),
            *(repr(figure) for figure in summary_codec.figures(result).values()),
        )
        if encoded is None:
            return bool(await self._finish(lease, owner, result.state, written, b"", outcome))
        while True:
            async with self._place.keep(encoded) as stored:
                done = await self._finish(lease, owner, result.state, written, stored, outcome)
                if done is not None:
                    return done
                await self._place.abandon(stored)

    async def cancel(self, rollout_id: str) -> RolloutState | None:
        state = await self._connection.call("rollouts_cancel", rollout_id)
        return RolloutState(state.decode()) if state else None

    async def cancel_requested(self, owner: str) -> list[str]:
        newest, ids = await self._connection.read("rollouts_cancelling", owner)
        self._signals.cancels.looked(newest)
        return sorted(rollout_id.decode() for rollout_id in ids)

    async def record(self, kind: str, subject: str, data: dict[str, JsonValue]) -> Event:
        event_id, now = await self._connection.call("events_record", kind, subject, to_json(data))
        return Event(event_id=event_id, time=codec.when(float(now)), kind=kind, subject=subject, data=data)

    @property
    def may_have_work(self) -> bool:
        return self._signals.may_be_work

    async def wait_for_work(self) -> None:
        await self._signals.wait_for_work()

    async def wait_for_cancels(self) -> None:
        await self._signals.cancels.wait()

    async def wait_for_events(self, *, after: int) -> int:
        async with self._connection.topics.watching("events") as changes:
            while True:
                seen = changes.value
                if (newest := await self.last_event()) != after:
                    return newest
                await changes.wait_above(seen)

    async def wait_for_result(self, rollout_id: str) -> Rollout | None:
        async with self._connection.topics.watching(f"rollout:{rollout_id}") as changes:
            while True:
                seen = changes.value
                rollout = await self.get(rollout_id)
                if rollout is None or rollout.state.terminal:
                    return rollout
                await changes.wait_above(seen)

    async def delete_expired(self, seconds: float) -> int:
        """Delete rollouts of no run that ended this long ago; return 0 once none is left."""
        deleted: int = await self._connection.call("rollouts_delete_expired", seconds, DELETED_AT_ONCE)
        return deleted

    async def overwrite(self, stored: Sequence[bytes]) -> None:
        """Overwrite trajectories that are about to be erased, given their records in Redis."""
        await self._place.overwrite(stored)

    async def collect_garbage(self) -> None:
        """Delete the files of trajectories that are gone. Call it from one service at a time."""
        await self._place.collect()

    async def get(self, rollout_id: str, *, whole_tree: bool = False) -> Rollout | None:
        shown = codec.Shown.ALL if whole_tree else codec.Shown.REQUESTED
        for row in await self.rows([rollout_id]):
            if len(row["result"] or "") <= _INLINE_RESULT:
                return codec.decode_rollout(row, shown)
            return await anyio.to_thread.run_sync(codec.decode_rollout, row, shown)
        return None

    async def _tokens(self, rollout_id: str) -> bytes | None:
        stored = await self._connection.command("GET", self._connection.key(f"t:{rollout_id}"))
        if stored is None:
            return None
        (data,) = await self._place.read({rollout_id: stored})
        return data

    async def tree(self, rollout_id: str, *, trajectories: bool = False) -> RolloutNodes | None:
        rows = await (self.whole_rows([rollout_id]) if trajectories else self.rows([rollout_id]))
        return await anyio.to_thread.run_sync(codec.decode_tree, rows[0]) if rows else None

    async def _summaries(
        self, which: SummaryFilter, order: SummaryOrder, after: int | None, limit: int
    ) -> tuple[Sequence[RolloutSummary], int | None]:
        return await find_summaries(self._connection, which, order=order, after=after, limit=limit)

    async def counts(self) -> dict[RolloutState, int]:
        return decode_counts(await self._connection.read("rollouts_counts"))

    async def held(self, owner: str, *, believed: Mapping[str, int] | None = None) -> Mapping[str, int]:  # noqa: ARG002 - it knows better
        found = iter(await self._connection.read("rollouts_held", owner))
        return {rollout_id.decode(): int(token) for rollout_id, token in zip(found, found, strict=True)}

    async def saved_turns(self, rollout_id: str) -> list[bytes]:
        key = self._connection.key(f"u:{rollout_id}")
        turns: list[bytes] = await self._connection.command("LRANGE", key, 0, -1)
        return turns

    async def saved_steps(self, rollout_ids: Sequence[str]) -> Mapping[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        for some in chunks(rollout_ids, ROWS_AT_ONCE):
            answer = await self._connection.read("rollouts_saved_steps", *some)
            found |= {name: records for name, records in zip(some, answer, strict=True) if records}
        return found

    async def events(self, *, after: int, limit: int = 1_000) -> list[Event]:
        key = self._connection.key("events")
        entries = await self._connection.command("XRANGE", key, f"({after}-0", "+", "COUNT", limit)
        return [codec.decode_event(event_row(entry)) for entry in entries]

    async def last_event(self) -> int:
        key = self._connection.key("events")
        found = await self._connection.command("XREVRANGE", key, "+", "-", "COUNT", 1)
        return event_row(found[0])["event_id"] if found else 0

    async def _page(
        self, state: RolloutState | None, after: int, limit: int
    ) -> tuple[Sequence[RolloutRow], dict[RolloutState, int]]:
        found, counts = await self._connection.read("rollouts_page", state or "", str(after), limit)
        return [decode_row(row) for row in found], decode_counts(counts)

    async def rows(self, rollout_ids: Sequence[str], *, trajectories: bool = False) -> Sequence[RolloutRow]:
        """Return the rows of the rollouts that exist, in this order, with Redis's records of their trajectories."""
        found: list[RolloutRow] = []
        for some in chunks(rollout_ids, ROWS_AT_ONCE):
            answer = await self._connection.read("rollouts_rows", int(trajectories), *some)
            found += [decode_row(row) for row in answer if row is not None]
        return found

    async def whole_rows(self, rollout_ids: Sequence[str]) -> Sequence[RolloutRow]:
        """Return the rows of the rollouts that exist, in this order, with their encoded trajectories.

        Raises:
            RecordLostError: A trajectory is damaged, or gone without having been pruned.
        """
        rows = await self.rows(rollout_ids, trajectories=True)
        stored = {row["rollout_id"]: row["trajectory"] for row in rows if row["trajectory"] is not None}
        found = dict(zip(stored, await self._place.read(stored), strict=True))
        return [row | {"trajectory": found.get(row["rollout_id"])} for row in rows]

    async def _follow(self, owner: str) -> None:
        """Follow the topic of an owner; call it before anything is published there."""
        if owner not in self._owners:
            self._owners.add(owner)
            self._connection.topics.listen(f"owner:{owner}", self._signals.told)
            with anyio.CancelScope(shield=True):  # as the claim that comes next
                await self._connection.topics.confirmed(f"owner:{owner}")

    async def _lease(self, reply: Sequence[Any], owner: str) -> Lease | None:
        """Return the lease of a claimed row; a rollout whose record is damaged ends as failed."""
        row = decode_row(reply)
        try:
            return codec.decode_lease(row)
        except RecordLostError as error:
            lost = describe(error)
            held = (row["rollout_id"], owner, row["token"])
            values = (RolloutState.FAILED.value, codec.encode_failure(lost), b"", "", "", lost.code, "", "")
            await self._connection.call("rollouts_finish", *held, 0, *values)
            return None

    async def _take_back(self, owner: str, ids: Sequence[str] | None, *, counted: bool) -> int:
        given = b"" if ids is None else to_json(ids)
        return int(await self._connection.call("rollouts_take_back", owner, int(not counted), given))

    async def _finish(
        self,
        lease: Lease,
        owner: str,
        state: RolloutState,
        result: str,
        trajectory: bytes,
        outcome: Sequence[str | int],
    ) -> bool | None:
        """Write a result; return whether the lease was held, or None if the file of its trajectory was sealed."""
        key = (lease.rollout_id, lease.token)
        values = (int(key in self._lost_results), state.value, result, trajectory, *outcome)
        try:
            done = await self._connection.call("rollouts_finish", *_held(lease, owner), *values)
        except StoreError:
            self._lost_results.add(key)
            raise
        self._lost_results.discard(key)
        return None if done == _REFUSED else bool(done)


def _held(lease: Lease, owner: str) -> tuple[str, str, int]:
    return lease.rollout_id, owner, lease.token


def event_row(entry: Any) -> dict[str, Any]:
    name, fields = entry
    return {
        "event_id": int(name.split(b"-")[0]),
        "time": float(fields[b"t"]),
        "kind": fields[b"k"].decode(),
        "subject": fields[b"s"].decode(),
        "data": fields[b"d"],
    }
