"""Who may hold a connection to the API, so that the service itself never runs out of descriptors.

Guarantees: connections take at most half of the descriptors that the process may open; a peer that has not sent a
request with a key takes no place from those that have; when the places for such peers are full, the address that holds
most of them loses its oldest, so a flood displaces itself and a new caller always gets in; an admitted connection that
is at work is never closed for another.
"""

from __future__ import annotations

import ipaddress
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollout_service.errors import ConfigurationError
from sandboxes.limits.cgroups import raise_open_files

IPV6_NETWORK_BITS = 64
"""Whoever has one address of version 6 usually has all that share these bits."""
MAX_PENDING = 512
MAX_ADMITTED = 10_000
DESCRIPTOR_SHARE = 0.5
PENDING_SHARE = 0.25
UNLIMITED_DESCRIPTORS = 1_000_000
"""Descriptors to reckon with where there is no limit."""


class EvictionReason(StrEnum):
    """Why a connection is closed for another."""

    PENDING = "too_many_unauthenticated"
    IDLE = "too_many_connections"


Evict = Callable[[EvictionReason], None]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections there may be."""

    admitted: int
    """Connections that have sent a request with a key, or any request to a server without keys."""
    pending: int
    """Connections that have not."""

    @classmethod
    def within(cls, descriptors: int, max_connections: int | None = None) -> ConnectionLimits:
        """Return the limits for a process that may open this many descriptors.

        Raises ConfigurationError when `max_connections` leaves too few for the service itself.
        """
        share = int(descriptors * DESCRIPTOR_SHARE)
        pending = max(1, min(MAX_PENDING, int(share * PENDING_SHARE)))
        room = max(1, share - pending)
        if max_connections is not None and max_connections > room:
            raise ConfigurationError(
                f"http.max_connections is {max_connections}, and {descriptors} file descriptors are enough for {room}",
                hint=f"Lower it, or raise the limit with `ulimit -n {4 * max_connections}` before the start.",
            )
        return cls(admitted=max_connections or min(MAX_ADMITTED, room), pending=pending)


def descriptor_limit() -> int:
    """Return how many descriptors this process may open, which is as many as its hard limit allows."""
    raise_open_files()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


class ConnectionSlot:
    """The place of one connection; give it up with `release`, which is idempotent."""

    __slots__ = ("_connections", "admitted", "evict", "peer")

    def __init__(self, connections: Connections, peer: str, evict: Evict) -> None:
        self._connections = connections
        self.peer = peer
        self.evict = evict
        self.admitted = False

    def admit(self) -> bool:
        """Count the connection among the admitted ones from now on; False when there is no place."""
        return self.admitted or self._connections.admit(self)

    def mark_idle(self) -> None:
        """Mark the connection as idle: it may be closed when another needs the place."""
        self._connections.mark_idle(self)

    def mark_busy(self) -> None:
        """Mark the connection as busy."""
        self._connections.mark_busy(self)

    def release(self) -> None:
        """Give the place up."""
        self._connections.release(self)


class Connections:
    """The open connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._pending: dict[str, dict[ConnectionSlot, None]] = {}
        self._pending_count = 0
        self._admitted: set[ConnectionSlot] = set()
        self._idle: dict[ConnectionSlot, None] = {}

    def counts(self) -> dict[str, int]:
        """Return how many connections are in each state."""
        idle = len(self._idle)
        return {"pending": self._pending_count, "idle": idle, "busy": len(self._admitted) - idle}

    def add(self, address: str, evict: Evict) -> ConnectionSlot:
        """Give a new connection a slot; `evict` is called when it has to make room."""
        if self._pending_count >= self.limits.pending:
            peers = max(self._pending.values(), key=len)
            self._evict(next(iter(peers)), EvictionReason.PENDING)
        slot = ConnectionSlot(self, network_of(address), evict)
        self._pending.setdefault(slot.peer, {})[slot] = None
        self._pending_count += 1
        return slot

    def admit(self, slot: ConnectionSlot) -> bool:
        """Move a connection to the admitted ones, in place of an idle one where there is no other."""
        if len(self._admitted) >= self.limits.admitted:
            if not self._idle:
                return False
            self._evict(next(iter(self._idle)), EvictionReason.IDLE)
        if self._remove_pending(slot):
            slot.admitted = True
            self._admitted.add(slot)
        return True

    def mark_idle(self, slot: ConnectionSlot) -> None:
        """Note that an admitted connection has nothing to do."""
        if slot in self._admitted:
            self._idle[slot] = None

    def mark_busy(self, slot: ConnectionSlot) -> None:
        """Note that a connection has something to do."""
        self._idle.pop(slot, None)

    def release(self, slot: ConnectionSlot) -> None:
        """Forget a connection."""
        self._remove_pending(slot)
        self._admitted.discard(slot)
        self._idle.pop(slot, None)

    def _evict(self, slot: ConnectionSlot, reason: EvictionReason) -> None:
        self.release(slot)
        slot.evict(reason)

    def _remove_pending(self, slot: ConnectionSlot) -> bool:
        peers = self._pending.get(slot.peer, {})
        if slot not in peers:
            return False
        del peers[slot]
        self._pending_count -= 1
        if not peers:
            del self._pending[slot.peer]
        return True


def network_of(address: str) -> str:
    """Return what one peer is counted by: an address of version 4, or the network of one of version 6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, IPV6_NETWORK_BITS), strict=False))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def find_slot(scope: Mapping[str, Any]) -> ConnectionSlot | None:
    """Return the place of the connection that a request came over; None outside of the server, as in tests."""
    slot = scope.get("state", {}).get("slot")
    return slot if isinstance(slot, ConnectionSlot) else None
