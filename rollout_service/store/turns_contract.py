"""The contract of saved turns: what a leased rollout has sampled, so that its next lease can continue from there.

Guarantees:
- Only the holder of the current lease can save turns.
- The turns of a rollout have the numbers 0, 1, 2, ... without a gap: a turn whose predecessor is missing is not saved.
- Saved turns outlive the lease, whatever ended it, until the rollout ends, fails an attempt, or is restarted; they are
  deleted in the transaction that writes this.

The store does not look into a turn's data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class UnsavedTurn:
    """One turn of a leased rollout, ready to be saved."""

    rollout_id: str
    token: int
    """The token of the lease under which the turn was made."""
    number: int
    """The turn's number in its rollout, from 0."""
    data: bytes


class TurnStore(Protocol):
    """The saved turns of rollouts that have not ended.

    Raises:
        StoreError: The store fails; every method can raise it.
    """

    async def save_turns(self, owner: str, turns: Sequence[UnsavedTurn]) -> int:
        """Make turns of any rollouts durable; return how many were saved.

        The others have lost their lease, have a gap before them, or are saved already.
        """
        ...

    async def saved_turns(self, rollout_id: str) -> list[bytes]:
        """Return the data of a rollout's saved turns, in order; empty if there are none."""
        ...
