"""Parts of sessions as groups of a run: those that become one group, until they are one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_service.groups.shares import Owner
from rollout_service.live.contract import PartRecord, SessionRecord


@dataclass(frozen=True, slots=True)
class PartGroup:
    """What becomes one group of a run: a part, or the parts of sessions that worked on the same task."""

    parts: Sequence[PartRecord]
    sessions: Sequence[SessionRecord]
    """The sessions of these parts, in this order."""

    @property
    def owners(self) -> list[Owner]:
        """The owners of its samples."""
        return [Owner(one.session_id, one.user, one.tenant) for one in self.sessions]
