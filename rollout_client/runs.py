"""Runs for a trainer: `async for batch in run.batches()` is all that it needs.

Guarantees: what was acknowledged never comes again, what was not does; a lease whose answer was lost is asked for again
under the same key, which brings the same batch. Needs httpx, pydantic and anyio only.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Literal, TypeVar

import anyio
import anyio.to_thread
import httpx
from pydantic import TypeAdapter

from api_schemas.exports import Rescored, RescoreEnd, RescoreOptions, RescoreRun
from api_schemas.runs import (
    BINARY_MEDIA_TYPE,
    AppendTasks,
    Batch,
    BatchAnswer,
    Group,
    Run,
    RunPatch,
    RunState,
)
from api_schemas.tasks import Task
from rollout_client._connection import Connection
from rollout_client._download import LargeBody
from rollout_client.arrays import BatchArrays
from rollout_client.errors import ClientError, GoneError, ProtocolError, parse

T = TypeVar("T")

LEASE_SECONDS = 600.0
LONG_POLL_SECONDS = 30.0
ANSWER_SECONDS = 300.0
"""How long the transfer of a batch may stall."""


Spawn = Callable[..., object]
"""Starts a coroutine function with its arguments in a task group."""

RESCORE_SECONDS = 3_600.0
"""How long a part of the rollouts may take to be evaluated."""


class LeasedBatch:
    """A batch that this client holds until it is acknowledged, given back, or the lease runs out."""

    def __init__(
        self,
        run: ClientRun,
        key: str,
        content: bytes | bytearray,
        batch: Batch,
        arrays: BatchArrays | None = None,
    ) -> None:
        self._run = run
        self._key = key
        self.content = content
        """The batch as it came: JSON, or a safetensors file."""
        self.batch = batch
        """Without tokens when it came as arrays."""
        self.arrays = arrays
        """The tokens, when they were asked for as arrays."""
        self.settled = False
        """Whether it was acknowledged or given back."""

    @property
    def batch_id(self) -> str:
        """Its id."""
        return self.batch.batch_id

    @property
    def groups(self) -> Sequence[Group]:
        """Its groups."""
        return self.batch.groups

    async def ack(self) -> None:
        """It was trained on: it never comes again. Raises ConflictError when it had grown too old meanwhile."""
        await self._run.settle(self.batch_id, "ack")
        self.settled = True

    async def renew(self, seconds: float = LEASE_SECONDS) -> datetime | None:
        """Keep it for so long from now; returns until when. Raises ConflictError once it is somebody else's."""
        return (
            await self._run.settle(self.batch_id, "renew", key=self._key, seconds=f"{seconds:g}")
        ).lease_until

    async def nack(self) -> None:
        """Give it back: somebody gets it again at once."""
        await self._run.settle(self.batch_id, "nack")
        self.settled = True


async def _renew_until_settled(leased: LeasedBatch, seconds: float, scope: anyio.CancelScope) -> None:
    """A failure ends it: acknowledging the batch tells the trainer what became of it."""
    with scope, suppress(ClientError):
        while not leased.settled:
            await anyio.sleep(seconds / 3)
            await leased.renew(seconds)


async def send_rescore(connection: Connection, path: str, order: RescoreOptions) -> list[Rescored]:
    """The results of an order to evaluate rollouts again; raises ProtocolError when the answer was cut off."""
    response = await connection.send("POST", path, order.model_dump(mode="json"), seconds=RESCORE_SECONDS)
    lines = response.content.splitlines()
    results = [parse(TypeAdapter(Rescored), line) for line in lines[:-1]]
    if not lines or parse(TypeAdapter(RescoreEnd), lines[-1]).rescored != len(results):
        raise ProtocolError("the answer was cut off")
    return results


