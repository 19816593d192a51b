"""The contract of the durable store, which is the queue as well.

Guarantees: what `submit` returned survives any crash; a rollout reaches exactly one terminal state, and its
result is written with that state in one transaction; only the holder of the current lease can move a rollout,
so a worker that lost its lease can harm nothing; no owner is ever leased what it already holds; an attempt counts
when it enters its first stage, so that a crash costs nothing that had not begun; every change of state is an event
with an id that grows by one. A call runs to its end even when its caller is cancelled, so no lease is taken unseen.

A lease is lost when it was taken over, given back or ended; one that ran out and that nobody took over yet
can still be renewed or ended by its owner. The `wait_for_*` methods spare their callers polling: each returns
when there may be something new since the call that it names, and at once if that happened in between.

Events of the store: kind `rollout.state`, subject the rollout's id, data `state`, `attempt` and, when the
rollout has them, `reward`, `stop_reason` and `code` (of the error that ended it or its last attempt); and
kind `rollout.cancel_requested` with the same data for a leased one that is asked to end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from pydantic import JsonValue

from api_schemas.errors import ErrorInfo
from api_schemas.events import Event
from api_schemas.rollouts import Rollout, RolloutPage, RolloutRequest, RolloutState, Span
from api_schemas.trajectories import Trajectory
from rollout_service.errors import StoreError
from rollout_service.store.runs_contract import RunStore


@dataclass(frozen=True, slots=True)
class Lease:
    """A rollout that this owner may work on until the lease runs out unless it is renewed."""

    rollout_id: str
    request: RolloutRequest
    attempt: int
    """The number, from 1, of the attempt that this lease is for. It counts once it has entered a stage, or failed."""
    retries: list[ErrorInfo]
    """Failures of the earlier attempts."""
    spans: list[Span]
    """Stages of the earlier attempts that ended in a failure, not in a crash."""
    created_at: datetime
    """When the rollout was submitted."""
    queued_at: datetime
    """When it was last queued: submitted, or given back after an attempt."""
    token: int
    """Grows with every claim, so that it tells this lease from earlier ones of the same owner and attempt."""


class Store(Protocol):
    """Where rollouts, results and events live. All methods raise StoreError when the store fails."""

    @property
    def problem(self) -> StoreError | None:
        """Why the store cannot be written at the moment; None when it can, as far as is known."""
        ...

    @property
    def errors(self) -> int:
        """How many calls have failed since it was opened."""
        ...

    def size_bytes(self) -> int:
        """Return how much room the store's files take."""
        ...

    @property
    def runs(self) -> RunStore:
        """Runs, groups and batches, in the same database."""
        ...

    async def submit(self, request: RolloutRequest) -> tuple[Rollout, bool]:
        """Make a rollout durable; returns it and whether it is new. `request.rollout_id` must be set.

        The same id with the same body returns what is there (so does an id that was cancelled before it was
        submitted); with another body it raises ConflictError.
        """
        ...

    async def claim(
        self, owner: str, *, limit: int, lease_seconds: float, pools: Collection[str] | None = None
    ) -> list[Lease]:
        """Lease up to `limit` queued rollouts, oldest first; also those of other owners whose lease ran out.

        With `pools` only rollouts of these are leased, and `wait_for_work` waits for those until the next claim.
        What `owner` holds itself is never leased to it again, however long the store could not be written.
        """
        ...

    async def renew(self, owner: str, rollout_ids: Sequence[str], *, lease_seconds: float) -> None:
        """Renew these leases of this owner."""
        ...

    async def recover(self, owner: str) -> int:
        """Queue again what services that are gone held, and return how many rollouts that was.

        `owner` calls this before its first claim. An attempt that had begun stays counted. What a live service holds
        is not touched: a store that services share asks `cluster.identity.is_gone` about each owner; in a store that
        only one process can have open, every other owner is gone.
        """
        ...

    async def release(self, owner: str, rollout_ids: Sequence[str] | None = None) -> int:
        """Queue again what this owner holds, or these of it; returns how many rollouts that were.

        Attempts that had begun are taken back from the count: an orderly shutdown is nobody's failure.
        """
        ...

    async def advance(self, lease: Lease, owner: str, state: RolloutState) -> bool:
        """Record the stage that a leased rollout is in; False when the lease is no longer held.

        Within an attempt stages only go forward; another order, or a terminal state, raises ValueError.
        """
        ...

    async def retry(
        self,
        lease: Lease,
        owner: str,
        error: ErrorInfo,
        *,
        spans: Sequence[Span] = (),
        delay_seconds: float = 0.0,
    ) -> bool:
        """Queue a leased rollout again after a failed attempt, not before the delay has passed.

        `spans` are those of all attempts so far; the next lease brings them along. The attempt counts even if it
        failed before its first stage. False when the lease is no longer held. One whose cancellation was asked for
        is cancelled instead.
        """
        ...

    async def finish(self, lease: Lease, owner: str, result: Rollout) -> bool:
        """Write the terminal state and the result; False (and nothing written) if the lease is lost.

        What the store knows itself (the request's fields, the attempt, the retries and the times) it does not
        take from the result. A state that is not terminal, or another id, raises ValueError.
        """
        ...

    async def cancel(self, rollout_id: str) -> RolloutState | None:
        """Ask for a rollout to be cancelled; returns the state that it was in, None if it is not known.

        A queued one that nobody has leased is cancelled at once. A leased one is marked; its worker ends it
        through `finish`. A terminal one stays as it is. An unknown id leaves a tombstone: submitted later, it
        is cancelled already.
        """
        ...

    async def cancel_requested(self, owner: str) -> list[str]:
        """Ids among this owner's leases whose cancellation was asked for."""
        ...

    async def get(self, rollout_id: str) -> Rollout | None:
        """A rollout as it stands, without its trajectory."""
        ...

    async def trajectory(self, rollout_id: str) -> Trajectory | None:
        """The trajectory of a finished rollout, or None."""
        ...

    async def counts(self) -> dict[RolloutState, int]:
        """How many rollouts are in each state; states that nothing is in are left out."""
        ...

    async def record(self, kind: str, subject: str, data: dict[str, JsonValue]) -> Event:
        """Append an event of the service itself."""
        ...

    async def events(self, *, after: int, limit: int = 1_000) -> list[Event]:
        """Events with ids above `after`, in order."""
        ...

    async def last_event(self) -> int:
        """The id of the newest event; 0 when there is none."""
        ...

    async def wait_for_work(self) -> None:
        """Wait until `claim` may return something; a delay or a lease that ran out may bring it about too."""
        ...

    async def wait_for_cancels(self) -> None:
        """Wait for a cancellation of a leased rollout since the last `cancel_requested`."""
        ...

    async def wait_for_events(self, *, after: int) -> int:
        """Wait until the newest event's id is above `after`, and return that id."""
        ...

    async def wait_for_result(self, rollout_id: str) -> Rollout | None:
        """Wait until a rollout is terminal and return it without its trajectory; None at once if unknown."""
        ...

    async def close(self) -> None:
        """Flush and close; idempotent."""
        ...

    async def list(
        self, *, state: RolloutState | None = None, cursor: str | None = None, limit: int = 100
    ) -> RolloutPage:
        """A page of rollouts, oldest first, without trajectories; a bad cursor raises InvalidFieldError."""
        ...
