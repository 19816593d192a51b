"""Nodes: the resources of a host, how many sandboxes it can run at present, and why not more."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from api_schemas.base import Number, StrEnum, WireModel
from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind


class HoldView(WireModel):
    """A reason why no further sandbox may start now."""

    resource: str
    """The resource that is short: `cpu`, `memory`, `io`, `disk`, `descriptors` or `processes` of the host; `ceiling`;
    or `growth`, while the target is still rising to the demand."""
    reason: str
    """The reason in words, with its figures: `memory: 3.1 GiB available, 4.0 GiB kept free`."""


class PressureView(WireModel):
    """The latest measurements of the host; null where the host reports none."""

    load: float | None = None
    """The load average of one minute."""
    cpu_percent: float | None = None
    """The share of the last 10 s in which something waited for a processor."""
    memory_percent: float | None = None
    io_percent: float | None = None
    """The share of the last 10 s in which everything waited for disks."""
    memory_available_bytes: int | None = None
    disk_free_bytes: dict[str, int] = {}
    """The free bytes of each file system that holds sandboxes or the state, by a folder on it."""
    descriptors_free: int | None = None
    processes_free: int | None = None


class EgressView(WireModel):
    """The network use of sandboxes that may reach only listed hosts, since the service started."""

    connections: int = 0
    allowed: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    refused: dict[str, int] = {}
    """Refusals by reason: `host`, `port`, `address`, `unresolved`, `unreachable`, `timeout`, `bad_request`."""


class NodeState(StrEnum):
    """Whether a node claims rollouts."""

    READY = "ready"
    """It claims rollouts."""
    DRAINING = "draining"
    """It claims no more; those under way continue."""
    DEAD = "dead"
    """It has been silent for 10 seconds; its rollouts were queued again."""


class StageOverview(WireModel):
    """A stage of the pipeline now."""

    stage: Stage
    working: int
    workers: int
    waiting: int
    """Rollouts that wait for a worker."""
    places: int
    """The most that may wait."""
    oldest_seconds: float = 0.0
    """How long the oldest has been in the stage."""
    waits_for: dict[StepKind, int] = {}
    """The number of rollouts at work in it, by the kind of step that they are in now."""


class NodeView(WireModel):
    """One node: a service, and the host that its sandboxes run on."""

    node: str
    """The name of the node; unless it is set, the host name."""
    state: NodeState = NodeState.READY
    address: str = ""
    """The URL of its API."""
    labels: list[str] = []
    """The labels that environments may require."""
    environments: list[str] = []
    """The environments whose rollouts it takes."""
    images: list[str] = []
    """Those whose image is on this host, or that need none."""
    rollouts: int = 0
    """The rollouts that it works on."""
    finished: int = 0
    """The rollouts that it has ended since it started."""
    places: int = 0
    """The most rollouts that it works on at once, before their evaluation."""
    stages: list[StageOverview] = []
    """The stages of its pipeline."""
    silent_seconds: float = 0.0
    """The time since its last heartbeat."""
    cpus: int
    memory_bytes: int | None = None
    provider: str
    """The provider that starts the sandboxes, such as `apptainer`."""
    enforced: list[str]
    """The limits that this node enforces on a sandbox as a whole."""
    pausing: Literal["none", "processes", "files", "memory"] = "none"
    """How far a sandbox can be paused here: not at all, its processes, also the memory that caches files, or all of its
    memory, to swap."""
    live: int
    """Sandboxes that are alive, including those about to end."""
    in_use: int
    """Sandboxes that rollouts have, or have been admitted to start."""
    warm: int
    """Sandboxes that were started ahead and are not used yet."""
    waiting: int
    """Rollouts that wait for a sandbox."""
    target: int
    """The most sandboxes that may be in use at the present pressure."""
    ceiling: int
    """The most sandboxes that may ever be alive."""
    holds: list[HoldView] = []
    """Why the next rollout would wait for a sandbox; empty if it would not."""
    pressure: PressureView | None = None
    """The latest measurements; null before the first."""
    breaches: dict[str, int] = {}
    """How often sandboxes reached each limit since the service started."""
    egress: EgressView = EgressView()


class StageConcurrency(WireModel):
    """The number of rollouts that may work in a stage, and wait before it."""

    workers: int
    """The most rollouts that work in the stage at once."""
    queue: int
    """The most rollouts that wait for a worker."""
    working: int
    """Rollouts that have a worker now; for a while, more than `workers` if that was lowered."""


class SandboxCeiling(WireModel):
    """The number of sandboxes that may be alive."""

    ceiling: int
    """The most sandboxes that may ever be alive."""
    target: int
    """The most sandboxes that may be in use at the present pressure."""
    in_use: int
    """Sandboxes that rollouts have, or have been admitted to start."""
    waiting: int
    """Rollouts that wait for a sandbox."""


class NodeConcurrency(WireModel):
    """The concurrency of a node: its stages' workers and queues, and its sandboxes."""

    node: str
    """The host name."""
    init: StageConcurrency
    rollout: StageConcurrency
    evaluate: StageConcurrency
    sandboxes: SandboxCeiling


MAX_AT_ONCE = 100_000
AtOnce = Annotated[int, Number, Field(ge=1, le=MAX_AT_ONCE)]


class StagePatch(WireModel):
    """Changes to a stage; fields that are left out stay."""

    workers: AtOnce | None = None
    queue: AtOnce | None = None


class SandboxesPatch(WireModel):
    """Changes to the number of sandboxes."""

    ceiling: Annotated[int, Number, Field(ge=2, le=MAX_AT_ONCE)] | None = None
    """The most sandboxes that may be alive; one of them is reserved for graders."""


class NodePatch(WireModel):
    """Changes to a node's concurrency, until its next start. Work under way continues."""

    init: StagePatch | None = None
    rollout: StagePatch | None = None
    evaluate: StagePatch | None = None
    sandboxes: SandboxesPatch | None = None


class Health(WireModel):
    """The response of a service that is alive."""

    status: Literal["ok"] = "ok"
    version: str
    """The version of the service's software."""


class Readiness(WireModel):
    """Whether a service can take work."""

    ready: bool
    reasons: list[str]
    """Why it cannot, each with advice on what to do; empty if it can."""
    warnings: list[str] = []
    """Faults that do not keep the service from working, such as a plug-in that cannot be loaded."""


# Live sandboxes, for operators.


class SandboxView(WireModel):
    """A sandbox that is alive."""

    id: str
    label: str
    """The purpose of the sandbox, such as the id of a rollout."""
    image: str
    provider: str
    started_at: float
    """The start as Unix time."""
    pid: int | None
    """The id of the launcher's process on the host."""
    state: Literal["in_use", "paused", "warm"]
    """The state of the sandbox. A warm one waits in a pool and does not belong to a rollout yet. Nothing runs in a
    paused one until its rollout uses it again."""
