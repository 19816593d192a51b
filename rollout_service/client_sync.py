"""The client for code that is not asynchronous: the same calls, which block.

Guarantees: an event loop of its own runs in a thread for as long as the client is open, so that a lost connection is
taken up and a call is repeated just as in the asynchronous client; nothing of it is left when the block ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from api_schemas.exports import Rescored
from api_schemas.inference import PoolOutcome
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.runs import Group, Run, RunRequest
from api_schemas.tasks import Task
from rollout_service.client import RolloutClient
from rollout_service.client_errors import GoneError
from rollout_service.client_runs import LEASE_SECONDS, ClientRun, LeasedBatch

T = TypeVar("T")


class SyncBatch:
    """A batch that this client holds."""

    def __init__(self, leased: LeasedBatch, portal: BlockingPortal) -> None:
        self.leased = leased
        self._portal = portal
        self.batch = leased.batch
        self.arrays = leased.arrays

    @property
    def batch_id(self) -> str:
        """Its id."""
        return self.batch.batch_id

    @property
    def groups(self) -> Sequence[Group]:
        """Its groups."""
        return self.batch.groups

    @property
    def settled(self) -> bool:
        """Whether it was acknowledged or given back."""
        return self.leased.settled

    def ack(self) -> None:
        """It was trained on: it never comes again."""
        self._portal.call(self.leased.ack)

    def renew(self, seconds: float = LEASE_SECONDS) -> datetime | None:
        """Keep it for so long from now."""
        return self._portal.call(self.leased.renew, seconds)

    def nack(self) -> None:
        """Give it back."""
        self._portal.call(self.leased.nack)


class SyncRun:
    """A run at a server; see `ClientRun`."""

    def __init__(self, run: ClientRun, portal: BlockingPortal) -> None:
        self._run = run
        self._portal = portal
        self.run_id = run.run_id

    def view(self) -> Run:
        """The run as it stands."""
        return self._portal.call(self._run.view)

    def append(self, tasks: Sequence[Task], *, offset: int | None = None, close: bool = False) -> Run:
        """Append tasks to an open run."""
        return self._portal.call(lambda: self._run.append(tasks, offset=offset, close=close))

    def pause(self) -> Run:
        """Begin no more groups."""
        return self._portal.call(self._run.pause)

    def resume(self) -> Run:
        """Begin groups again."""
        return self._portal.call(self._run.resume)

    def end(self) -> Run:
        """End it."""
        return self._portal.call(self._run.end)

    def export(self, path: Path) -> int:
        """Write the run's rollouts to a file; returns its bytes."""
        return self._portal.call(self._run.export, path)

    def rescore(
        self,
        rollout_ids: Sequence[str] | None = None,
        *,
        environment: str | None = None,
        replay: Literal["needed", "always"] = "needed",
    ) -> list[Rescored]:
        """Have rollouts of closed groups evaluated again, without inference."""
        return self._portal.call(
            lambda: self._run.rescore(rollout_ids, environment=environment, replay=replay)
        )

    def set_version(self, version: int) -> Run:
        """Tell the version that the trainer has reached."""
        return self._portal.call(self._run.set_version, version)

    def lease(
        self,
        *,
        timeout_seconds: float | None = None,
        lease_seconds: float = LEASE_SECONDS,
        allow_stale: bool = False,
        arrays: bool = False,
    ) -> SyncBatch | None:
        """The next batch; None when there is none in time. Raises GoneError when the run is over."""
        leased = self._portal.call(
            lambda: self._run.lease(
                timeout_seconds=timeout_seconds,
                lease_seconds=lease_seconds,
                allow_stale=allow_stale,
                arrays=arrays,
            )
        )
        return None if leased is None else SyncBatch(leased, self._portal)

    def batches(self, *, lease_seconds: float = LEASE_SECONDS, arrays: bool = False) -> Iterator[SyncBatch]:
        """Batches until the run is over; each is acknowledged when the loop comes around."""
        while True:
            try:
                batch = self.lease(lease_seconds=lease_seconds, arrays=arrays)
            except GoneError:
                return
            if batch is not None:
                kept = self._portal.call(self._run.keep, batch.leased, lease_seconds)
                try:
                    yield batch
                finally:
                    with suppress(RuntimeError):  # the client was closed first, which ends it too
                        self._portal.call(kept.cancel)
                if not batch.settled:
                    batch.ack()


class SyncRolloutClient:
    """The service at one address. Use it as `with SyncRolloutClient(url, key) as client`."""

    def __init__(self, base_url: str, key: str | None = None, *, patience_seconds: float = 60.0) -> None:
        self._make: Callable[[], RolloutClient] = lambda: RolloutClient(
            base_url, key, patience_seconds=patience_seconds
        )
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            client = self._portal.call(self._make)
            self._client = stack.enter_context(self._portal.wrap_async_context_manager(client))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def submit(self, request: RolloutRequest, *, wait_seconds: float = 0.0) -> Rollout:
        """Order a rollout; durable when this returns."""
        return self._portal.call(lambda: self._client.submit(request, wait_seconds=wait_seconds))

    def run(self, request: RolloutRequest) -> Rollout:
        """Order a rollout and wait for its end."""
        return self._portal.call(self._client.run, request)

    def get(self, rollout_id: str, *, trajectory: bool = False) -> Rollout:
        """A rollout as it stands."""
        return self._portal.call(lambda: self._client.get(rollout_id, trajectory=trajectory))

    def cancel(self, rollout_id: str) -> RolloutState | None:
        """Ask for a rollout to be cancelled; returns the state that it was in."""
        return self._portal.call(self._client.cancel, rollout_id)

    def update_weights(self, folder: str, version: int, *, pool: str = "policy", **how: Any) -> PoolOutcome:
        """Load new weights into every engine of a pool; raises WeightsError when engines refused or failed."""
        return self._portal.call(lambda: self._client.update_weights(folder, version, pool=pool, **how))

    def create_run(self, request: RunRequest) -> SyncRun:
        """Create a run, or take up the one of this id."""
        return SyncRun(self._portal.call(self._client.create_run, request), self._portal)

    def open_run(self, run_id: str) -> SyncRun:
        """A run that exists."""
        return SyncRun(self._client.open_run(run_id), self._portal)

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        return self._portal.call(self._client.runs)
