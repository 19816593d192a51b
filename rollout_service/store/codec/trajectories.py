"""Stored trajectories: compressed columns of numbers, with the rest as JSON before them.

Reading returns the trajectory that was written, to the last bit. Log-probabilities are stored as float32 if each of
them is exactly a float32, else as float64. A trajectory that does not fit the columns is stored as compressed JSON. A
column is unpacked only when it is needed, so a batch can be sent without being in memory as a whole.

Layout: the byte 1, the header's length (uint32, little-endian), the header (compressed JSON), then the compressed bytes
of every column of every segment. The header contains their lengths and each segment's number of tokens. The functions
that read take the record of a rollout too, and return the part of the rollout's own trajectory (`codec.record`).
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from api_schemas.trajectories import Segment, Trajectory
from rollout_service.store.codec.record import own_part

_EXACT: np.dtype[Any] = np.dtype("<f8")
_COLUMNAR = b"\x01"
_LENGTH = struct.Struct("<I")
_LEVEL = 1
"""Token ids and log-probabilities gain little from a higher level."""

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class CompressedColumn:
    dtype: np.dtype[Any]
    data: memoryview

    def array(self) -> NDArray[Any]:
        """Return the numbers; slow for long columns, so call it in a thread."""
        return np.frombuffer(_unpack(self.data), self.dtype)

    def fill(self, target: NDArray[Any]) -> None:
        """Unpack into an array of the same length, without a copy if the types are the same."""
        if target.dtype == self.dtype and len(target):
            _unpack_into(self.data, target.data.cast("B"))
        else:
            cast_into(self.array(), target)

    def is_frame_of(self, dtype: np.dtype[Any], length: int) -> bool:
        return dtype == self.dtype and zstandard.frame_content_size(self.data) == length * dtype.itemsize

    def detached(self) -> CompressedColumn:
        """Copy the column, so that the memory that it shares can be freed."""
        shared = self.data.nbytes < memoryview(self.data.obj).nbytes
        return replace(self, data=memoryview(bytes(self.data))) if shared else self


def encode(trajectory: Trajectory) -> bytes:
    try:
        columns = [_arrays(segment) for segment in (*trajectory.segments, *trajectory.untrained)]
    except (OverflowError, ValueError):
        return compress(trajectory.model_dump_json().encode())
    blocks: list[bytes] = []
    layout = []
    for arrays in columns:
        packed = {name: pack(array) for name, array in arrays.items()}
        blocks += packed.values()
        sizes = {name: [arrays[name].dtype.str, len(data)] for name, data in packed.items()}
        layout.append({"tokens": len(arrays["token_ids"]), "columns": sizes})
    rest = _without_columns(trajectory).model_dump(mode="json")
    header = compress(json.dumps({"layout": layout, "rest": rest}).encode())
    return b"".join([_COLUMNAR, _LENGTH.pack(len(header)), header, *blocks])


def compress(data: bytes | memoryview) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def pack(array: NDArray[Any]) -> bytes:
    return compress(array.data.cast("B") if len(array) else b"")


def decode(data: bytes) -> Trajectory:
    data = own_part(data)
    if not data.startswith(_COLUMNAR):
        return Trajectory.model_validate_json(_unpack(data))
    rest, columns = _located(data)
    trajectory = Trajectory.model_validate(rest)
    segments = [
        segment.model_copy(update={name: one.array(name).tolist() for name in one.columns})
        for segment, one in zip((*trajectory.segments, *trajectory.untrained), columns, strict=True)
    ]
    trained = len(trajectory.segments)
    return trajectory.model_copy(update={"segments": segments[:trained], "untrained": segments[trained:]})


def split(data: bytes) -> tuple[Trajectory, list[Columns]]:
    """Return a trajectory with empty columns, and the columns of each segment that may be trained on.

    Raises:
        OverflowError: The trajectory does not fit the columns; use `decode`.
    """
    data = own_part(data)
    if not data.startswith(_COLUMNAR):
        whole = Trajectory.model_validate_json(_unpack(data))
        columns = [Columns(len(s.token_ids), _arrays(s, strict=False)) for s in whole.segments]
        return _without_columns(whole), columns
    rest, columns = _located(data)
    return Trajectory.model_validate(rest), columns[: len(rest["segments"])]


def columns_of(data: bytes) -> list[Columns]:
    """Return the columns of each segment that may be trained on.

    Raises:
        OverflowError: The trajectory does not fit the columns; use `decode`.
    """
    data = own_part(data)
    if not data.startswith(_COLUMNAR):
        return split(data)[1]
    rest, columns = _located(data)
    return columns[: len(rest["segments"])]


def _located(data: bytes) -> tuple[Any, list[Columns]]:
    """Return the JSON part, and the compressed columns of all segments, those to train on first."""
    view = memoryview(data)
    (length,) = _LENGTH.unpack_from(view, 1)
    at = 1 + _LENGTH.size
    header = json.loads(_unpack(view[at : at + length]))
    at += length
    segments = []
    for layout in header["layout"]:
        packed: dict[str, CompressedColumn] = {}
        for name, (dtype, size) in layout["columns"].items():
            packed[name] = CompressedColumn(np.dtype(dtype), view[at : at + size])
            at += size
        segments.append(Columns(layout["tokens"], packed))
    return header["rest"], segments


class _Decompressors(threading.local):
    """One decompressor per thread, since creating one costs as much as unpacking a small column."""

    def __init__(self) -> None:
        self.own = zstandard.ZstdDecompressor()


_decompressors = _Decompressors()


def _unpack(data: bytes | memoryview) -> bytes:
    return _decompressors.own.decompress(data)


def _unpack_into(data: memoryview, target: memoryview) -> None:
    with _decompressors.own.stream_reader(data) as reader:
        if reader.readinto(target) != len(target) or reader.read(1):
            raise ValueError(f"a column does not have the expected {len(target)} bytes")


def _arrays(segment: Segment, *, strict: bool = True) -> dict[str, NDArray[Any]]:
    arrays = {name: _array(getattr(segment, name), dtype) for name, dtype in COLUMNS.items()}
    if strict and len({len(array) for array in arrays.values()}) > 1:
        raise ValueError("the columns differ in length")
    return arrays


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
    without = {
        name: [segment.model_copy(update=nothing) for segment in segments]
        for name, segments in (("segments", trajectory.segments), ("untrained", trajectory.untrained))
    }
    return trajectory.model_copy(update=without)


COLUMNS: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "logprobs": np.dtype("<f4"),
    "versions": np.dtype("<i4"),
    "turn_ids": np.dtype("<i4"),
}


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of one segment by name, all of them with `tokens` entries."""

    tokens: int
    columns: Mapping[str, CompressedColumn | NDArray[Any]]

    def __len__(self) -> int:
        return self.tokens

    def array(self, name: str) -> NDArray[Any]:
        """Unpack the column anew on each call."""
        column = self.columns[name]
        return column if isinstance(column, np.ndarray) else column.array()

    def fill(self, name: str, target: NDArray[Any]) -> None:
        """Unpack a column into an array of this length, whose type may be narrower."""
        column = self.columns[name]
        if isinstance(column, np.ndarray):
            cast_into(column, target)
        else:
            column.fill(target)

    def frame(self, name: str, dtype: np.dtype[Any]) -> bytes | memoryview:
        """Return a frame of zstd, of a type that may be narrower; the stored one if it has this type.

        Raises:
            ValueError: The column has another length.
        """
        column = self.columns[name]
        if isinstance(column, CompressedColumn) and column.is_frame_of(dtype, self.tokens):
            return column.data
        values = np.empty(self.tokens, dtype)
        self.fill(name, values)
        return pack(values)

    def without(self, name: str) -> Columns:
        """Return the other columns, so that the memory of this one can be freed."""
        others = {other: column for other, column in self.columns.items() if other != name}
        kept = {
            other: column if isinstance(column, np.ndarray) else column.detached() for other, column in others.items()
        }
        return Columns(self.tokens, kept)


def cast_into(values: NDArray[Any], target: NDArray[Any]) -> None:
    """Copy numbers into an array, rounded to its type."""
    with np.errstate(over="ignore"):
        target[:] = values
