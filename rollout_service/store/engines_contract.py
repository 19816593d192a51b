"""The contract on engines between services that share a store: which there are, and the commands to pools.

- A backend that one service puts here is followed by all, until one of them removes it.
- A pool has at most one open command. Commands are numbered; a repeated request for the open one gets its number.
- A command ends once: the first `finish` counts, with its result and the pool's new state, in one step.
- Every change wakes all services.

A store that only one service can have open has backends in a file (`FileBackends`), and needs no record of commands:
that service carries them out itself.

Events: `backend.changed` with the backend's id as subject; `pool.command`, `pool.held` and `pool.settled` with the
pool's name as subject and the command's `number`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from api_schemas.inference import BackendSpec


class CommandKind(StrEnum):
    PAUSE = "pause"
    RESUME = "resume"
    WEIGHTS = "weights"
    JOIN_GROUP = "join_group"
    LEAVE_GROUP = "leave_group"


@dataclass(frozen=True, slots=True)
class SharedBackend:
    backend_id: str
    spec: BackendSpec
    loopback_of: str = ""
    """The machine whose services alone can reach a loopback address; empty for every other address."""
    exports: tuple[str, ...] = ()
    """Token extras that it returned when it was checked."""
    is_draining: bool = False
    lease_until: float | None = field(default=None, compare=False)
    """Unix seconds; None without a lease."""


def end_of_lease(spec: BackendSpec) -> float | None:
    """Return Unix seconds for a lease that begins now; None for an engine without one."""
    return None if spec.lease_seconds is None else time.time() + spec.lease_seconds


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """The last command to a pool, and the state that the commands before it left."""

    pool: str
    number: int
    kind: CommandKind
    request: str
    """JSON."""
    is_open: bool
    state: str
    """JSON of `PoolState`, which the last finished command left; empty before the first."""
    revision: int
    """Grows with every change of `state`."""
    held_by: frozenset[str]
    """The identities of the services that hold their requests for the open command."""


class BackendStore(Protocol):
    """
    Raises:
        StoreError: The store fails; every method can raise it.
    """

    @property
    def is_shared(self) -> bool:
        """Whether other services may change the backends."""

    async def put(self, backend: SharedBackend) -> None:
        """Add a backend, or replace the one with its id."""

    async def remove(self, backend_id: str) -> bool:
        """Remove a backend; return whether it was there."""

    async def backends(self) -> Sequence[SharedBackend]:
        """Return all backends in the order in which they were first put."""

    async def wait_for_change(self, after: int) -> int:
        """Wait for a change since the call that returned `after`; start with 0, which returns at once."""


class EnginesStore(BackendStore, Protocol):
    """
    Raises:
        StoreError: The store fails; every method can raise it.
    """

    async def ask(self, pool: str, kind: CommandKind, request: str) -> int | None:
        """Open a command and return its number; None while another one is open."""

    async def pools(self) -> Sequence[PoolRecord]:
        """Return the records of all pools that ever had a command."""

    async def hold(self, pool: str, number: int, owner: str) -> None:
        """Record that a service holds its requests for the open command."""

    async def begin(self, pool: str, number: int) -> bool:
        """Record that the open command is carried out; return whether nobody had begun before."""

    async def finish(self, pool: str, number: int, result: str, state: str) -> bool:
        """End the open command; return whether it was still open."""

    async def save_state(self, pool: str, revision: int, state: str) -> bool:
        """Replace the state of a pool without an open command, if it still has this revision; return whether it had."""

    async def result(self, pool: str, number: int) -> str | None:
        """Return the result of a finished command, as it was given to `finish`; only the last ones are kept."""
