"""What every store does alike, whatever its database: it encodes, decodes and pages what the database keeps.

A store inherits these classes and reads or writes records. Decoding and encoding that takes long happens in threads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import anyio.to_thread
from prometheus_client import Histogram

from api_schemas.errors import FieldError
from api_schemas.rollouts import RolloutPage, RolloutState
from api_schemas.trajectories import Trajectory
from api_schemas.views.summaries import RolloutSummary, SummaryFilter, SummaryOrder, SummaryPage
from rollout_service.base.errors import InvalidFieldError, StoreError
from rollout_service.store.codec import rollouts as codec
from rollout_service.store.codec import summaries as summary_codec
from rollout_service.store.codec import trajectories as trajectory_codec
from rollout_service.store.contract import Store

_INLINE_BYTES = 16_384
"""A trajectory of up to this many compressed bytes is decoded on the event loop, a larger one in a thread."""


class StoreDatabase(Protocol):
    """The database of a store, which `Store` describes."""

    @property
    def problem(self) -> StoreError | None: ...

    @property
    def errors(self) -> int: ...

    @property
    def commit_seconds(self) -> Histogram: ...

    def size_bytes(self) -> int: ...

    async def failed(self) -> None: ...

    async def close(self) -> None: ...


class BaseStore(Store):
    """A store of rollouts, to be entered once it is open."""

    def __init__(self, database: StoreDatabase) -> None:
        self._database = database

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

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
        """Wait until the store fails for good, which only a defect can cause.

        Raises:
            StoreError: The store has failed.
        """
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
    async def _tokens(self, rollout_id: str) -> bytes | None:
        """Return the record of a rollout's tokens, if there is one."""

    @abstractmethod
    async def _summaries(
        self, which: SummaryFilter, order: SummaryOrder, after: int | None, limit: int
    ) -> tuple[Sequence[RolloutSummary], int | None]:
        """Return rollouts after a number, and the number after which to go on, None if nothing is left."""

    @abstractmethod
    async def _page(self, state: RolloutState | None, after: int, limit: int) -> RolloutPage:
        """Return up to `limit` rollouts with numbers above `after`, only those in `state` if that is set."""

    async def list(
        self, *, state: RolloutState | None = None, cursor: str | None = None, limit: int = 100
    ) -> RolloutPage:
        if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
            problem = FieldError(path="query.cursor", message=f"{cursor!r} is not a cursor")
            raise InvalidFieldError(
                [problem], hint="Pass `next_cursor` of the previous page, or omit the cursor."
            )
        return await self._page(state, int(cursor or 0), limit)
