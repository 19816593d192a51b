"""A batch on the wire: as a safetensors file, which `batch_arrays` describes and reads, or piece by piece as JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_schemas.runs import Batch, Group
from rollout_service.batch_arrays import TYPES
from rollout_service.store.trajectory_codec import COLUMNS, Columns

SampleColumns = Sequence[Columns]
"""The columns of a sample's segments."""
_NAMES = {np.dtype(code): name for name, code in TYPES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A safetensors file whose length is known before its columns are unpacked."""

    length: int
    pieces: Iterator[memoryview]
    """The file in order, once, none of them empty; to get one takes a few milliseconds of a thread."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: np.dtype[Any]
    count: int
    pieces: Iterable[memoryview]


def encode_batch(batch: Batch, samples: Sequence[SampleColumns]) -> EncodedBatch:
    """The file; `samples` are those of all groups in their order, `batch` has no tokens.

    Wide types come first, so that every array is aligned as its type wants.
    """
    tensors = _tensors(batch, samples)
    header: dict[str, Any] = {"__metadata__": {"batch": batch.model_dump_json()}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.count * tensor.dtype.itemsize
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": [tensor.count], "data_offsets": [at, end]}
        at = end
    first = _packed(header)
    pieces = chain.from_iterable(tensor.pieces for tensor in tensors.values())
    return EncodedBatch(len(first) + at, filter(len, chain([memoryview(first)], pieces)))


def _tensors(batch: Batch, samples: Sequence[SampleColumns]) -> dict[str, _Tensor]:
    segments = list(chain.from_iterable(samples))
    rows = [sample for group in batch.groups for sample in group.samples]
    of_samples = {
        "rewards": _floats(sample.reward for sample in rows),
        "advantages": _floats(sample.advantage for sample in rows),
        "usable": np.array([sample.usable for sample in rows], np.uint8),
    }
    offsets = {
        "group_offsets": _offsets(len(group.samples) for group in batch.groups),
        "sample_offsets": _offsets(map(len, samples)),
        "segment_offsets": _offsets(map(len, segments)),
    }
    tokens = int(offsets["segment_offsets"][-1])
    whole = offsets | of_samples
    tensors = {name: _Tensor(array.dtype, len(array), [_bytes(array)]) for name, array in whole.items()}
    for name, dtype in COLUMNS.items():
        tensors[name] = _Tensor(dtype, tokens, _column(segments, name, dtype))
    return dict(sorted(tensors.items(), key=lambda one: -one[1].dtype.itemsize))


def group_json(group: Group) -> bytes:
    """A group as JSON, sample by sample: other threads get their turn between two."""
    samples = b",".join(sample.model_dump_json().encode() for sample in group.samples)
    rest = group.model_dump_json(exclude={"samples"}).encode()
    return b'{"samples":[' + samples + b"]," + rest[1:]


def _packed(header: dict[str, Any]) -> bytes:
    """The header behind its length, filled up with spaces so that the data is aligned."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def _offsets(lengths: Iterable[int]) -> NDArray[Any]:
    return np.fromiter(accumulate(lengths, initial=0), "<i8")


def _column(segments: Sequence[Columns], name: str, dtype: np.dtype[Any]) -> Iterator[memoryview]:
    """Unpack a column of all segments into few large pieces, since each costs a turn of the event loop."""
    for part in _parts(segments, _PIECE_BYTES // dtype.itemsize):
        piece = np.empty(sum(map(len, part)), dtype)
        at = 0
        for segment in part:
            segment.fill(name, piece[at : at + len(segment)])
            at += len(segment)
        yield _bytes(piece)


def _parts(segments: Iterable[Columns], tokens: int) -> Iterator[list[Columns]]:
    """Yield segments in parts of at most so many tokens; a longer segment is a part by itself."""
    part: list[Columns] = []
    size = 0
    for segment in filter(len, segments):
        if part and size + len(segment) > tokens:
            yield part
            part, size = [], 0
        part.append(segment)
        size += len(segment)
    if part:
        yield part


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.data.cast("B") if len(array) else memoryview(b"")


def _floats(values: Iterable[float | None]) -> NDArray[Any]:
    return np.array([np.nan if value is None else value for value in values], "<f4")
