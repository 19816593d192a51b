"""Nodes on the wire: what a host has, how many sandboxes it bears at present, and why not more."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from api_schemas.base import Number, WireModel


class HoldView(WireModel):
    """Something that keeps further sandboxes from being started."""

    resource: str
    """`cpu`, `memory`, `io`, `disk`, `descriptors` or `processes` of the host; `ceiling`; or `growth`, while the
    target still rises to what is asked for."""
    reason: str
    """In words, with the figures: `memory: 3.1 GiB available, 4.0 GiB kept free`."""


class PressureView(WireModel):
    """What the host said of itself last; null is what it does not tell."""

    load: float | None = None
    """The load average of one minute."""
    cpu_percent: float | None = None
    """The share of the last 10 s in which something waited for a processor."""
    memory_percent: float | None = None
    io_percent: float | None = None
    """The share of the last 10 s in which everything waited for disks."""
    memory_available_bytes: int | None = None
    disk_free_bytes: dict[str, int] = {}
    """By a folder on each file system that sandboxes and the state are kept on."""
    descriptors_free: int | None = None
    processes_free: int | None = None


class EgressView(WireModel):
    """What went out of sandboxes that are held to a list of hosts, since the service started."""

    connections: int = 0
    allowed: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    refused: dict[str, int] = {}
    """By reason: `host`, `port`, `address`, `unresolved`, `unreachable`, `timeout`, `bad_request`."""


class NodeView(WireModel):
    """One host that runs sandboxes."""

    node: str
    cpus: int
    memory_bytes: int | None = None
    provider: str
    enforced: list[str]
    """The limits that hold for a sandbox as a whole here."""
    live: int
    """Sandboxes that are alive, those that are about to end included."""
    in_use: int
    """Sandboxes that rollouts have, or may start at once."""
    warm: int
    waiting: int
    """Rollouts that wait for a sandbox."""
    target: int
    """How many may be in use at the present pressure."""
    ceiling: int
    holds: list[HoldView] = []
    """Why the next rollout would wait; empty when it would not."""
    pressure: PressureView | None = None
    """Null before the first look."""
    breaches: dict[str, int] = {}
    """How often a limit of a sandbox was reached since the service started, by limit."""
    egress: EgressView = EgressView()


class StageConcurrency(WireModel):
    """How many rollouts may work in a stage, and wait before it."""

    workers: int
    queue: int
    working: int
    """Rollouts that have a worker now; more than `workers` for a while after that was lowered."""


class SandboxCeiling(WireModel):
    """How many sandboxes may be alive."""

    ceiling: int
    target: int
    """How many may be in use at the present pressure."""
    in_use: int
    waiting: int
    """Rollouts that wait for a sandbox."""


class NodeConcurrency(WireModel):
    """How much a node does at once."""

    node: str
    init: StageConcurrency
    rollout: StageConcurrency
    evaluate: StageConcurrency
    sandboxes: SandboxCeiling


MAX_AT_ONCE = 100_000
AtOnce = Annotated[int, Number, Field(ge=1, le=MAX_AT_ONCE)]


class StagePatch(WireModel):
    """Figures of a stage to change; those left out stay."""

    workers: AtOnce | None = None
    queue: AtOnce | None = None


class SandboxesPatch(WireModel):
    """Figures of the sandboxes to change."""

    ceiling: Annotated[int, Number, Field(ge=2, le=MAX_AT_ONCE)] | None = None
    """One place is for graders."""


class NodePatch(WireModel):
    """What to change of how much a node does at once, until its next start. Work under way goes on."""

    init: StagePatch | None = None
    rollout: StagePatch | None = None
    evaluate: StagePatch | None = None
    sandboxes: SandboxesPatch | None = None


class Health(WireModel):
    """The answer of a service that is alive."""

    status: Literal["ok"] = "ok"
    version: str


class Readiness(WireModel):
    """Whether a service can take work."""

    ready: bool
    reasons: list[str]
    """Why it cannot, each with what to do; empty when it can."""
    warnings: list[str] = []
    """What does not work and keeps nothing else from working, as a plug-in that cannot be loaded."""
