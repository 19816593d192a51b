"""The token columns of a trajectory's segments, whatever form a store keeps them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rollout_service.store.codec.trajectories import CompressedColumn

COLUMNS: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "logprobs": np.dtype("<f4"),
    "versions": np.dtype("<i4"),
    "turn_ids": np.dtype("<i4"),
}
"""The columns of a segment and their types."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of one segment by name, all of the same length."""

    tokens: int
    columns: Mapping[str, CompressedColumn | NDArray[Any]]

    def __len__(self) -> int:
        return self.tokens

    def array(self, name: str) -> NDArray[Any]:
        """Return one column; it is unpacked anew on each call."""
        column = self.columns[name]
        return column if isinstance(column, np.ndarray) else column.array()

    def fill(self, name: str, target: NDArray[Any]) -> None:
        """Unpack one column into an array of this length, whose type may be narrower."""
        column = self.columns[name]
        if isinstance(column, np.ndarray):
            cast_into(column, target)
        else:
            column.fill(target)

    def without(self, name: str) -> Columns:
        """Return the other columns, so that the memory of this one can be freed."""
        others = {other: column for other, column in self.columns.items() if other != name}
        kept = {
            other: column if isinstance(column, np.ndarray) else column.detached()
            for other, column in others.items()
        }
        return Columns(self.tokens, kept)


def cast_into(values: NDArray[Any], target: NDArray[Any]) -> None:
    """Copy numbers into an array, rounded to its type."""
    with np.errstate(over="ignore"):
        target[:] = values
