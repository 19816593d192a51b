"""The settings of E2B's API, as this service offers it."""

from __future__ import annotations

from pydantic import Field

from rollout_service.settings.values import Hosts, Names, Section


class E2BApiSettings(Section):
    """E2B's API over the sandboxes of this node, for programs that use the package `e2b`. It has a listener of its
    own, and the keys of the service; `read` is not enough."""

    enabled: bool = False
    """Whether the API is offered. The package `e2b` must be installed."""
    host: str = "127.0.0.1"
    """The address to listen on; an address beyond loopback requires `keys`."""
    port: int = Field(8090, ge=0, le=65_535)
    """The port to listen on; 0 picks a free one, which the log names."""
    images: Names = ["base"]
    """The images that programs may name as templates. `*` stands for any characters, such as in
    `docker://python:*`; paths of this machine are never allowed."""
    network: Hosts = "none"
    """The network of sandboxes: `none`, a list of hosts, or `full`, which includes this machine's own services. A
    program that asks for less gets none."""
    max_sandboxes: int | None = Field(None, ge=1)
    """The most sandboxes of programs at once; more are refused with 429. Left out, half of the sandboxes that may be
    alive at once. Rollouts always have at least one place beside them."""
    max_seconds: int = Field(86_400, ge=1)
    """The longest time that a sandbox may live, from its creation on."""
    max_file_bytes: int = Field(512 * 1024 * 1024, ge=1_024)
    """The largest file that may be written or read, and the largest body with several of them."""
    max_bytes_in_flight: int = Field(64 * 1024 * 1024, ge=1_024)
    """The most bytes of other bodies that are received at once, of one key at most as many as are left for all
    others."""
    body_seconds: float = Field(60.0, gt=0)
    """How long a program may take to send a body; every 16 KiB received extend it by a second."""
    write_seconds: float = Field(120.0, gt=0)
    """How long a program may leave its answer unread."""
