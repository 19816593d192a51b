"""The delivery of batches to a trainer: lease, renew, acknowledge, return.

Guarantees: a batch is delivered again until it is acknowledged, and never afterwards. Nothing polls, not even for a
lease that expires. Repeating a request with the same key repeats a response that was lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from http import HTTPStatus

import anyio
import anyio.to_thread

from api_schemas.runs import Batch, Group, RunState
from rollout_service.base.errors import NotFoundError, RequestError
from rollout_service.base.ids import BatchId
from rollout_service.runs.batch_encoding import BatchFile
from rollout_service.runs.manager import RunManager
from rollout_service.runs.nothing_kept import problem_of, reason_to_refuse
from rollout_service.store.codec.heads import group_json
from rollout_service.store.runs_contract import BatchLease, BatchLeaseRequest, GroupHead, RunRecord, RunStore


class RunOverError(RequestError):
    """The run is over, and all its batches are acknowledged."""

    code = "run_over"
    status = HTTPStatus.GONE


class RunWithoutBatchesError(RunOverError):
    """The run took all its tasks and delivered no batch."""

    code = "run_without_batches"


class Delivery:
    """Delivers the batches of all runs."""

    def __init__(self, runs: RunStore, manager: RunManager) -> None:
        self._runs = runs
        self._manager = manager

    async def lease(
        self, request: BatchLeaseRequest, *, version: int | None, timeout: float
    ) -> BatchLease | None:
        """Lease the next batch to a trainer at this version; return None if there is none within `timeout` seconds.

        Raises:
            NotFoundError: There is no such run.
            RunOverError: The run is over, and all its batches are acknowledged.
            RunWithoutBatchesError: The run is over, and it had none.
            RunStoppedError: There is none within `timeout` seconds, and there will be none until a person mends what
                the run's problem says.
            StoreError: The store failed.
        """
        if version is not None:
            await self._runs.update(request.run_id, version=version)
        run = await self._manager.sync_version(await self._runs.get(request.run_id))
        if run.request.max_staleness is not None:
            await self._manager.mask_stale(request.run_id, strict=not request.allow_stale)
        with anyio.move_on_after(timeout):
            return await self._leased(request)
        if (refusal := reason_to_refuse(await self._runs.get(request.run_id))) is not None:
            raise refusal
        return None

    async def _leased(self, request: BatchLeaseRequest) -> BatchLease:
        """Wait for a batch. Cancellation takes effect while it waits, never between a lease and its return."""
        while True:
            seen = self._runs.deliveries
            with anyio.CancelScope(shield=True):
                leased = await self._runs.lease(request)
            if isinstance(leased, BatchLease):
                return leased
            if leased.over:
                raise _over(await self._runs.get(request.run_id))
            if leased.stale:
                await self._manager.mask_stale(request.run_id)
                continue
            with anyio.move_on_after(max(0.0, leased.due_in)):
                await self._runs.wait_for_delivery(seen)

    async def as_json(self, leased: BatchLease) -> AsyncIterator[bytes]:
        """Yield the JSON of a leased batch, with all its tokens, in pieces; one group at a time is in memory."""
        seen: list[Group] = []
        before = b'{"groups":['
        for number in leased.groups:
            group = await self._runs.group(leased.run_id, number)
            yield before + await anyio.to_thread.run_sync(group_json, group)
            seen.append(group.model_copy(update={"samples": []}))
            before = b","
        yield b"]," + _batch(leased, seen).model_dump_json(exclude={"groups"}).encode()[1:]

    async def as_arrays(self, leased: BatchLease) -> BatchFile:
        """Return a leased batch as a safetensors file; its columns are read while it is sent."""
        heads = await self._runs.group_heads(leased.run_id, leased.groups)
        read = partial(self._runs.columns, leased.run_id)
        return await anyio.to_thread.run_sync(BatchFile, _batch(leased, heads), heads, read)

    async def renew(self, run_id: str, batch_id: str, *, key: str | None, seconds: float) -> datetime:
        """Renew the lease of a batch; return when it expires.

        Raises:
            NotFoundError: There is no such batch.
            ConflictError: The batch is no longer leased, or is leased under another key.
        """
        number = batch_number(run_id, batch_id)
        return await self._runs.renew_batch(run_id, number, key=key, seconds=seconds)

    async def acknowledge(self, run_id: str, batch_id: str) -> None:
        """Acknowledge a batch, so that it is never delivered again; idempotent.

        Raises:
            NotFoundError: There is no such batch.
            ConflictError: The batch was dissolved.
        """
        await self._runs.acknowledge(run_id, batch_number(run_id, batch_id))

    async def give_back(self, run_id: str, batch_id: str) -> None:
        """Return a batch, so that it can be leased again at once.

        Raises:
            NotFoundError: There is no such batch.
            ConflictError: The batch is acknowledged.
        """
        await self._runs.give_back(run_id, batch_number(run_id, batch_id))


def _over(run: RunRecord) -> RunOverError:
    if run.count("batches:acknowledged"):
        return RunOverError(
            f"the run {run.run_id} is over, and all its batches are acknowledged", hint="Create a new run."
        )
    if (problem := problem_of(run)) is not None and run.state is RunState.FINISHED:
        return RunWithoutBatchesError(
            f"the run {run.run_id} is over: {problem.message}", hint=f"{problem.hint} Then create a new run."
        )
    return RunOverError(f"the run {run.run_id} is over, and it delivered no batch", hint="Create a new run.")


def _batch(leased: BatchLease, groups: Sequence[Group | GroupHead]) -> Batch:
    """Return a batch without its groups; they only provide the range of versions."""
    return Batch(
        batch_id=leased.batch_id,
        run_id=leased.run_id,
        number=leased.number,
        groups=[],
        delivery=leased.delivery,
        lease_until=leased.lease_until,
        version=leased.version,
        oldest_version=min(_known(groups, "oldest_version"), default=None),
        newest_version=max(_known(groups, "newest_version"), default=None),
        dropped=dict(leased.dropped),
    )


def _known(groups: Sequence[Group | GroupHead], field: str) -> list[int]:
    return [version for group in groups if (version := getattr(group, field)) is not None]


def batch_number(run_id: str, batch_id: str) -> int:
    """Return the number in the id of a batch of this run.

    Raises:
        NotFoundError: The id is not that of a batch of this run.
    """
    with suppress(ValueError):
        batch = BatchId.parse(batch_id)
        if batch.run == run_id:
            return batch.number
    raise NotFoundError(
        f"the run {run_id} has no batch {batch_id}", hint="The answer to a lease contains the batch's id."
    )
