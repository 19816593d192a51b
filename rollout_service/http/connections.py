"""Limits on connections to the API, so that the service itself never runs out of file descriptors.

Connections take at most half of the process's descriptors. A peer that has not sent a request with a key takes no slot
from those that have. When the slots for such peers are full, the address that holds most of them loses its oldest
connection, so a flood displaces itself and a new client always gets in. An admitted connection that is busy is never
closed for another.
"""

from __future__ import annotations

import ipaddress
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollout_service.base.errors import ConfigurationError
from sandboxes.limits.cgroups import raise_open_files

IPV6_NETWORK_BITS = 64
"""IPv6 peers are counted by prefix: whoever has one address usually has all that share it."""
MAX_PENDING = 512
MAX_ADMITTED = 10_000
DESCRIPTOR_SHARE = 0.5
PENDING_SHARE = 0.25
UNLIMITED_DESCRIPTORS = 1_000_000
"""Assumed when there is no limit."""


class EvictionReason(StrEnum):
    PENDING = "too_many_unauthenticated"
    IDLE = "too_many_connections"


Evict = Callable[[EvictionReason], None]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    admitted: int
    """Connections that have sent a request with a key, or any request to a server without keys."""
    pending: int

    @classmethod
    def within(cls, descriptors: int, max_connections: int | None = None) -> ConnectionLimits:
        """
        Raises:
            ConfigurationError: `max_connections` would leave too few descriptors for the service itself.
        """
        share = int(descriptors * DESCRIPTOR_SHARE)
        pending = max(1, min(MAX_PENDING, int(share * PENDING_SHARE)))
        room = max(1, share - pending)
        if max_connections is not None and max_connections > room:
            raise ConfigurationError(
                f"http.max_connections is {max_connections}, but {descriptors} file descriptors allow only {room}",
                hint=f"Lower it, or run `ulimit -n {4 * max_connections}` before you start the service.",
            )
        return cls(admitted=max_connections or min(MAX_ADMITTED, room), pending=pending)


def descriptor_limit() -> int:
    """Raise the soft limit to the hard limit, and return it."""
    raise_open_files()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


class ConnectionSlot:
    """The slot of one connection; `release` is idempotent."""

    __slots__ = ("_connections", "admitted", "evict", "peer")

    def __init__(self, connections: Connections, peer: str, evict: Evict) -> None:
        self._connections = connections
        self.peer = peer
        self.evict = evict
        self.admitted = False

    def admit(self) -> bool:
        """Count the connection as admitted from now on; return False if there is no slot."""
        return self.admitted or self._connections.admit(self)

    def mark_idle(self) -> None:
        """Mark the connection as idle: it may be closed when another needs its slot."""
        self._connections.mark_idle(self)

    def mark_busy(self) -> None:
        self._connections.mark_busy(self)

    def release(self) -> None:
        self._connections.release(self)


class Connections:
    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._pending: dict[str, dict[ConnectionSlot, None]] = {}
        self._pending_count = 0
        self._admitted: set[ConnectionSlot] = set()
        self._idle: dict[ConnectionSlot, None] = {}

    def counts(self) -> dict[str, int]:
        idle = len(self._idle)
        return {"pending": self._pending_count, "idle": idle, "busy": len(self._admitted) - idle}

    def add(self, address: str, evict: Evict) -> ConnectionSlot:
        """Give a new connection a slot; `evict` is called if it must make room for another."""
        if self._pending_count >= self.limits.pending:
            peers = max(self._pending.values(), key=len)
            self._evict(next(iter(peers)), EvictionReason.PENDING)
        slot = ConnectionSlot(self, network_of(address), evict)
        self._pending.setdefault(slot.peer, {})[slot] = None
        self._pending_count += 1
        return slot

    def admit(self, slot: ConnectionSlot) -> bool:
        """Close the longest idle connection if no slot is free; return False if all are busy."""
        if len(self._admitted) >= self.limits.admitted:
            if not self._idle:
                return False
            self._evict(next(iter(self._idle)), EvictionReason.IDLE)
        if self._remove_pending(slot):
            slot.admitted = True
            self._admitted.add(slot)
        return True

    def mark_idle(self, slot: ConnectionSlot) -> None:
        if slot in self._admitted:
            self._idle[slot] = None

    def mark_busy(self, slot: ConnectionSlot) -> None:
        self._idle.pop(slot, None)

    def release(self, slot: ConnectionSlot) -> None:
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
    """Return the IPv4 address, or the network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, IPV6_NETWORK_BITS), strict=False))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def find_slot(scope: Mapping[str, Any]) -> ConnectionSlot | None:
    """Return None outside the server, as in tests."""
    slot = scope.get("state", {}).get("slot")
    return slot if isinstance(slot, ConnectionSlot) else None
