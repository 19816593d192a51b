"""The contract of the durable store, which is also the queue.

- What `submit` returned survives any crash.
- A rollout reaches exactly one terminal state, and its result is written with that state in one transaction.
- Only the holder of the current lease can move a rollout: a worker that lost its lease can do no harm.
- No owner is leased a rollout that it already holds, however long the store could not be written to.
- An attempt counts once it enters its first stage, so a crash costs nothing that had not begun.
- Every change of state is an event, with an id that grows by one in its shard.
- A call completes even if its caller is cancelled, so no lease is taken unnoticed.
- Only the holder of the current lease can save turns, numbered 0, 1, 2, ... without a gap. They outlive the lease,
  whatever ended it, until the rollout ends, fails an attempt, or is restarted; they are deleted in the transaction that
  writes this.
- The steps of an attempt are kept however it ended, also if it was handed back or lost its lease, for the first
  `MAX_RECORDS` attempts of a rollout. They are deleted or erased with the rollout, and none is stored afterward.
- The store does not look into a turn's or an attempt's data.

A store is one shard, or spread over several that share nothing, so one that fails takes only its own runs with it:
calls for these raise a StoreError, all others go on. A run is in one shard with all of its rollouts, groups and
batches, and so is a rollout of no run. A call that collects from all shards leaves out one that fails.

A lease is lost once it is taken over, released or ended. An expired lease that nobody has taken over can still be
renewed or ended by its owner. The `wait_for_*` methods replace polling: each returns when there may be something new
since the call it names, and at once if that happened in between.

Events: kind `rollout.state`, with the rollout's id as subject and, as data, `state`, `attempt` and, if the rollout has
them, `reward`, `stop_reason` and `code` (of the error that ended the rollout or its last attempt). Kind
`rollout.cancel_requested`, with the same data, is for a leased rollout that is asked to end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from prometheus_client import Histogram
from pydantic import JsonValue

from api_schemas.errors import ErrorInfo
from api_schemas.events import Event
from api_schemas.rollouts import Rollout, RolloutPage, RolloutRequest, RolloutState, Span
from api_schemas.rollouts.trees import RolloutNodes
from api_schemas.trajectories import Trajectory
from rollout_service.base.errors import StoreError
from rollout_service.store.cluster_contract import ClusterStore
from rollout_service.store.engines_contract import EnginesStore
from rollout_service.store.lists_contract import SummaryStore
from rollout_service.store.runs_contract import RunStore, ShardRuns

if TYPE_CHECKING:
    from rollout_service.store.segments.folder import SegmentFolder


@dataclass(frozen=True, slots=True)
class Lease:
    rollout_id: str
    request: RolloutRequest
    attempt: int
    """From 1. The attempt counts once it enters a stage or fails."""
    retries: list[ErrorInfo]
    spans: list[Span]
    """Stages of earlier attempts that failed; a crash leaves none."""
    created_at: datetime
    queued_seconds: float
    """How long it waited before this claim, since it was submitted or released after an attempt; by the store's clock,
    since this host may have another time."""
    token: int
    """Grows with every claim, so that it tells this lease from earlier ones of the same owner."""
    saved_turns: int = 0
    """Turns that an interrupted attempt left, to continue from; `Store.saved_turns` returns them."""
    run_id: str | None = None
    """None if the rollout was submitted alone."""
    group: int | None = None


MAX_RECORDS = 64
"""The most attempts whose steps are kept: more than can fail, and few of those that may be handed back."""


@dataclass(frozen=True, slots=True)
class EncodedSteps:
    rollout_id: str
    data: bytes


@dataclass(frozen=True, slots=True)
class UnsavedTurn:
    rollout_id: str
    token: int
    number: int
    """The turn's number in its rollout, from 0."""
    data: bytes


