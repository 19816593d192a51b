"""The settings of E2B's API, as this service offers it."""

from __future__ import annotations

from pydantic import Field

from rollout_service.settings.values import Hosts, Names, Section


class E2BApiSettings(Section):
    """E2B's API over the sandboxes of this node, for programs that use the package `e2b`. It has its own listener."""

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
    """The network of sandboxes: `none`, a list of hosts, or `full`, which includes this machine's own services."""
    max_sandboxes: int | None = Field(None, ge=1)
    """The most sandboxes of programs at once; more are refused. Left out, half of those that may be alive at once."""
    max_seconds: int = Field(86_400, ge=1)
    """The longest that a sandbox may live, from its creation on."""
    max_file_bytes: int = Field(512 * 1024 * 1024, ge=1_024)
    """The largest file that may be written or read, and the largest body with several of them."""
