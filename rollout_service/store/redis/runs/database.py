"""Reading and changing a run in Redis.

All that one read returns is of one moment. A change is applied as a whole, and only if nobody has changed the run since
it was read; otherwise it is decided again from a new read, so that changes from many services follow one another. A
fenced change is refused once another service leads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import anyio

from rollout_service.base.errors import ConflictError, LeadershipLostError
from rollout_service.store.base import unknown_run
from rollout_service.store.cluster_contract import RoleLease
from rollout_service.store.redis.connection import RedisConnection
from rollout_service.store.redis.runs.records import ClosedRecord, Command, RunKeys, pack
from rollout_service.store.redis.runs.transaction import RunDraft, RunTransaction
from rollout_service.store.runs_contract import RunRecord

P = ParamSpec("P")
T = TypeVar("T")

Replies = Sequence[Any]
"""One reply for each command, as Redis sends it."""


class RunDatabase:
    """
    Raises:
        StoreError: The store fails; every method can raise it.
        NotFoundError: There is no such run; every method that takes one can raise it.
    """

    def __init__(self, connection: RedisConnection, *, fence: RoleLease | None = None) -> None:
        """`fence` is the leadership that changes need, if any."""
        self._connection = connection
        self._fence = fence
        self._drains = False
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()

    def fenced(self, fence: RoleLease) -> RunDatabase:
        return RunDatabase(self._connection, fence=fence)

    def draining(self) -> RunDatabase:
        """Return a database whose changes free memory, so that they are applied although Redis is full."""
        other = copy(self)
        other._drains = True
        return other

    @property
    def root(self) -> str:
        return self._connection.config.root

    def keys(self, run_id: str) -> RunKeys:
        return RunKeys(self.root, run_id)

    async def read(self, commands: Sequence[Command]) -> tuple[float, Replies]:
        """Return the time in Unix seconds, and the replies, all of one moment."""
        now, *replies = await self._connection.read("runs_read", pack(commands))
        return float(now), replies

    async def look(self, run_id: str, commands: Sequence[Command] = ()) -> tuple[RunDraft, float, Replies]:
        now, (fields, *replies) = await self.read([("HGETALL", self.keys(run_id).run), *commands])
        run = RunDraft.from_reply(run_id, fields)
        if run is None:
            raise unknown_run(run_id)
        return run, now, replies

    async def closed_records(self, run_id: str, numbers: Sequence[int]) -> dict[int, ClosedRecord]:
        """Return the records of those of these groups that are closed and not deleted."""
        if not numbers:
            return {}
        _, (found,) = await self.read([("HMGET", self.keys(run_id).closed, *numbers)])
        pairs = zip(numbers, found, strict=True)
        return {number: ClosedRecord.decode(data) for number, data in pairs if data is not None}

    async def create(self, run_id: str, fields: Mapping[str, Any], tasks: Sequence[str]) -> RunRecord | None:
        """Create a run with its tasks as JSON; return None, with nothing written, if there is one of this id."""
        now, _ = await self.read([])
        run = RunDraft.create(run_id, {**fields, "created_at": now, "changed_at": now})
        change = RunTransaction(self.keys(run_id), run, now)
        change.do("enlist", run_id)
        change.append_tasks(tasks)
        return run.record if await self.commit(change) else None

    async def change(
        self,
        run_id: str,
        commands: Sequence[Command],
        plan: Callable[Concatenate[RunTransaction, Replies, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Read a run and the replies to these commands, apply what `plan` makes of them, and return its result.

        Raises:
            LeadershipLostError: The change is fenced, and another service leads.
            ConflictError: A rollout to submit exists with a different request.
        """

        async def step(transaction: RunTransaction, replies: Replies) -> T:
            return plan(transaction, replies, *args, **kwargs)

        return await self.change_in_steps(run_id, commands, step)

    async def change_in_steps(
        self,
        run_id: str,
        commands: Sequence[Command],
        plan: Callable[[RunTransaction, Replies], Awaitable[T]],
    ) -> T:
        """Do as `change` does, for a plan that reads more of the run."""
        lock = self._locks.setdefault(run_id, anyio.Lock())
        async with lock:  # so that the changes of one service do not repeat each other
            while True:
                run, now, replies = await self.look(run_id, commands)
                transaction = RunTransaction(self.keys(run_id), run, now)
                result = await plan(transaction, replies)
                if await self.commit(transaction):
                    return result

    async def commit(self, transaction: RunTransaction) -> bool:
        """Apply a change; return False, with nothing written, if the run has changed since it was read."""
        if not (commands := transaction.finish()):
            return True
        run, fence = transaction.run, self._fence
        leader = (fence.role, fence.owner, fence.token) if fence else ("", "", "")
        outcome, detail = await self._connection.call(
            "runs_drain" if self._drains else "runs_commit", run.run_id, run.revision, *leader, pack(commands)
        )
        if outcome == b"led":
            raise LeadershipLostError(
                f"this service no longer leads {leader[0]!r}",
                hint="Another service goes on; nothing was changed.",
            )
        if outcome == b"taken":
            raise ConflictError(
                f"the rollout {detail.decode()} already exists with a different request",
                hint="Choose another rollout_id, or send exactly the same request again.",
            )
        return bool(outcome == b"done")
