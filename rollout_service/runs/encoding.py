"""A batch on the wire: as a safetensors file, which `batch_arrays` describes and reads, or piece by piece as JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
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


def encode_batch(batch: Batch, samples: Sequence[SampleColumns]) -> list[bytes | memoryview]:
    """The parts of the file; `samples` are those of all groups in their order, `batch` has no tokens.

    Wide types come first, so that every array is aligned as its type wants.
    """
    segments = list(chain.from_iterable(samples))
    tensors: dict[str, tuple[np.dtype[Any], int, Iterable[NDArray[Any]]]] = {}
    offsets = {
        "group_offsets": _offsets(len(group.samples) for group in batch.groups),
        "sample_offsets": _offsets(map(len, samples)),
        "segment_offsets": _offsets(map(len, segments)),
    }
    for name, array in offsets.items():
        tensors[name] = (array.dtype, len(array), [array])
    tokens = int(offsets["segment_offsets"][-1])
    for name, dtype in sorted(COLUMNS.items(), key=lambda column: -column[1].itemsize):
        if dtype.itemsize > 1:
            tensors[name] = (dtype, tokens, _column(segments, name, dtype))
    for name, values in (("rewards", _rewards(batch)), ("advantages", _advantages(batch))):
        tensors[name] = (values.dtype, len(values), [values])
    usable = np.array([sample.usable for group in batch.groups for sample in group.samples], np.uint8)
    tensors["loss_mask"] = (COLUMNS["loss_mask"], tokens, _column(segments, "loss_mask", np.dtype("u1")))
    tensors["usable"] = (usable.dtype, len(usable), [usable])
    header: dict[str, Any] = {"__metadata__": {"batch": batch.model_dump_json()}}
    parts: list[bytes | memoryview] = []
    at = 0
    for name, (dtype, count, arrays) in tensors.items():
        end = at + count * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": [count], "data_offsets": [at, end]}
        parts += [array.data.cast("B") for array in arrays if len(array)]
        at = end
    return [_packed(header), *parts]


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


def _column(segments: Sequence[Columns], name: str, dtype: np.dtype[Any]) -> list[NDArray[Any]]:
    with np.errstate(over="ignore"):
        return [np.ascontiguousarray(one.arrays[name], dtype) for one in segments]


def _rewards(batch: Batch) -> NDArray[Any]:
    return _floats(sample.reward for group in batch.groups for sample in group.samples)


def _advantages(batch: Batch) -> NDArray[Any]:
    return _floats(sample.advantage for group in batch.groups for sample in group.samples)


def _floats(values: Iterable[float | None]) -> NDArray[Any]:
    return np.array([np.nan if value is None else value for value in values], "<f4")
