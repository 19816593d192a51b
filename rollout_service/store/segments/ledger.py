"""The contract of the ledger, which counts the references to each segment file in the store that services share.

A file is registered before it exists. While it is open, its writer's records may be referenced. Once it is sealed, no
reference to it is accepted any more, and when the last one is dropped, it is garbage: it may be deleted.

References are counted by the store's own functions, in the step that writes or deletes the record that contains them:
that step is refused for a file that is not open. So a service that was taken for dead cannot refer to a file that has
been deleted in the meantime.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SegmentTotals:
    """What is held in segment files."""

    files: int
    """Files that are open or referenced."""
    records: int
    """Records that are referenced."""
    bytes: int
    """The length of these records; the files are larger by what was dropped from them."""
    garbage: int
    """Files that are yet to be deleted."""


class SegmentLedger(Protocol):
    """The segment files of a store.

    Raises:
        StoreError: The store fails; every method can raise it.
    """

    async def store_id(self) -> str:
        """Return the random id of this store, the same for all services."""
        ...

    async def mark(self, proposal: str | None) -> str | None:
        """Return the mark of the shared folder; if there is none yet, it becomes the proposal."""
        ...

    async def register(self, file: str, owner: str) -> None:
        """Open a file that this owner will write."""
        ...

    async def seal(self, files: Collection[str]) -> None:
        """Accept no more references to these files; idempotent."""
        ...

    async def orphans(self) -> Sequence[str]:
        """Return the open files whose owner is not a member of the cluster: it has left, or was declared dead."""
        ...

    async def garbage(self, limit: int) -> Sequence[str]:
        """Return up to this many sealed files without references."""
        ...

    async def forget(self, files: Collection[str]) -> None:
        """Remove garbage from the ledger once it is deleted."""
        ...

    async def unknown(self, files: Collection[str]) -> Sequence[str]:
        """Return those of the files that are neither open, nor referenced, nor garbage."""
        ...

    async def totals(self) -> SegmentTotals:
        """Return what is held."""
        ...
