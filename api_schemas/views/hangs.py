"""Reports of rollouts that are slower than usual: the waits that hold them up, and the possible remedies."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from api_schemas.base import RolloutId, StrEnum, Timestamp, WireModel
from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind


class HangVerdict(StrEnum):
    """How bad it is."""

    STUCK = "stuck"
    """It takes longer than its history says, and nothing moves."""
    IDLE = "idle"
    """It has done nothing for a while, but there is no history to compare it with, and its own time limit ends it."""
    SLOW = "slow"
    """It takes longer than its history says, but moves: tokens arrive, or the command uses the processor."""
    HELD = "held"
    """Something that is meant to holds it back: a pause, a full queue, a host under pressure."""


class UsualTimes(WireModel):
    """How long the same step took before, in seconds, in this environment and stage."""

    count: int
    p50: float
    p95: float
    p99: float


class StackFrame(WireModel):
    """One frame of the stack of a waiting task. It has no values of variables, which could be secrets."""

    file: str
    line: int
    function: str
    ours: bool = False
    """Whether the code is this project's; the frames of libraries may be folded."""


class OpenWait(WireModel):
    """A step that a rollout under way is in now."""

    kind: StepKind
    name: str = ""
    lane: str = ""
    stage: Stage | None = None
    since: Timestamp
    seconds: float
    progress_seconds: float | None = None
    """The time since something last moved, such as a token that arrived; null if nothing that is watched has moved."""
    detail: dict[str, JsonValue] = {}
    """As in `RolloutStep.detail`, as far as it is known."""


class RolloutActivity(WireModel):
    """The current steps of a rollout under way, at the node that works on it."""

    rollout_id: RolloutId
    node: str
    environment: str
    attempt: int
    stage: Stage | None
    since: Timestamp
    """When the attempt began."""
    waits: list[OpenWait]
    """The steps that it is in, the outermost first."""
    stack: list[StackFrame] = []
    """Where the task of the innermost wait is suspended, the outermost frame first."""


class HangFinding(WireModel):
    """Rollouts that wait for the same thing, and longer than usual. One dead engine is one finding, not 500."""

    finding_id: str
    """The same from its beginning to its end."""
    verdict: HangVerdict
    kind: StepKind | Literal["event_loop", "run", "weights"]
    """The kind of step that waits; `event_loop` if code that does not yield keeps everything waiting, `run` if a
    trainer's run cannot go on (`stuck`), or delivers nothing (`slow`), `weights` if an engine samples with weights that
    it was not given."""
    subject: str
    """The subject of the finding: a backend, a sandbox, a tool, a pool, a stage, a run, or the store."""
    stage: Stage | None = None
    environment: str = ""
    since: Timestamp
    seconds: float
    """How long the oldest of them has waited."""
    usual: UsualTimes | None = None
    """Null if there are too few earlier ones to tell."""
    responds: bool | None = None
    """Whether the thing waited for answers a probe: false for an engine or a sandbox that is gone; null if it cannot be
    asked."""
    rollouts: list[RolloutId] = []
    """The rollouts that wait, the oldest first, 20 at most."""
    count: int = 0
    """How many they are."""
    message: str
    """A sentence that names the subject and the cause."""
    hint: str
    """How it will end, and how a person can help."""
    detail: dict[str, JsonValue] = {}
    stack: list[StackFrame] = []
    """Where the task of the oldest is suspended; for `event_loop`, where the code is that does not yield."""


class StageWait(WireModel):
    """The wait of a stage that has made no progress for longest."""

    stage: Stage
    kind: StepKind
    name: str = ""
    """The subject of the wait, such as a backend, a tool or an environment."""
    seconds: float
    """How long it has lasted."""
    quiet_seconds: float
    """How long ago it last made progress, or began."""
    rollout_id: RolloutId


class HangReport(WireModel):
    """The hangs at the nodes that were asked; empty lists are good news."""

    node: str
    at: Timestamp
    working: int
    """The rollouts under way that were looked at."""
    loop_lag_seconds: float
    """The longest delay of the event loop within the last ten seconds."""
    findings: list[HangFinding] = []
    """The worst first: `stuck`, then `idle`, `slow` and `held`; within these, the oldest first."""
    oldest: list[StageWait] = []
    """For each stage with a wait, the one without progress for longest, remarkable or not."""
    source: Literal["service", "state_folder"] = "service"
    """Whether the service answered, or its watchdog's last report was read from the state folder."""
