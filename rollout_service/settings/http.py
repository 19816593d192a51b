"""The settings of connections to the API."""

from __future__ import annotations

from pydantic import Field

from rollout_service.settings.values import Section


class HttpSettings(Section):
    """Limits on connections to the API."""

    max_head_bytes: int = Field(32 * 1024, ge=1_024)
    """The largest request line and headers."""
    head_seconds: float = Field(10.0, gt=0)
    """How long a peer may take to send a request's head, or to complete the TLS handshake."""
    body_seconds: float = Field(30.0, gt=0)
    """How long a peer may take to send a body; every 16 KiB received extend it by a second."""
    max_bytes_in_flight: int = Field(256 * 1024 * 1024, ge=1_024)
    """The most bytes of bodies that are received at once; of one key at most as many as are left for all others. A body
    waits for room for up to 10 s, and then gets a 429."""
    keep_alive_seconds: int = Field(20, ge=1)
    """How long a connection may be idle between two requests."""
    write_seconds: float = Field(120.0, gt=0)
    """How long a peer may leave its response unread."""
    max_connections: int | None = Field(None, ge=1)
    """The most open connections that have sent a valid key. Left out, 10,000, or fewer if the limit on open files is
    low: all connections take at most half of it."""
