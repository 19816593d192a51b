"""Runs for a trainer: `async for batch in run.batches()` is all it needs.

An acknowledged batch never comes again; any other batch does. A lease whose response was lost is requested again under
the same key, which returns the same batch.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio
import anyio.to_thread

from rollout_client import _wire as wire
from rollout_client.arrays import BatchArrays, require_numpy
from rollout_client.errors import ClientError, GoneError, ProtocolError, UnavailableError, UnreachableError

if TYPE_CHECKING:
    import httpx

    from rollout_client._connection import Connection, Query

log = logging.getLogger("rollout_client")

LEASE_SECONDS = 600.0
LONG_POLL_SECONDS = 30.0
RUN_WITHOUT_BATCHES = "run_without_batches"
"""The code of a lease from a run that is over and never had a batch."""
ANSWER_SECONDS = 300.0
"""How long the transfer of a batch may stall."""


GroupState = Literal["open", "ready", "batched", "acknowledged", "dropped"]
Spawn = Callable[..., object]
"""Starts a coroutine function with its arguments in a task group."""

RESCORE_SECONDS = 3_600.0
"""How long the scoring of one request's rollouts may take."""


class LeasedBatch:
    """A batch that this client holds until it is acknowledged or given back, or its lease expires."""

    def __init__(
        self,
        run: ClientRun,
        key: str,
        content: bytes | bytearray,
        batch: wire.Batch,
        arrays: BatchArrays | None = None,
    ) -> None:
        self._run = run
        self._key = key
        self.content = content
        """The response body: JSON, or a safetensors file."""
        self.batch = batch
        """The parsed batch, without its tokens if it came as arrays."""
        self.arrays = arrays
        """The tokens, if they were requested as arrays."""
        self.settled = False
        """Whether it was acknowledged or given back."""

    @property
    def batch_id(self) -> str:
        return self.batch.batch_id

    @property
    def groups(self) -> Sequence[wire.Group]:
        return self.batch.groups

    async def ack(self) -> None:
        """Acknowledge the batch, which then never comes again.

        Raises:
            ConflictError: The batch has become too stale meanwhile.
        """
        await self._run.settle(self.batch_id, "ack")
        self.settled = True

    async def renew(self, seconds: float = LEASE_SECONDS) -> datetime | None:
        """Extend the lease to `seconds` from now, and return when it expires.

        Raises:
            ConflictError: The batch belongs to someone else by now.
        """
        return (await self._run.settle(self.batch_id, "renew", key=self._key, seconds=f"{seconds:g}")).lease_until

    async def nack(self) -> None:
        """Give the batch back; it can be leased again at once.

        Raises:
            ConflictError: The batch belongs to someone else by now, or is acknowledged.
        """
        await self._run.settle(self.batch_id, "nack", key=self._key)
        self.settled = True


async def _renew_until_settled(leased: LeasedBatch, seconds: float, scope: anyio.CancelScope) -> None:
    """Renew a lease until it is settled or refused; the acknowledgment then tells the trainer why."""
    with scope, suppress(ClientError):
        while not leased.settled:
            await anyio.sleep(seconds / 3)
            with suppress(UnreachableError, UnavailableError):  # a later renewal may still be in time
                await leased.renew(seconds)


async def send_rescore(connection: Connection, path: str, order: wire.RescoreOptions) -> list[wire.Rescored]:
    """Have rollouts scored again.

    Raises:
        ProtocolError: The response was cut off.
    """
    from rollout_client._answers import parse

    response = await connection.send("POST", path, order, seconds=RESCORE_SECONDS)
    lines = response.content.splitlines()
    results = [parse(wire.Rescored, line) for line in lines[:-1]]
    if not lines or parse(wire.RescoreEnd, lines[-1]).rescored != len(results):
        raise ProtocolError("the response was cut off; the request can be repeated")
    return results


