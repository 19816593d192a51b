"""Which parts go into the next batch of a run: a window of whole groups within the limits. Pure functions.

Guarantees: in a batch no user and no session has more than its share, but each may have one group; tenants are not
mixed unless the run says so; the oldest parts go first. A window is whole, or there is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from api_schemas.runs.live import LiveDelivery
from rollout_service.live.contract import PartRecord, SessionRecord


@dataclass(frozen=True, slots=True)
class PartGroup:
    """What becomes one group of a run: a part, or the parts of sessions that worked on the same task."""

    parts: tuple[PartRecord, ...]
    sessions: tuple[SessionRecord, ...]
    """The sessions of these parts, as far as they are known here."""

    @property
    def users(self) -> frozenset[str]:
        """The users of the sessions."""
        return frozenset(session.user for session in self.sessions)

    @property
    def session_ids(self) -> frozenset[str]:
        """The ids of the sessions."""
        return frozenset(session.session_id for session in self.sessions)

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants of the sessions."""
        return frozenset(session.tenant for session in self.sessions)


def next_window(
    groups: Sequence[PartGroup], carried: Sequence[PartGroup], batch_size: int, order: LiveDelivery
) -> list[PartGroup] | None:
    """Return the groups that complete a batch; None if they do not suffice.

    `carried` are the groups that are in the batch already, and `groups` those to choose from, the oldest first.
    """
    size = batch_size - len(carried)
    for tenant in [None] if order.mix_tenants else _tenants(groups, carried):
        allowed = [group for group in groups if tenant is None or group.tenants == {tenant}]
        window = _choose(allowed, carried, size, batch_size, order)
        if len(window) == size:
            return window
    return None


def _tenants(groups: Sequence[PartGroup], carried: Sequence[PartGroup]) -> list[str]:
    """Return the tenants that may fill the batch, the one that has waited longest first."""
    begun = {tenant for group in carried for tenant in group.tenants}
    waiting = dict.fromkeys(tenant for group in groups for tenant in sorted(group.tenants))
    return [tenant for tenant in waiting if not begun or begun == {tenant}]


def _choose(
    groups: Sequence[PartGroup],
    carried: Sequence[PartGroup],
    size: int,
    batch_size: int,
    order: LiveDelivery,
) -> list[PartGroup]:
    of_user, of_session = (
        max(1, int(share * batch_size + 1e-9)) for share in (order.max_user_share, order.max_session_share)
    )
    users = Counter(user for group in carried for user in group.users)
    sessions = Counter(name for group in carried for name in group.session_ids)
    chosen: list[PartGroup] = []
    for group in groups:
        if len(chosen) == size:
            break
        is_over = any(users[user] >= of_user for user in group.users)
        if is_over or any(sessions[name] >= of_session for name in group.session_ids):
            continue
        users.update(group.users)
        sessions.update(group.session_ids)
        chosen.append(group)
    return chosen
