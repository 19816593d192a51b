"""The settings of connections to the API, of the gateway, and of E2B's API."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollout_service.settings.values import Hosts, Names, Section


class HttpSettings(Section):
    """Limits on connections to the API."""

    max_head_bytes: int = Field(32 * 1024, ge=1_024)
    """The largest request line and headers."""
    head_seconds: float = Field(10.0, gt=0)
    """How long a peer may take to send a request's head, or to complete the TLS handshake."""
    body_seconds: float = Field(30.0, gt=0)
    """How long a peer may take to send a body; every 16 KiB received extend it by a second."""
    max_bytes_in_flight: int = Field(256 * 1024 * 1024, ge=1_024)
    """The most bytes of bodies that are received or parsed at once; of one key at most as many as are left for all
    others. A body waits for room for up to 10 s, and then gets a 429."""
    keep_alive_seconds: int = Field(20, ge=1)
    """How long a connection may be idle between two requests."""
    write_seconds: float = Field(120.0, gt=0)
    """How long a peer may leave its response unread."""
    max_connections: int | None = Field(None, ge=1)
    """The most open connections that have sent a valid key. Left out, 10,000, or fewer if the limit on open files is
    low: all connections take at most half of it."""


class GatewaySettings(Section):
    """The model APIs through which agents of any kind drive the policy. They have a listener and keys of their own."""

    host: str = "127.0.0.1"
    """The address to listen on. Each rollout has a key, so it may be one beyond loopback."""
    port: int = Field(0, ge=0, le=65_535)
    """The port to listen on; 0 picks a free one, which rollouts get in their URL."""
    public_url: str | None = Field(None, pattern="^https?://[^/]+(/.*)?$")
    """The URL at which programs on other machines reach the gateway, such as that of a proxy in front of it. Left out,
    made of `host` and `port`."""
    unknown_model: Literal["serve", "refuse"] = "serve"
    """The answer to a program that asks for a model other than the policy: the policy's own, or an error."""
    obey_sampling: bool = False
    """Whether temperature, `top_p`, `top_k` and `min_p` of a program's requests count; otherwise, the rollout's do."""
    keep_alive_seconds: float = Field(15.0, gt=0, le=100)
    """How long an answer may be silent before its client is sent a sign of life."""
    retry_seconds: float = Field(60.0, ge=0)
    """How long an answer is kept for a client that went away before its end, and may repeat its request."""
    max_body_bytes: int = Field(32 * 1024 * 1024, ge=1_024)
    """The largest request body."""
    max_answers: int = Field(32, ge=1)
    """The most answers that one request may ask for, as `n` or `candidateCount`."""
    max_messages: int = Field(10_000, ge=1)
    """The most messages of one request; each tool call, and each result of one, counts as one more."""
    max_tools: int = Field(1_024, ge=1)
    """The most tools of one request."""
    max_stops: int = Field(16, ge=1)
    """The most stop strings of one request."""
    max_bytes_in_flight: int = Field(256 * 1024 * 1024, ge=1_024)
    """The most bytes of bodies that are read, or whose prompts are made, at once; of one key at most as many as are
    left for all others. A body waits for room for up to 10 s, and then gets a 429."""
    body_seconds: float = Field(60.0, gt=0)
    """How long a program may take to send a body; every 16 KiB received extend it by a second."""
    write_seconds: float = Field(300.0, gt=0)
    """How long a program may leave its answer unread."""


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
    templates: dict[str, str] = {"code-interpreter-v1": "base"}
    """Other names for some of these images: programs with `e2b_code_interpreter` name `code-interpreter-v1` unless
    they choose."""
    network: Hosts = "none"
    """The network of sandboxes: `none`, a list of hosts, or `full`, which includes this machine's own services."""
    max_sandboxes: int | None = Field(None, ge=1)
    """The most sandboxes of programs at once; more are refused. Left out, half of those that may be alive at once."""
    max_seconds: int = Field(86_400, ge=1)
    """The longest that a sandbox may live, from its creation on."""
    max_file_bytes: int = Field(512 * 1024 * 1024, ge=1_024)
    """The largest file that may be written or read, and the largest body with several of them."""
