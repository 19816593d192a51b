"""The contract of the durable store, which is the queue as well.

Guarantees: what `submit` returned survives any crash; a rollout reaches exactly one terminal state, and its
result is written with that state in one transaction; only the holder of the current lease (owner and attempt)
can move a rollout, so a worker that lost its lease can harm nothing; every change of state is an event with an
id that grows by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

from api_schemas.errors import ErrorInfo
from api_schemas.events import Event
from api_schemas.rollouts import Rollout, RolloutPage, RolloutRequest, RolloutState
from api_schemas.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class Lease:
    """A rollout that this owner may work on until the lease runs out unless it is renewed."""

    rollout_id: str
    request: RolloutRequest
    attempt: int
    """Counted from 1; a lease that ran out or was given back counts as an attempt."""
    retries: list[ErrorInfo]
    """Failures of the earlier attempts."""


class Store(Protocol):
    """Where rollouts, results and events live. All methods raise StoreError when the store fails."""

    async def submit(self, request: RolloutRequest) -> tuple[Rollout, bool]:
        """Make a rollout durable; returns it and whether it is new. `request.rollout_id` must be set.

        The same id with the same body returns what is there (so does an id that was cancelled before it was
        submitted); with another body it raises ConflictError.
        """
        ...

    async def claim(self, owner: str, *, limit: int, lease_seconds: float) -> list[Lease]:
        """Lease up to `limit` queued rollouts, oldest first; also those whose lease ran out."""
        ...

    async def renew(self, owner: str, *, lease_seconds: float) -> None:
        """Renew every lease of this owner."""
        ...

    async def release(self, owner: str) -> int:
        """Queue again what this owner holds, as after its crash; returns how many there were."""
        ...

    async def advance(self, lease: Lease, owner: str, state: RolloutState) -> bool:
        """Record the stage that a leased rollout is in; False when the lease is no longer held."""
        ...

    async def retry(self, lease: Lease, owner: str, error: ErrorInfo, *, delay_seconds: float = 0.0) -> bool:
        """Queue a leased rollout again after a failed attempt, not before the delay has passed."""
        ...

    async def finish(self, lease: Lease, owner: str, result: Rollout) -> bool:
        """Write the terminal state and the result; False (and nothing written) if the lease is lost."""
        ...

    async def cancel(self, rollout_id: str) -> RolloutState | None:
        """Ask for a rollout to be cancelled; returns the state that it was in, None if it is not known.

        A queued one is cancelled at once. An unknown id leaves a tombstone: submitted later, it is cancelled
        already. A leased one is marked; its worker ends it through `finish`. A terminal one stays as it is.
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

    async def list(
        self, *, state: RolloutState | None = None, cursor: str | None = None, limit: int = 100
    ) -> RolloutPage:
        """A page of rollouts, oldest first, without trajectories."""
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

    async def close(self) -> None:
        """Flush and close; idempotent."""
        ...
