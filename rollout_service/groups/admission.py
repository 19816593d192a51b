"""Where a run stands, and how many groups it may and should begin: what the service and a simulation decide by.

Guarantees: no grant exceeds AReaL's admission formula; a group that ends without being kept gives its place back, and
so does one that is dropped later; after a restart at version v at most (eta + 1) * B groups are granted before the
trainer moves on. Nothing here is remembered: the same standing gives the same answer, so a crash changes none.

The formula (AReaL, arXiv 2505.24298, section 5.1, as its code has it):
capacity = min(max(1, max_concurrent) - running, (eta + version + 1) * B - (accepted + running)); it may be negative, as
when a limit was lowered. All counts are of groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollout_service.groups.acceptance import CONFIDENCE, AcceptanceRate, Progress, groups_to_begin


@dataclass(frozen=True, slots=True)
class Standing:
    """What a run asks for, and what it has."""

    batch_size: int
    max_concurrent: int
    eta: int | None
    """Versions that a batch's oldest token may lie behind the trainer; None does not look."""
    prefetch_batches: int
    """Batches made ahead of the one that is waited for."""
    version: int
    """How many versions the trainer has reached since the run began."""
    running: int = 0
    ready: int = 0
    """Kept, and not in a batch."""
    batched: int = 0
    """In a batch that is not acknowledged."""
    acknowledged: int = 0

    @property
    def accepted(self) -> int:
        """Groups kept since the run began.

        What was acknowledged counts as at least a batch for each version, so that a trainer that is at version v
        already, or skips versions, is not granted the groups of all of them at once.
        """
        return max(self.acknowledged, self.version * self.batch_size) + self.ready + self.batched


def admission_capacity(
    *, max_concurrent: int, batch_size: int, eta: int | None, version: int, accepted: int, running: int
) -> int:
    """The formula; without `eta` only concurrency limits."""
    free = max(1, max_concurrent) - running
    if eta is None:
        return free
    return min(free, (eta + version + 1) * batch_size - (accepted + running))


def admissible(run: Standing) -> int:
    """How many groups may begin; negative when there are more than may be."""
    return admission_capacity(
        max_concurrent=run.max_concurrent,
        batch_size=run.batch_size,
        eta=run.eta,
        version=run.version,
        accepted=run.accepted,
        running=run.running,
    )


def wanted(
    run: Standing,
    under_way: Mapping[Progress, int],
    acceptance: AcceptanceRate,
    *,
    confidence: float = CONFIDENCE,
) -> int:
    """How many groups should begin now: what is expected to be needed, as far as it is admissible; never negative."""
    needed = groups_to_begin(
        need=(1 + run.prefetch_batches) * run.batch_size - run.ready,
        under_way=under_way,
        acceptance=acceptance,
        confidence=confidence,
    )
    return max(0, min(needed, admissible(run)))


def too_old(oldest_version: int | None, *, version: int, eta: int | None) -> bool:
    """Whether a group whose oldest token has that version is older than a trainer at `version` may be given."""
    return eta is not None and oldest_version is not None and version - oldest_version > eta
