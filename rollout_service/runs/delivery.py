"""The delivery of batches to a trainer: lease, renew, acknowledge, return.

A batch is delivered again until it is acknowledged, and never afterwards. Nothing polls, not even for a lease that
expires. Repeating a request with the same key repeats a response that was lost.
"""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from http import HTTPStatus
from itertools import accumulate, chain
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from api_schemas.runs import Batch, Group, RunState
from rollout_client.arrays import TYPES
from rollout_service.base.errors import NotFoundError, RequestError, StoreError, root_cause
from rollout_service.base.ids import BatchId
from rollout_service.runs.manager import ManagerOf
from rollout_service.runs.planning import problem_of, reason_to_refuse
from rollout_service.store.codec.groups import group_json
from rollout_service.store.codec.trajectories import COLUMNS, Columns, compress
from rollout_service.store.runs_contract import BatchLease, BatchLeaseRequest, GroupHead, RunRecord, RunStore


class RunOverError(RequestError):
    """The run is over, and all its batches are acknowledged."""

    code = "run_over"
    status = HTTPStatus.GONE


class RunWithoutBatchesError(RunOverError):
    """The run took all its tasks and delivered no batch."""

    code = "run_without_batches"


class Delivery:
    """Delivers the batches of all runs.

    `renew`, `acknowledge` and `give_back` do what `RunStore` says of a batch, given its id.
    """

    def __init__(self, runs: RunStore, manager_of: ManagerOf) -> None:
        self._runs = runs
        self._manager_of = manager_of

    async def lease(self, request: BatchLeaseRequest, *, version: int | None, timeout: float) -> BatchLease | None:
        """Lease the next batch to a trainer at this version; return None if there is none within `timeout` seconds.

        Raises:
            NotFoundError: There is no such run.
            RunOverError: The run is over, and all its batches are acknowledged.
            RunWithoutBatchesError: The run is over, and it had none.
            RunStoppedError: There is none within `timeout` seconds, and there will be none until a person solves the
                run's problem.
            StoreError: The store failed.
        """
        if version is not None:
            await self._runs.update(request.run_id, version=version)
        manager = self._manager_of(request.run_id)
        run = await manager.sync_version(await self._runs.get(request.run_id))
        if run.request.max_staleness is not None:
            await manager.mask_stale(request.run_id, strict=not request.allow_stale)
        with anyio.move_on_after(timeout):
            return await self._leased(request)
        if (refusal := reason_to_refuse(await self._runs.get(request.run_id))) is not None:
            raise refusal
        return None

    async def _leased(self, request: BatchLeaseRequest) -> BatchLease:
        """Wait for a batch. Cancellation takes effect while it waits, never between a lease and its return."""
        while True:
            seen = self._runs.deliveries(request.run_id)
            with anyio.CancelScope(shield=True):
                leased = await self._lease_or_delay(request)
            if isinstance(leased, BatchLease):
                return leased
            with anyio.move_on_after(leased):
                await self._runs.wait_for_delivery(request.run_id, seen)

    async def _lease_or_delay(self, request: BatchLeaseRequest) -> BatchLease | float:
        """Return the seconds until there may be a batch if there is none."""
        while True:
            leased = await self._runs.lease(request)
            if isinstance(leased, BatchLease):
                return leased
            if leased.over:
                raise _over(await self._runs.get(request.run_id))
            if not leased.stale:
                return max(0.0, leased.due_in)
            await self._manager_of(request.run_id).mask_stale(request.run_id)

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

    async def as_arrays(self, leased: BatchLease, *, compressed: bool = False) -> BatchFile:
        """Return a leased batch as a file whose columns are read while it is sent."""
        heads = await self._runs.group_heads(leased.run_id, leased.groups)
        read = partial(self._runs.columns, leased.run_id)
        make = partial(BatchFile, _batch(leased, heads), heads, read, compressed=compressed)
        return await anyio.to_thread.run_sync(make)

    async def renew(self, run_id: str, batch_id: str, *, key: str | None, seconds: float) -> datetime:
        number = batch_number(run_id, batch_id)
        return await self._runs.renew_batch(run_id, number, key=key, seconds=seconds)

    async def acknowledge(self, run_id: str, batch_id: str) -> None:
        await self._runs.acknowledge(run_id, batch_number(run_id, batch_id))

    async def give_back(self, run_id: str, batch_id: str, *, key: str | None = None) -> None:
        await self._runs.give_back(run_id, batch_number(run_id, batch_id), key=key)


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
    """Leave the groups out; they only provide the range of versions."""
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
    """
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


ReadColumns = Callable[[int], Awaitable[Sequence[Columns]]]
"""Reads the columns of the segments of a group, by its number."""
Send = Callable[[memoryview], Awaitable[None]]

_NAMES = {np.dtype(code): name for name, code in TYPES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
PIECE_BYTES = 2 << 20
"""Larger pieces take less time on the event loop, and more memory."""
_GROUPS_AHEAD = 1
"""Groups that are read ahead of the one being read."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: np.dtype[Any]
    count: int
    content: memoryview | None
    """None for a column of tokens, which is read later."""


