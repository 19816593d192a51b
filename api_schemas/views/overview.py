"""The service at a glance: the answer of `GET /v1/overview`, which its stream sends once a second.

Numbers are those of the node that answers, unless a field says otherwise.
"""

from __future__ import annotations

from typing import Literal

from api_schemas.base import StrEnum, Timestamp, WireModel
from api_schemas.inference import BackendView
from api_schemas.nodes import NodeView, StageOverview
from api_schemas.rollouts import RolloutState
from api_schemas.runs import RunState
from api_schemas.views.hangs import HangFinding
from api_schemas.views.summaries import ErrorGroup


class BackendOverview(WireModel):
    """An engine now."""

    backend: BackendView
    cached_share: float | None = None
    """The share of prompt tokens of the last minute that its prefix cache had; null if it read none."""
    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0
    p50_seconds: float | None = None
    """The median time of its requests of the last minute."""


class RunOverview(WireModel):
    """A run in progress, in brief."""

    run_id: str
    state: RunState
    pool: str
    version: int
    acceptance_rate: float
    open_groups: int
    ready_groups: int
    acknowledged_groups: int
    dropped: dict[str, int] = {}
    staleness: float | None = None
    """How many versions the oldest token of the newest closed group is behind."""
    problem: str | None = None


class BottleneckKind(StrEnum):
    """The limit of the throughput."""

    GRADERS = "graders"
    PAUSE = "pause"
    """A pool is paused, as it is while weights are loaded."""
    ENGINES = "engines"
    TOOLS = "tools"
    AGENTS = "agents"
    """The number of agents that may run at once."""
    HOST = "host"
    """The host bears no further sandbox."""
    SANDBOXES = "sandboxes"
    """The number of sandboxes that are started at once."""
    STORE = "store"
    """Rollouts wait for the store."""
    TRAINER = "trainer"
    """Groups are ready, and the trainer takes none of them."""
    ORDERS = "orders"
    """Too little is asked of the service."""


class Bottleneck(WireModel):
    """The present limit of the throughput, over all nodes."""

    kind: BottleneckKind
    message: str
    """The evidence, in a sentence."""
    hint: str
    """The change that would raise it, with the setting."""


class NextNode(WireModel):
    """The gain of one more node like those that there are."""

    rollouts: int = 0
    """The rollouts that it would begin now; 0 if it would bring nothing."""
    nodes: int = 0
    """How many such nodes would have work now."""
    message: str
    """The same in a sentence: what waits, or why another node would bring nothing."""


class Overview(WireModel):
    """The service at a glance."""

    at: Timestamp
    version: str
    node: str
    role: Literal["read", "submit", "admin"] = "admin"
    """The role of the caller's key; `admin` if no keys are set. Streams leave it as it is."""
    uptime_seconds: float
    last_event: int
    """The id of the newest event, so that a page knows whether its lists are out of date."""
    ready: bool
    reasons: list[str] = []
    """Why it takes no work."""
    warnings: list[str] = []
    counts: dict[RolloutState, int]
    """Rollouts in each state, over the whole store."""
    finished_per_second: float
    """Over the last 30 seconds, at this node."""
    outcomes: dict[str, int] = {}
    """Rollouts that ended within the last five minutes at this node, by `completed`, `cancelled` and error code."""
    success_share: float | None = None
    """The share of those that completed; null if none ended."""
    stages: list[StageOverview]
    nodes: list[NodeView] = []
    backends: list[BackendOverview] = []
    paused_pools: list[str] = []
    runs: list[RunOverview] = []
    """The runs in progress, the newest first, 20 at most."""
    errors: list[ErrorGroup] = []
    """The last failures, grouped, 20 groups at most."""
    findings: list[HangFinding] = []
    """The steps that are stuck, slow or held back, without stacks."""
    bottleneck: Bottleneck | None = None
    """The limit of the throughput of all nodes; null if they are idle, or something is stuck and comes first."""
    next_node: NextNode | None = None
    """The gain of one more node."""
    sessions_open: int = 0
    """Live sessions that are open."""