class ClientRun:
    """A run at a server; its methods raise `NotFoundError` if there is none of this id."""

    def __init__(self, run_id: str, connection: Connection, spawn: Spawn | None = None) -> None:
        """`spawn` starts background tasks that live as long as the client is open."""
        self._spawn = spawn
        self.run_id = run_id
        self._connection = connection
        self._path = f"/v1/runs/{run_id}"
        self._version: int | None = None
        self._told: list[str] = []
        """The causes of waiting that were logged last."""

    async def view(self, *, parallel: bool = False) -> wire.Run:
        """Return the run in its present state, with figures on its use of sub-agents if `parallel`."""
        params = {"parallel": parallel or None}
        return await self._connection.call(wire.Run, "GET", self._path, params=params)

    async def append(self, tasks: Sequence[wire.Task], *, offset: int | None = None, close: bool = False) -> wire.Run:
        """Append tasks to an open run.

        With `offset`, appending the same tasks twice appends them once. Without it, the run is first asked how many
        tasks it has.
        """
        if offset is None:
            offset = (await self.view()).tasks or 0
        order = wire.AppendTasks(tasks=list(tasks), offset=offset, close=close)
        return await self._connection.call(wire.Run, "POST", f"{self._path}/tasks", order)

    async def patch(self, patch: wire.RunPatch) -> wire.Run:
        """Change a run that has not ended."""
        return await self._connection.call(
            wire.Run, "PATCH", self._path, patch.model_dump(mode="json", exclude_none=True)
        )

    async def group_page(
        self,
        *,
        state: GroupState | None = None,
        reason: str | None = None,
        order: Literal["newest", "oldest"] = "newest",
        cursor: str | None = None,
        limit: int = 50,
    ) -> wire.GroupPage:
        """Return a page of the run's groups with their samples, of those in this state, or dropped for this reason.

        A page can be short, or empty, although there are more: go on while `next_cursor` is not None.
        """
        params = {"state": state, "reason": reason, "order": order, "cursor": cursor, "limit": limit}
        return await self._connection.call(wire.GroupPage, "GET", f"{self._path}/groups", params=params)

    async def groups(
        self,
        *,
        state: GroupState | None = None,
        reason: str | None = None,
        order: Literal["newest", "oldest"] = "newest",
    ) -> AsyncGenerator[wire.GroupRow]:
        """Yield the run's groups with their samples, of those in this state, or dropped for this reason."""
        cursor: str | None = None
        while True:
            page = await self.group_page(state=state, reason=reason, order=order, cursor=cursor)
            for group in page.groups:
                yield group
            if (cursor := page.next_cursor) is None:
                return

    async def history(self, *, points: int = 100) -> wire.RunHistory:
        """Return how the run went, as columns with an entry for each of up to `points` intervals of closed groups."""
        path = f"{self._path}/history"
        return await self._connection.call(wire.RunHistory, "GET", path, params={"points": points})

    async def pause(self) -> wire.Run:
        """Stop starting groups."""
        return await self.patch(wire.RunPatch(state=wire.RunState.PAUSED))

    async def resume(self) -> wire.Run:
        """Start groups again."""
        return await self.patch(wire.RunPatch(state=wire.RunState.RUNNING))

    async def end(self) -> wire.Run:
        """End the run: rollouts under way are cancelled, finished groups can still be leased."""
        return await self._connection.call(wire.Run, "DELETE", self._path)

    async def set_version(self, version: int) -> wire.Run:
        """Report the version that the trainer has reached; the next lease repeats it."""
        self._version = version
        return await self.patch(wire.RunPatch(version=version))

    async def lease(
        self,
        *,
        timeout_seconds: float | None = None,
        lease_seconds: float = LEASE_SECONDS,
        allow_stale: bool = False,
        arrays: bool = False,
    ) -> LeasedBatch | None:
        """Return the next batch; None if there is none in time. Without a timeout this waits indefinitely.

        If there is none for half a minute, the log says what the run waits for, if it knows.

        With `arrays` its tokens come as arrays, which is many times faster.

        Raises:
            GoneError: The run is over and every batch is acknowledged.
            ConflictError: There will be no batch until a person solves the run's problem.
            ImportError: `arrays` is set and NumPy is missing.
        """
        if arrays:
            require_numpy()
        key, left = uuid.uuid4().hex, timeout_seconds
        params = {
            "key": key,
            "seconds": f"{lease_seconds:g}",
            "allow_stale": allow_stale or None,
            "version": self._version,
        }
        while True:
            wait = LONG_POLL_SECONDS if left is None else min(left, LONG_POLL_SECONDS)
            leased = await self._lease_once(key, {**params, "timeout": f"{wait:g}"}, wait, arrays=arrays)
            if leased is not None:
                return leased
            if left is not None:
                left -= wait
                if left <= 0:
                    return None
            await self._log_causes()

    async def _log_causes(self) -> None:
        """Log why the run delivers nothing, unless that is what was logged last."""
        from api_schemas.errors import sentences

        view = await self.view()
        causes = list(view.warnings)
        if view.problem is not None:
            causes.append(sentences(view.problem.message, view.problem.hint))
        elif view.state is wire.RunState.PAUSED:
            causes.append("it is paused, and begins no groups until it is resumed")
        if causes and causes != self._told:
            log.warning("run %s has no batch yet: %s", self.run_id, " ".join(causes))
        self._told = causes

    async def _lease_once(self, key: str, params: Query, wait: float, *, arrays: bool) -> LeasedBatch | None:
        from rollout_client._answers import parse
        from rollout_client._download import LargeBody

        body = LargeBody()
        response = await self._connection.send(
            "POST",
            f"{self._path}/lease",
            params=params,
            seconds=ANSWER_SECONDS + wait,
            headers={"accept": wire.BINARY_MEDIA_TYPE if arrays else "application/json"},
            into=body if arrays else None,
        )
        if response.status_code == HTTPStatus.NO_CONTENT:
            return None
        if not arrays:
            return LeasedBatch(self, key, response.content, parse(wire.Batch, response.content))
        try:
            read = BatchArrays.from_bytes(body.content)
        except ValueError as error:
            raise ProtocolError(f"the batch cannot be read: {error}. Is the server of another version?") from error
        return LeasedBatch(self, key, body.content, read.batch, read)

    async def batches(
        self, *, lease_seconds: float = LEASE_SECONDS, arrays: bool = False
    ) -> AsyncGenerator[LeasedBatch]:
        """Yield batches until the run is over; each is acknowledged when the loop asks for the next, unless settled.

        Leaving the loop by `break` or an error acknowledges nothing: the batch comes again, at once after `nack`, else
        when its lease expires. While the loop's body runs, the lease is renewed.

        Raises:
            GoneError: The run took all its tasks and delivered no batch; its problem is in the message.
            ConflictError: There will be no batch until a person solves the run's problem.
        """
        while True:
            try:
                leased = await self.lease(lease_seconds=lease_seconds, arrays=arrays)
            except GoneError as error:
                if error.problem.code == RUN_WITHOUT_BATCHES:
                    raise
                return
            if leased is not None:
                kept = self._start_renewal(leased, lease_seconds)
                try:
                    yield leased
                finally:
                    kept.cancel()
                if not leased.settled:
                    await leased.ack()

    async def export(self, path: Path) -> int:
        """Write the run's rollouts to a file, completely or not at all, and return its size in bytes.

        A name that ends in `.gz` compresses it. `run_export.RunExport` reads it.
        """
        partial = path.with_name(f"{path.name}.partial")
        compression = "gzip" if path.suffix == ".gz" else "none"

        async def receive(response: httpx.Response) -> None:
            async with await anyio.open_file(partial, "wb") as file:
                async for piece in response.aiter_bytes():
                    await file.write(piece)

        try:
            await self._connection.send(
                "GET",
                f"{self._path}/export",
                params={"compression": compression},
                seconds=ANSWER_SECONDS,
                receive=receive,
            )
            await anyio.to_thread.run_sync(partial.replace, path)
        finally:
            partial.unlink(missing_ok=True)
        return (await anyio.Path(path).stat()).st_size

    async def rescore(
        self,
        rollout_ids: Sequence[str] | None = None,
        *,
        environment: str | None = None,
        replay: Literal["needed", "always"] = "needed",
    ) -> list[wire.Rescored]:
        """Have rollouts of closed groups scored again: those named, or all.

        A rollout that cannot be scored has an `error` in its result.

        Raises:
            InvalidRequestError: A rollout or the environment is unknown.
        """
        ids = None if rollout_ids is None else list(rollout_ids)
        order = wire.RescoreRun(rollout_ids=ids, environment=environment, replay=replay)
        return await send_rescore(self._connection, f"{self._path}/rescore", order)

    def _start_renewal(self, leased: LeasedBatch, seconds: float) -> anyio.CancelScope:
        """Renew a lease in the background; cancel the returned scope to stop."""
        scope = anyio.CancelScope()
        if self._spawn is not None:
            self._spawn(_renew_until_settled, leased, seconds, scope)
        return scope

    async def settle(self, batch_id: str, how: str, /, **params: str) -> wire.BatchAnswer:
        """Acknowledge (`ack`), give back (`nack`) or `renew` a batch by its id, as after a restart of the trainer."""
        path = f"{self._path}/batches/{batch_id}/{how}"
        return await self._connection.call(wire.BatchAnswer, "POST", path, params=params)
