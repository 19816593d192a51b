"""The contract of stored steps: what the attempts at a rollout did and waited for, once each has ended.

Guarantees:
- The steps of a rollout are deleted with it, and what it contains is erased with them; none is stored afterward.
- An attempt may end and be stored in any way: one that was handed back or that lost its lease has steps, too.
- A rollout keeps those of its first `MAX_RECORDS` attempts.

The store does not look into an attempt's data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_RECORDS = 64
"""The most attempts whose steps a rollout keeps: more than can fail, and few of what may be handed back."""


@dataclass(frozen=True, slots=True)
class EncodedSteps:
    """The steps of one attempt, ready to be stored."""

    rollout_id: str
    data: bytes


class StepStore(Protocol):
    """The steps of attempts that have ended.

    Raises:
        StoreError: The store fails; every method can raise it.
    """

    async def save_steps(self, attempts: Sequence[EncodedSteps]) -> int:
        """Store the steps of attempts, after those of earlier ones; return how many were stored.

        The others are of rollouts that were deleted or erased, or that have enough.
        """
        ...

    async def saved_steps(self, rollout_ids: Sequence[str]) -> Mapping[str, list[bytes]]:
        """Return what is stored of these rollouts, in the order in which it was; those without any are left out."""
        ...