class Store(SummaryStore, Protocol):
    """
    Raises:
        StoreError: The store fails; every method can raise it.
    """

    @property
    def problem(self) -> StoreError | None:
        """Why the store cannot be written to at the moment, if that is known."""

    @property
    def errors(self) -> int: ...

    def size_bytes(self) -> int: ...

    @property
    def commit_seconds(self) -> Histogram:
        """How long writes took until they were durable, each shared by the calls that waited together."""

    @property
    def rewinds(self) -> int:
        """Grows whenever the store's leases may be others than its owners know, as after a failover."""

    @property
    def shards(self) -> Sequence[StoreShard]:
        """The shards, in an order that never changes; the store itself if it is not spread."""

    def shard_of(self, name: str) -> int:
        """Return the number of the shard that has a run or a rollout, by its id."""

    @property
    def failing(self) -> Mapping[int, StoreError]:
        """Why shards cannot be used at the moment, by their numbers, while others can."""

    @property
    def runs(self) -> RunStore: ...

    @property
    def engines(self) -> EnginesStore | None:
        """The engines of all services that share the store; None if only one can have it open."""

    @property
    def cluster(self) -> ClusterStore: ...

    async def submit(self, request: RolloutRequest) -> tuple[Rollout, bool]:
        """Make a rollout durable; return it and whether it is new.

        `request.rollout_id` must be set. Submitting the same request again returns the existing rollout. A rollout that
        was cancelled before it was submitted is created as cancelled.

        Raises:
            ConflictError: The id is taken by a different request.
        """

    async def claim(
        self,
        owner: str,
        *,
        limit: int,
        lease_seconds: float,
        pools: Collection[str] | None = None,
        waits: Mapping[str, float] | None = None,
    ) -> list[Lease]:
        """Lease up to `limit` rollouts, oldest first: queued ones, and those whose lease from another owner expired.

        Shards take turns, and each gives its own oldest.

        With `pools`, only rollouts of these pools are leased, and until the next claim `wait_for_work` waits for these
        alone. `waits` does the same for environments: only rollouts of these are leased, each once it has been queued
        for this many seconds, so that a node that suits it better can take it first.
        """

    async def renew(self, owner: str, rollout_ids: Sequence[str], *, lease_seconds: float) -> list[str]:
        """Renew these leases, if this owner holds them; return the ids of those that it has lost."""

    async def recover(self, owner: str) -> int:
        """Requeue the rollouts of services that are gone; return how many that was.

        `owner` calls this before its first claim. An attempt that had begun stays counted. A store that services share
        asks `cluster.identity.is_gone` about each owner; in one that only one process can have open, every other owner
        is gone.
        """

    async def release(self, owner: str, rollout_ids: Sequence[str] | None = None) -> int:
        """Requeue this owner's rollouts, or only these; return how many that was.

        Attempts that had begun are not counted, since an orderly shutdown is not a failure.
        """

    async def held(self, owner: str, *, believed: Mapping[str, int] | None = None) -> Mapping[str, int]:
        """Return the tokens of the owner's leases, by rollout.

        For a shard that fails, those that the owner believes to hold stand in, since nobody knows better.
        """

    async def advance(self, lease: Lease, owner: str, state: RolloutState) -> bool:
        """Record the stage of a leased rollout; return False if the lease is lost.

        Raises:
            ValueError: The state is terminal, or precedes one that this attempt has already reached.
        """

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
        """Requeue a leased rollout after a failed attempt and a delay; return False if the lease is lost.

        `spans` are those of all attempts so far; the next lease carries them. The attempt counts even if it failed
        before its first stage. Its saved turns are deleted unless `keep_turns`. If cancellation was requested, the
        rollout is cancelled instead.
        """

    async def restart(self, lease: Lease, owner: str, *, spans: Sequence[Span] = (), kept_turns: int = 0) -> bool:
        """Requeue a leased rollout with the first `kept_turns` of its saved turns; return False if the lease is lost.

        The next attempt goes on after these and has the same number, since this one is not counted. `spans`, and a
        requested cancellation, are as in `retry`.
        """

    async def finish(self, lease: Lease, owner: str, result: Rollout) -> bool:
        """Write the terminal state and the result; return False, and write nothing, if the lease is lost.

        The request's fields, the attempt, the retries and the times come from the store, not from the result. The
        trajectories of sub-agents are kept with the result's own, and not without it.

        Raises:
            ValueError: The result's state is not terminal, or its id is not the lease's.
            FrozenTokensError: A frozen sub-agent has tokens to train on.
        """

    async def save_turns(self, owner: str, turns: Sequence[UnsavedTurn]) -> int:
        """Make turns of any rollouts durable; return how many were saved.

        The others have lost their lease, have a gap before them, or are saved already.
        """

    async def saved_turns(self, rollout_id: str) -> list[bytes]:
        """Return the data of a rollout's saved turns, in order."""

    async def save_steps(self, attempts: Sequence[EncodedSteps]) -> int:
        """Store the steps of attempts, after those of earlier ones; return how many were stored.

        The others are of rollouts that were deleted or erased, or that have enough.
        """

    async def saved_steps(self, rollout_ids: Sequence[str]) -> Mapping[str, list[bytes]]:
        """Return the stored steps, the earliest first; rollouts without any are left out."""

    async def cancel(self, rollout_id: str) -> RolloutState | None:
        """Request the cancellation of a rollout; return the state it was in, or None if the id is unknown.

        A queued rollout that nobody has leased is cancelled at once. A leased one is marked, and its worker ends it
        through `finish`. A terminal one stays as it is. An unknown id leaves a tombstone: if it is submitted later, it
        is created as cancelled.
        """

    async def cancel_requested(self, owner: str) -> list[str]:
        """Return the ids of this owner's leases whose cancellation was requested."""

    async def get(self, rollout_id: str, *, whole_tree: bool = False) -> Rollout | None:
        """Return a rollout without trajectories.

        It has its sub-agents and its work only if its request asks for them, or with `whole_tree`.
        """

    async def trajectory(self, rollout_id: str) -> Trajectory | None: ...

    async def tree(self, rollout_id: str, *, trajectories: bool = False) -> RolloutNodes | None:
        """Return the sub-agents of a finished rollout, whatever its request asks for, or None.

        With `trajectories`, they have those that are still stored.
        """

    async def counts(self) -> dict[RolloutState, int]:
        """Count rollouts by state, without states that have none."""

    async def record(self, kind: str, subject: str, data: dict[str, JsonValue]) -> Event:
        """Append an event about the service itself."""

    async def wait_for_work(self) -> None:
        """Wait until `claim` may return something, including after a delay or an expired lease."""

    async def wait_for_cancels(self) -> None:
        """Wait until the cancellation of a leased rollout has been requested since the last `cancel_requested`."""

    async def wait_for_result(self, rollout_id: str) -> Rollout | None:
        """Wait until a rollout is terminal, then return it without its trajectory; None at once if it is unknown."""

    async def close(self) -> None:
        """Flush and close; idempotent."""

    async def list(
        self, *, state: RolloutState | None = None, cursor: str | None = None, limit: int = 100
    ) -> RolloutPage:
        """Return a page of rollouts, oldest first, without trajectories and sub-agents.

        Raises:
            InvalidFieldError: The cursor is not one that an earlier page returned.
        """


