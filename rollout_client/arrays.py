"""A batch as arrays, mapped without a copy from bytes or from a file.

The bytes are a safetensors file. Its tensors, for G groups with N samples, S segments and T tokens in all:

| tensor | type, shape | contents |
|---|---|---|
| `group_offsets` | int64 [G + 1] | samples of group g: `[g], [g + 1]` |
| `sample_offsets` | int64 [N + 1] | segments of sample n; none for a sample without a trajectory |
| `segment_offsets` | int64 [S + 1] | tokens of segment s |
| `token_ids` `versions` `turn_ids` | int32 [T] | as in a trajectory's segment |
| `logprobs` | float32 [T] | |
| `loss_mask` | uint8 [T] | |
| `rewards` `advantages` | float32 [N] | NaN where there is none: a failure is never a zero |
| `usable` | uint8 [N] | whether the sample counts |

The header's metadata has `batch`: the JSON of the batch, whose segments hold no tokens.

Reading needs numpy (`pip install rollout-client[arrays]`); torch only for `torch`.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_client import _wire as wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

TYPES = {"I64": "<i8", "I32": "<i4", "F32": "<f4", "U8": "u1"}
_LENGTH = struct.Struct("<Q")


def require_numpy() -> None:
    """Raise an error if numpy is missing, before anything is leased or read for it.

    Raises:
        ImportError: NumPy is missing; the message has the command that installs it.
    """
    if find_spec("numpy") is None:
        raise ImportError("batches as arrays need numpy: pip install 'rollout-client[arrays]'")


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """A batch and its tensors by name; the arrays are read-only views of the bytes."""

    batch: wire.Batch
    tensors: Mapping[str, NDArray[Any]]

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview | mmap.mmap) -> BatchArrays:
        """Parse a response body. The arrays are views that keep it alive.

        Raises:
            ValueError: The body is not a batch.
            ImportError: NumPy is missing.
        """
        require_numpy()
        import numpy as np

        view = memoryview(data)
        header, start = _header(view)
        encoded = header.pop("__metadata__", {}).get("batch")
        if encoded is None:
            raise ValueError("the safetensors file does not hold a batch")
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            array = np.frombuffer(view[start + begin : start + end], TYPES[entry["dtype"]])
            array.flags.writeable = False
            tensors[name] = array.reshape(entry["shape"])
        return cls(wire.Batch.model_validate_json(encoded), tensors)

    @classmethod
    def from_file(cls, path: Path) -> BatchArrays:
        """Map a file into memory and parse it.

        Raises:
            ValueError: The file is not a batch.
            OSError: The file cannot be read.
        """
        with path.open("rb") as file:
            return cls.from_bytes(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def segment(self, number: int) -> dict[str, NDArray[Any]]:
        """Return the columns of one segment, as views."""
        begin, end = self.tensors["segment_offsets"][number : number + 2]
        names = ("token_ids", "loss_mask", "logprobs", "versions", "turn_ids")
        return {name: self.tensors[name][begin:end] for name in names}

    def torch(self) -> dict[str, Any]:
        """Return the tensors as torch tensors that share the memory; do not write to them."""
        import warnings

        import torch

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return {name: torch.from_numpy(array) for name, array in self.tensors.items()}


def _header(view: memoryview) -> tuple[dict[str, Any], int]:
    if len(view) < _LENGTH.size:
        raise ValueError("not a safetensors file: shorter than its length field")
    (length,) = _LENGTH.unpack_from(view)
    start = _LENGTH.size + length
    if start > len(view):
        raise ValueError("not a safetensors file: it ends within the header")
    header: dict[str, Any] = json.loads(bytes(view[_LENGTH.size : start]))
    return header, start
