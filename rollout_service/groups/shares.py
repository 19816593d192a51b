"""Whose samples a batch has: the shares of users and sessions, and tenants that are not mixed. Pure functions.

In a batch no user and no session has more than its share, but each may have one group; tenants are not mixed unless the
order says so; the oldest groups go first. Whatever becomes of single groups, such as a deletion, the next batch is made
of those that are left by the same rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from api_schemas.runs.live import LiveDelivery


@dataclass(frozen=True, slots=True)
class Owner:
    session: str
    user: str
    """The hash of a user of the tenant."""
    tenant: str


class Owned(Protocol):
    """A group, or a future one."""

    @property
    def owners(self) -> Collection[Owner]:
        """The owners of its samples, as far as they are known."""


G = TypeVar("G", bound=Owned)


def next_batch(groups: Sequence[G], size: int, order: LiveDelivery, *, is_last: bool = False) -> list[G]:
    """Return the groups of the next batch, none if they do not fill it; with `is_last`, as many as may be together."""
    chosen = [complete(same, [], size, order) for same in apart(groups, order)]
    full = (one for one in chosen if len(one) == size)
    return next(full, chosen[0] if chosen and is_last else [])


def left_over(groups: Sequence[G], size: int, order: LiveDelivery) -> list[G]:
    """Return the groups that fill no batch without others, tenant by tenant if these are apart."""
    left: list[G] = []
    for same in apart(groups, order):
        while len(batch := complete(same, [], size, order)) == size:
            taken = set(map(id, batch))
            same = [group for group in same if id(group) not in taken]
        left += same
    return left


def next_window(groups: Sequence[G], waiting: Sequence[Owned], size: int, order: LiveDelivery) -> list[G] | None:
    """Return the groups that complete a batch with some of those waiting; None if they do not suffice."""
    left = left_over(waiting, size, order)
    for same in apart(groups, order):
        begun = complete([one for one in left if _may_join(one, same[0], order)], [], size, order)
        window = complete(same, begun, size, order)
        if len(begun) + len(window) == size:
            return window
    return None


def apart(groups: Sequence[G], order: LiveDelivery) -> list[list[G]]:
    """Divide groups into lists that may be in one batch each, the one that has waited longest first."""
    if order.mix_tenants:
        return [list(groups)] if groups else []
    by_tenant: dict[frozenset[str], list[G]] = {}
    for group in groups:
        by_tenant.setdefault(_tenants(group), []).append(group)
    return list(by_tenant.values())


def complete(groups: Sequence[G], begun: Sequence[Owned], size: int, order: LiveDelivery) -> list[G]:
    """Return the oldest groups that, with those that have begun it, are a batch of this size; fewer if some lack."""
    of_user, of_session = (
        max(1, int(share * size + 1e-9)) for share in (order.max_user_share, order.max_session_share)
    )
    users = Counter(user for group in begun for user in _users(group))
    sessions = Counter(session for group in begun for session in _sessions(group))
    chosen: list[G] = []
    for group in groups:
        if len(begun) + len(chosen) == size:
            break
        is_over = any(users[user] >= of_user for user in _users(group))
        if is_over or any(sessions[session] >= of_session for session in _sessions(group)):
            continue
        users.update(_users(group))
        sessions.update(_sessions(group))
        chosen.append(group)
    return chosen


def _may_join(one: Owned, other: Owned, order: LiveDelivery) -> bool:
    return order.mix_tenants or _tenants(one) == _tenants(other)


def _tenants(group: Owned) -> frozenset[str]:
    return frozenset(owner.tenant for owner in group.owners)


def _users(group: Owned) -> frozenset[str]:
    return frozenset(owner.user for owner in group.owners)


def _sessions(group: Owned) -> frozenset[str]:
    return frozenset(owner.session for owner in group.owners)