class StoreShard(Store, Protocol):
    """A whole store, or one of its shards: it has events, and runs whose changes can be fenced."""

    segments: SegmentFolder | None
    """The place of the trajectories; None if they are in the database."""

    @property
    def runs(self) -> ShardRuns: ...

    async def events(self, *, after: int, limit: int = 1_000) -> list[Event]:
        """Return events with ids above `after`, in order."""

    async def last_event(self) -> int:
        """Return the id of the newest event; 0 if there is none."""

    async def wait_for_events(self, *, after: int) -> int:
        """Wait until the newest event's id is above `after`, then return it.

        If it is below `after`, since the store has lost events, it is returned at once: go on from there.
        """

    async def failed(self) -> None:
        """Wait until the store fails for good, which only a defect can cause.

        Raises:
            StoreError: The store has failed.
        """


async def cancel_unfinished(store: Store, pool: str | None = None) -> list[str]:
    """Cancel the rollouts of a pool, or of all, that have not ended; return their ids."""
    unfinished: dict[str, None] = {}  # ordered; one may come to another state meanwhile
    states = [state for state in RolloutState if not state.terminal]
    for state in (*states, RolloutState.QUEUED):  # a failed attempt leads back there
        cursor: str | None = None
        while True:
            page = await store.list(state=state, cursor=cursor, limit=1_000)
            unfinished |= {each.rollout_id: None for each in page.rollouts if pool in (None, each.pool)}
            if (cursor := page.next_cursor) is None:
                break
    for rollout_id in unfinished:
        await store.cancel(rollout_id)
    return list(unfinished)