class ClientRun:
    """A run at a server."""

    def __init__(self, run_id: str, connection: Connection, spawn: Spawn | None = None) -> None:
        """`spawn` starts what goes on beside the caller, as long as the client is open."""
        self._spawn = spawn
        self.run_id = run_id
        self._connection = connection
        self._path = f"/v1/runs/{run_id}"
        self._version: int | None = None

    async def view(self) -> Run:
        """The run as it stands. Raises NotFoundError."""
        return await self._call(Run, "GET", self._path)

    async def append(self, tasks: Sequence[Task], *, offset: int | None = None, close: bool = False) -> Run:
        """Append tasks to an open run; give the offset so that sending them twice appends them once.

        Without it the number of tasks that the run has now is asked for first.
        """
        if offset is None:
            offset = (await self.view()).tasks or 0
        order = AppendTasks(tasks=list(tasks), offset=offset, close=close)
        return await self._call(Run, "POST", f"{self._path}/tasks", order.model_dump(mode="json"))

    async def patch(self, patch: RunPatch) -> Run:
        """Change a run while it lasts."""
        return await self._call(Run, "PATCH", self._path, patch.model_dump(mode="json", exclude_none=True))

    async def pause(self) -> Run:
        """Begin no more groups."""
        return await self.patch(RunPatch(state=RunState.PAUSED))

    async def resume(self) -> Run:
        """Begin groups again."""
        return await self.patch(RunPatch(state=RunState.RUNNING))

    async def end(self) -> Run:
        """End it: what is under way is cancelled, what is finished can still be leased."""
        return await self._call(Run, "DELETE", self._path)

    async def set_version(self, version: int) -> Run:
        """Tell the version that the trainer has reached; the next lease tells it too."""
        self._version = version
        return await self.patch(RunPatch(version=version))

    async def lease(
        self,
        *,
        timeout_seconds: float | None = None,
        lease_seconds: float = LEASE_SECONDS,
        allow_stale: bool = False,
        arrays: bool = False,
    ) -> LeasedBatch | None:
        """The next batch; None when there is none in time. Waits without end when no time is given.

        With `arrays` its tokens come as arrays, which needs numpy and is many times faster.
        Raises GoneError when the run is over and everything is acknowledged.
        """
        params = {"key": uuid.uuid4().hex, "seconds": f"{lease_seconds:g}"}
        params |= {"allow_stale": "true"} if allow_stale else {}
        params |= {} if self._version is None else {"version": str(self._version)}
        left = timeout_seconds
        while True:
            wait = LONG_POLL_SECONDS if left is None else min(left, LONG_POLL_SECONDS)
            leased = await self._lease_once(params | {"timeout": f"{wait:g}"}, wait, arrays=arrays)
            if leased is not None:
                return leased
            if left is not None:
                left -= wait
                if left <= 0:
                    return None

    async def _lease_once(self, params: dict[str, str], wait: float, *, arrays: bool) -> LeasedBatch | None:
        body = LargeBody()
        response = await self._connection.send(
            "POST",
            f"{self._path}/lease",
            params=params,
            seconds=ANSWER_SECONDS + wait,
            headers={"accept": BINARY_MEDIA_TYPE if arrays else "application/json"},
            into=body if arrays else None,
        )
        if response.status_code == HTTPStatus.NO_CONTENT:
            return None
        if not arrays:
            return LeasedBatch(
                self, params["key"], response.content, parse(TypeAdapter(Batch), response.content)
            )
        try:
            read = BatchArrays.from_bytes(body.content)
        except ValueError as error:
            raise ProtocolError(f"a batch that this client does not understand: {error}") from error
        return LeasedBatch(self, params["key"], body.content, read.batch, read)

    async def batches(
        self, *, lease_seconds: float = LEASE_SECONDS, arrays: bool = False
    ) -> AsyncGenerator[LeasedBatch]:
        """Batches until the run is over; each is acknowledged when the loop comes around, unless it was settled.

        A loop that is left (by `break` or an error) acknowledges nothing: the batch comes again, at once after
        `nack`, else when its lease runs out. Until then its lease is renewed.
        """
        while True:
            try:
                leased = await self.lease(lease_seconds=lease_seconds, arrays=arrays)
            except GoneError:
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
        """Write the run's rollouts to a file, which is whole or not there; returns its bytes.

        A name that ends in `.gz` gets it compressed. `run_export.RunExport` reads it.
        """
        partial = path.with_name(f"{path.name}.partial")
        compression = "gzip" if path.suffix == ".gz" else "none"

        async def receive(response: httpx.Response) -> None:
            async with await anyio.open_file(partial, "wb") as file:
                async for piece in response.aiter_bytes():
                    await file.write(piece)

        await self._connection.send(
            "GET",
            f"{self._path}/export",
            params={"compression": compression},
            seconds=ANSWER_SECONDS,
            receive=receive,
        )
        await anyio.to_thread.run_sync(partial.replace, path)
        return (await anyio.Path(path).stat()).st_size

    async def rescore(
        self,
        rollout_ids: Sequence[str] | None = None,
        *,
        environment: str | None = None,
        replay: Literal["needed", "always"] = "needed",
    ) -> list[Rescored]:
        """Have rollouts of closed groups evaluated again, all of them when none are named.

        What cannot be evaluated has an `error`. Raises InvalidRequestError for unknown rollouts or environments.
        """
        ids = None if rollout_ids is None else list(rollout_ids)
        order = RescoreRun(rollout_ids=ids, environment=environment, replay=replay)
        return await send_rescore(self._connection, f"{self._path}/rescore", order)

    def _start_renewal(self, leased: LeasedBatch, seconds: float) -> anyio.CancelScope:
        """Renew a lease until the scope is cancelled, the batch is settled, or it is lost."""
        scope = anyio.CancelScope()
        if self._spawn is not None:
            self._spawn(_renew_until_settled, leased, seconds, scope)
        return scope

    async def settle(self, batch_id: str, how: str, /, **params: str) -> BatchAnswer:
        """Acknowledge (`ack`), give back (`nack`) or `renew` a batch by its id, as after a restart of the trainer."""
        response = await self._connection.send(
            "POST", f"{self._path}/batches/{batch_id}/{how}", params=params
        )
        return parse(TypeAdapter(BatchAnswer), response.content)

    async def _call(self, model: type[T], method: str, path: str, body: object = None) -> T:
        response = await self._connection.send(method, path, body)
        return parse(TypeAdapter(model), response.content)