class BatchFile:
    """A batch as a safetensors file, which `rollout_client.arrays` describes and reads; `write` it once.

    The file's length is known before any trajectory is read, since the groups' heads contain all numbers of tokens.
    Columns are read and unpacked while others are sent, and sent columns are freed. A compressed file is made of frames
    of zstd, those of the columns as they are stored, so that neither side waits for the other to unpack.
    """

    def __init__(
        self, batch: Batch, heads: Sequence[GroupHead], read: ReadColumns, *, compressed: bool = False
    ) -> None:
        """`batch` is without its groups; the heads contain them."""
        self._heads = heads
        self._read = read
        self.compressed = compressed
        self._lengths = [tokens for head in heads for sample in head.tokens for tokens in sample]
        self._tensors = _tensors(heads, self._lengths)
        first = _header(batch_json(batch, [head.json for head in heads]), self._tensors)
        data = sum(tensor.count * tensor.dtype.itemsize for tensor in self._tensors)
        self.length = len(first) + data
        """Bytes before compression."""
        self._first = compress(first) if compressed else first

    async def write(self, send: Send) -> None:
        """Send the file in order, in pieces that each take a thread a few milliseconds.

        Raises:
            StoreError: The store failed, or data of the batch is gone; the file ends early.
        """
        sender, receiver = anyio.create_memory_object_stream[Sequence[Columns]](_GROUPS_AHEAD)
        try:
            with sender, receiver:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._read_groups, sender.send)
                    await self._write(send, receiver.receive)
                    tasks.cancel_scope.cancel()  # groups without tokens may be left
        except ExceptionGroup as failures:
            raise root_cause(failures) from failures

    async def _write(self, send: Send, receive: Callable[[], Awaitable[Sequence[Columns]]]) -> None:
        encode = compress if self.compressed else memoryview
        make_piece = _joined_frames if self.compressed else _unpacked
        await send(memoryview(self._first))
        segments: list[Columns] = []
        for tensor in self._tensors:
            if tensor.content is not None:
                await send(memoryview(encode(tensor.content)))
                continue
            for begin, end in _parts(self._lengths, PIECE_BYTES // tensor.dtype.itemsize):
                while len(segments) < end:
                    segments += await receive()
                part = segments[begin:end]
                piece, segments[begin:end] = await anyio.to_thread.run_sync(make_piece, part, tensor.name, tensor.dtype)
                await send(piece)

    async def _read_groups(self, send: Callable[[Sequence[Columns]], Awaitable[None]]) -> None:
        for head in self._heads:
            columns = await self._read(head.number)
            if [len(one) for one in columns] != list(chain.from_iterable(head.tokens)):
                raise StoreError(f"the group {head.number} changed while it was sent", hint="Lease the batch again.")
            await send(columns)


def batch_json(batch: Batch, groups: Iterable[bytes]) -> bytes:
    """Return a batch as JSON; the groups are JSON already, and are not decoded."""
    rest = batch.model_dump_json(exclude={"groups"}).encode()
    return b'{"groups":[' + b",".join(groups) + b"]," + rest[1:]


def _tensors(heads: Sequence[GroupHead], lengths: Sequence[int]) -> list[_Tensor]:
    """Return the tensors, those of wide types first, which aligns every array to its type."""
    samples = [sample for head in heads for sample in head.samples]
    segments = [len(sample) for head in heads for sample in head.tokens]
    arrays = {
        "group_offsets": _offsets(len(head.samples) for head in heads),
        "sample_offsets": _offsets(segments),
        "segment_offsets": _offsets(lengths),
        "rewards": _floats(sample.reward for sample in samples),
        "advantages": _floats(sample.advantage for sample in samples),
        "usable": np.array([sample.usable for sample in samples], np.uint8),
    }
    known = [_Tensor(name, array.dtype, len(array), _bytes(array)) for name, array in arrays.items()]
    columns = [_Tensor(name, dtype, sum(lengths), None) for name, dtype in COLUMNS.items()]
    return sorted(known + columns, key=lambda tensor: -tensor.dtype.itemsize)


def _header(batch: bytes, tensors: Iterable[_Tensor]) -> bytes:
    """Begin with the length; pad with spaces to align the data."""
    header: dict[str, Any] = {"__metadata__": {"batch": batch.decode()}}
    at = 0
    for tensor in tensors:
        end = at + tensor.count * tensor.dtype.itemsize
        offsets = [at, end]
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": [tensor.count],
            "data_offsets": offsets,
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def _offsets(lengths: Iterable[int]) -> NDArray[Any]:
    return np.fromiter(accumulate(lengths, initial=0), "<i8")


def _parts(lengths: Sequence[int], tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of parts with at most `tokens` tokens; a longer segment is a part by itself."""
    begin = size = 0
    for number, length in enumerate(lengths):
        if size and size + length > tokens:
            yield begin, number
            begin, size = number, 0
        size += length
    if size:
        yield begin, len(lengths)


def _unpacked(segments: Sequence[Columns], name: str, dtype: np.dtype[Any]) -> tuple[memoryview, list[Columns]]:
    """Return a column of these segments, and the segments without it."""
    piece = np.empty(sum(map(len, segments)), dtype)
    at = 0
    for segment in filter(len, segments):
        segment.fill(name, piece[at : at + len(segment)])
        at += len(segment)
    return _bytes(piece), [segment.without(name) for segment in segments]


def _joined_frames(segments: Sequence[Columns], name: str, dtype: np.dtype[Any]) -> tuple[memoryview, list[Columns]]:
    """Return a column of these segments, and the segments without it."""
    piece = b"".join(segment.frame(name, dtype) for segment in segments if len(segment))
    return memoryview(piece), [segment.without(name) for segment in segments]


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.data.cast("B") if len(array) else memoryview(b"")


def _floats(values: Iterable[float | None]) -> NDArray[Any]:
    return np.array([np.nan if value is None else value for value in values], "<f4")
