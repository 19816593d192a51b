"""How many groups a run may start, and how many it should: the rules of the service and of its simulation.

Guarantees: no grant exceeds AReaL's admission formula. A group that ends without being kept frees its place, and so
does a group that is dropped later. After a restart at version v, at most (max_staleness + 1) * B groups are granted
before the trainer moves on. The functions remember nothing: equal states give equal answers, so a crash changes none.

The formula (AReaL, arXiv 2505.24298, section 5.1, as in its code; all counts are of groups, B is the batch size):
capacity = min(max(1, max_concurrent) - running, (max_staleness + version + 1) * B - (accepted + running)). It may be
negative, for example after a limit was lowered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollout_service.groups.acceptance import CONFIDENCE, AcceptanceRate, GroupProgress, groups_needed


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """A run's limits and its groups by state."""

    batch_size: int
    max_concurrent: int
    max_staleness: int | None
    """How many versions a batch's oldest token may lag behind the trainer; None sets no limit."""
    prefetch_batches: int
    """Batches to prepare ahead of the one that is waited for."""
    version: int
    """How many versions the trainer has advanced since the run began."""
    running: int = 0
    ready: int = 0
    """Kept and not yet in a batch."""
    batched: int = 0
    """In a batch that is not acknowledged yet."""
    acknowledged: int = 0

    @property
    def accepted(self) -> int:
        """Groups kept since the run began.

        Acknowledged groups count as at least one batch per version. Otherwise a trainer that starts at a later
        version, or skips versions, would be granted the groups of all of them at once.
        """
        return max(self.acknowledged, self.version * self.batch_size) + self.ready + self.batched


def admission_capacity(run: AdmissionState) -> int:
    """Return how many groups may start by AReaL's formula; without `max_staleness`, only concurrency limits them."""
    free = max(1, run.max_concurrent) - run.running
    if run.max_staleness is None:
        return free
    allowed = (run.max_staleness + run.version + 1) * run.batch_size
    return min(free, allowed - (run.accepted + run.running))


def groups_to_start(
    run: AdmissionState,
    under_way: Mapping[GroupProgress, int],
    acceptance: AcceptanceRate,
    *,
    confidence: float = CONFIDENCE,
) -> int:
    """Return how many groups to start now: those expected to be needed, within the capacity; never negative."""
    needed = groups_needed(
        need=(1 + run.prefetch_batches) * run.batch_size - run.ready,
        under_way=under_way,
        acceptance=acceptance,
        confidence=confidence,
    )
    return max(0, min(needed, admission_capacity(run)))


def oldest_allowed_version(*, version: int, max_staleness: int | None) -> int | None:
    """Return the oldest version a token may have for a trainer at `version`; None if there is no limit."""
    return None if max_staleness is None else version - max_staleness


def is_too_old(oldest_version: int | None, *, version: int, max_staleness: int | None) -> bool:
    """Return whether tokens of `oldest_version` are too old for a trainer at `version`."""
    oldest_allowed = oldest_allowed_version(version=version, max_staleness=max_staleness)
    return oldest_allowed is not None and oldest_version is not None and oldest_version < oldest_allowed
