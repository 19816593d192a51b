"""Trajectories at rest: columns of numbers, compressed, with the rest as JSON before them.

Guarantees: what is read is what was written, to the last bit: log-probabilities are kept as float32 exactly when each
of them is one, else as float64, and a trajectory that does not fit the columns is kept as JSON. Rows that an earlier
release wrote (compressed JSON) are read as well.

Layout: the byte 1, the header's length (uint32, little-endian), the header (JSON, compressed), and for every segment
and column its compressed bytes, whose lengths the header holds.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_schemas.trajectories import Segment, Trajectory

COLUMNS: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "logprobs": np.dtype("<f4"),
    "versions": np.dtype("<i4"),
    "turn_ids": np.dtype("<i4"),
}
"""The columns of a segment and their types."""
_EXACT: np.dtype[Any] = np.dtype("<f8")
_COLUMNAR = b"\x01"
_LENGTH = struct.Struct("<I")
_LEVEL = 1
"""Token ids and log-probabilities gain little from more."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of one segment: arrays of equal length, by name."""

    arrays: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.arrays["token_ids"])


def encode(trajectory: Trajectory) -> bytes:
    """A trajectory as bytes."""
    try:
        columns = [_columns(segment) for segment in trajectory.segments]
    except (OverflowError, ValueError):
        return zlib.compress(trajectory.model_dump_json().encode(), _LEVEL)
    blocks: list[bytes] = []
    layout = []
    for one in columns:
        packed = {name: zlib.compress(array.tobytes(), _LEVEL) for name, array in one.arrays.items()}
        blocks += packed.values()
        layout.append({name: [one.arrays[name].dtype.str, len(data)] for name, data in packed.items()})
    rest = _without_columns(trajectory).model_dump(mode="json")
    header = zlib.compress(json.dumps({"layout": layout, "rest": rest}).encode(), _LEVEL)
    return b"".join([_COLUMNAR, _LENGTH.pack(len(header)), header, *blocks])


def decode(data: bytes) -> Trajectory:
    """The inverse of `encode`."""
    if not data.startswith(_COLUMNAR):
        return Trajectory.model_validate_json(zlib.decompress(data))
    trajectory, columns = split(data)
    segments = [
        segment.model_copy(update={name: array.tolist() for name, array in one.arrays.items()})
        for segment, one in zip(trajectory.segments, columns, strict=True)
    ]
    return trajectory.model_copy(update={"segments": segments})


def split(data: bytes) -> tuple[Trajectory, list[Columns]]:
    """A trajectory whose segments have empty columns, and the columns of each segment as arrays.

    Raises OverflowError for one that does not fit the columns; `decode` reads it.
    """
    if not data.startswith(_COLUMNAR):
        whole = Trajectory.model_validate_json(zlib.decompress(data))
        return _without_columns(whole), [_columns(segment, strict=False) for segment in whole.segments]
    (length,) = _LENGTH.unpack_from(data, 1)
    at = 1 + _LENGTH.size
    header = json.loads(zlib.decompress(data[at : at + length]))
    at += length
    columns = []
    for layout in header["layout"]:
        arrays = {}
        for name, (dtype, size) in layout.items():
            arrays[name] = np.frombuffer(zlib.decompress(data[at : at + size]), dtype)
            at += size
        columns.append(Columns(arrays))
    return Trajectory.model_validate(header["rest"]), columns


def _columns(segment: Segment, *, strict: bool = True) -> Columns:
    """A segment's columns; `strict` refuses (ValueError, OverflowError) what would not come back as it was."""
    arrays = {name: _array(getattr(segment, name), dtype) for name, dtype in COLUMNS.items()}
    if strict and len({len(array) for array in arrays.values()}) > 1:
        raise ValueError("the columns differ in length")
    return Columns(arrays)


def _array(values: Sequence[float], dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.kind != "f":
        return np.array(values, dtype)
    exact = np.array(values, _EXACT)
    with np.errstate(over="ignore"):
        rounded = exact.astype(dtype)
    same = np.array_equal(rounded.astype(_EXACT).view(np.uint64), exact.view(np.uint64))
    return rounded if same else exact


def _without_columns(trajectory: Trajectory) -> Trajectory:
    nothing: dict[str, list[float]] = {name: [] for name in COLUMNS}
    segments = [segment.model_copy(update=nothing) for segment in trajectory.segments]
    return trajectory.model_copy(update={"segments": segments})
