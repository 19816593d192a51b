"""The part of a store that is the same for every database: encoding, decoding and pages of records.

Decoding and encoding that takes long happens in threads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import anyio.to_thread
from prometheus_client import Histogram

from api_schemas.errors import FieldError
from api_schemas.exports import ExportedSample, RecordedRollout
from api_schemas.rollouts import RolloutPage, RolloutState
from api_schemas.runs import Group
from api_schemas.runs.history import GroupPage, RunHistory
from api_schemas.trajectories import Trajectory
from api_schemas.views.summaries import RolloutSummary, SummaryFilter, SummaryOrder, SummaryPage
from rollout_service.base.errors import InvalidFieldError, NotFoundError, StoreError
from rollout_service.base.ids import BatchId
from rollout_service.store import rules
from rollout_service.store.codec import groups as group_codec
from rollout_service.store.codec import rollouts as codec
from rollout_service.store.codec import summaries as summary_codec
from rollout_service.store.codec import trajectories as trajectory_codec
from rollout_service.store.codec.groups import StoredGroups
from rollout_service.store.codec.record import Row
from rollout_service.store.codec.runs import make_history
from rollout_service.store.codec.trajectories import Columns
from rollout_service.store.contract import StoreShard
from rollout_service.store.jobs import JobThread
from rollout_service.store.lists_contract import GroupSelection
from rollout_service.store.runs_contract import GroupHead, ShardRuns

HEADS_AT_ONCE = 16
"""Heads take megabytes with long conversations."""
_INLINE_BYTES = 16_384
"""The most compressed bytes of a trajectory that are decoded on the event loop."""


class BaseStore(StoreShard):
    def __init__(self, database: JobThread[Any]) -> None:
        self._database = database

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def shards(self) -> Sequence[StoreShard]:
        return (self,)

    def shard_of(self, name: str) -> int:  # noqa: ARG002 - it has everything
        return 0

    @property
    def failing(self) -> Mapping[int, StoreError]:
        return {}

    @property
    def problem(self) -> StoreError | None:
        return self._database.problem

    @property
    def errors(self) -> int:
        return self._database.errors

    @property
    def commit_seconds(self) -> Histogram:
        return self._database.commit_seconds

    def size_bytes(self) -> int:
        return self._database.size_bytes()

    async def failed(self) -> None:
        await self._database.failed()

    async def close(self) -> None:
        await self._database.close()

    async def trajectory(self, rollout_id: str) -> Trajectory | None:
        data = await self._tokens(rollout_id)
        if data is None:
            return None
        with codec.reading(rollout_id):
            if len(data) <= _INLINE_BYTES:
                return trajectory_codec.decode(data)
            return await anyio.to_thread.run_sync(trajectory_codec.decode, data)

    async def summaries(
        self,
        which: SummaryFilter,
        *,
        order: SummaryOrder = "newest",
        cursor: str | None = None,
        limit: int = 100,
    ) -> SummaryPage:
        after = summary_codec.decode_cursor(order, cursor)
        rows, after = await self._summaries(which, order, after, limit)
        counts = await self.counts() if which.only_states else None
        return SummaryPage(
            rows=rows,
            next_cursor=summary_codec.encode_cursor(order, after),
            matching=None if counts is None else summary_codec.count_states(counts, which.states),
        )

    @abstractmethod
    async def _tokens(self, rollout_id: str) -> bytes | None: ...

    @abstractmethod
    async def _summaries(
        self, which: SummaryFilter, order: SummaryOrder, after: int | None, limit: int
    ) -> tuple[Sequence[RolloutSummary], int | None]:
        """Return rollouts after a number, and the number after which to go on, None if nothing is left."""

    @abstractmethod
    async def _page(
        self, state: RolloutState | None, after: int, limit: int
    ) -> tuple[Sequence[Row], dict[RolloutState, int]]:
        """Return the rows of up to `limit` rollouts with numbers above `after`, only those in `state` if that is set.

        The counts of all states come with them.
        """

    async def list(
        self, *, state: RolloutState | None = None, cursor: str | None = None, limit: int = 100
    ) -> RolloutPage:
        if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
            raise wrong_cursor(cursor)
        rows, counts = await self._page(state, int(cursor or 0), limit + 1)
        return await anyio.to_thread.run_sync(codec.make_page, rows, limit, counts)


class BaseRuns(ShardRuns):
    async def group_page(
        self,
        run_id: str,
        which: GroupSelection,
        *,
        order: SummaryOrder = "newest",
        cursor: str | None = None,
        limit: int = 50,
    ) -> GroupPage:
        after = summary_codec.decode_cursor(order, cursor)
        found = await self._groups(run_id, which, order, after, limit)
        rows = [group_codec.make_row(group, found.rollouts) for group in found.groups]
        return GroupPage(groups=rows, next_cursor=summary_codec.encode_cursor(order, found.next))

    async def history(self, run_id: str, *, points: int) -> RunHistory:
        parts, counters = await self._history(run_id)
        reasons = rules.dropped_counts(counters)
        return await anyio.to_thread.run_sync(lambda: make_history(run_id, b"".join(parts), reasons, points))

    async def group(self, run_id: str, number: int) -> Group:
        stored = await self._group(run_id, number)
        return await anyio.to_thread.run_sync(group_codec.decode_group, *stored)

    async def exported_samples(self, run_id: str, number: int) -> Sequence[ExportedSample]:
        stored = await self._group(run_id, number)
        return await anyio.to_thread.run_sync(group_codec.decode_exported, *stored)

    async def group_heads(self, run_id: str, numbers: Sequence[int]) -> Sequence[GroupHead]:
        heads: list[GroupHead] = []
        for first in range(0, len(numbers), HEADS_AT_ONCE):
            some = numbers[first : first + HEADS_AT_ONCE]
            for number, head in zip(some, await self._heads(run_id, some), strict=True):
                heads.append(await self._missing_head(run_id, number) if head is None else head)
        return heads

    async def _missing_head(self, run_id: str, number: int) -> GroupHead:
        stored = await self._group(run_id, number)
        return await anyio.to_thread.run_sync(group_codec.make_head, *stored)

    async def columns(self, run_id: str, number: int) -> Sequence[Columns]:
        packed = await self._trajectories(run_id, number)
        return await anyio.to_thread.run_sync(group_codec.locate_columns, packed)

    async def recorded_rollouts(self, rollout_ids: Sequence[str]) -> Sequence[RecordedRollout]:
        rows = await self._whole_rows(rollout_ids)
        found = await anyio.to_thread.run_sync(group_codec.decode_recorded, rows)
        return [found[one] for one in rollout_ids if one in found]

    @abstractmethod
    async def _groups(
        self, run_id: str, which: GroupSelection, order: SummaryOrder, after: int | None, limit: int
    ) -> StoredGroups: ...

    @abstractmethod
    async def _history(self, run_id: str) -> tuple[Sequence[bytes], Mapping[str, int]]:
        """Return the records of all groups, in parts that follow each other, and the run's counters."""

    @abstractmethod
    async def _group(self, run_id: str, number: int) -> tuple[Row, Sequence[Row]]:
        """Return the rows of a closed group and its rollouts, as `codec.groups` reads them."""

    @abstractmethod
    async def _trajectories(self, run_id: str, number: int) -> Sequence[bytes]:
        """Return the encoded trajectories of a closed group in the order of its samples, without stale ones."""

    @abstractmethod
    async def _heads(self, run_id: str, numbers: Sequence[int]) -> Sequence[GroupHead | None]:
        """Return the stored heads of closed groups, in this order; None for one that has to be made again."""

    @abstractmethod
    async def _whole_rows(self, rollout_ids: Sequence[str]) -> Sequence[Row]:
        """Return the rows of the rollouts that exist, with their encoded trajectories."""


def wrong_cursor(cursor: str) -> InvalidFieldError:
    problem = FieldError(path="query.cursor", message=f"{cursor!r} is not a cursor")
    return InvalidFieldError([problem], hint="Pass `next_cursor` of the previous page, or omit the cursor.")


def unknown_run(run_id: str) -> NotFoundError:
    return NotFoundError(f"there is no run {run_id}", hint="GET /v1/runs lists all runs.")


def unknown_group(run_id: str, number: int) -> NotFoundError:
    return NotFoundError(f"the run {run_id} has no closed group {number}")


def unknown_batch(run_id: str, number: int) -> NotFoundError:
    return NotFoundError(
        f"there is no batch {BatchId(run_id, number)}",
        hint="The answer to a lease contains the batch's id.",
    )
