"""The steps of a rollout: its actions and waits, from which timelines, traces and hang reports are made.

A step is one wait of one of the rollout's tasks, from its beginning to its end. Steps of one lane do not overlap unless
one contains the other; sub-agents and tools that run at once have lanes of their own.
"""

from __future__ import annotations

from pydantic import JsonValue

from api_schemas.base import Integer, Real, RolloutId, StrEnum, Timestamp, WireModel
from api_schemas.rollouts.stages import Stage


class StepKind(StrEnum):
    """The kind of a step: an action or a wait of a rollout."""

    PLACE = "place"
    """It waits for a place in the queue of a stage."""
    WORKER = "worker"
    """It waits for a worker of a stage."""
    HOST = "host"
    """It waits until the host can bear one more sandbox."""
    SANDBOX_START = "sandbox_start"
    SESSION = "session"
    """A bash or Python session is being opened."""
    SETUP = "setup"
    """The environment sets up the task."""
    POOL_QUEUE = "pool_queue"
    """It waits until its pool has room for its request."""
    PAUSED_POOL = "paused_pool"
    """It waits until its pool is resumed, or has a backend in service."""
    ENGINE = "engine"
    """An engine works on its request."""
    TOOL = "tool"
    AGENT = "agent"
    """A program is the agent, and works by itself."""
    SUBAGENT = "subagent"
    """It waits for a slot of a sub-agent."""
    ARTIFACTS = "artifacts"
    """The agent's files are taken out of its sandbox, or put into the grader's."""
    GRADER = "grader"
    """The environment scores the outcome."""
    JUDGE = "judge"
    """A model judges the outcome."""
    SANDBOX_END = "sandbox_end"
    STORE = "store"
    """The store writes or reads."""


class RolloutStep(WireModel):
    """One thing that a rollout did or waited for, after it ended."""

    kind: StepKind
    name: str = ""
    """The name of the tool, backend, image, session or stage."""
    lane: str = ""
    """The lane of the rollout's timeline: empty for the agent's own, else a sub-agent's number or the call of a tool
    that ran beside others. A lane within another has the names of both: `3/call-1`."""
    stage: Stage | None = None
    """The stage that it was part of; null before the first one and after the last."""
    attempt: Integer
    started_at: Timestamp
    seconds: Real
    error: str | None = None
    """The code of the error that ended it, if one did."""
    detail: dict[str, JsonValue] = {}
    """More facts about the step. An engine's step has `request` (the id in the engine's log), `turn`, `segment`,
    `prompt_tokens`, `cached_tokens`, `tokens` (sampled ones) and `version`; a tool's has `call` and `command` (the
    first line of it); a sandbox's has `sandbox`; an evaluation's has `reward`."""


class RolloutSteps(WireModel):
    """The steps of a rollout, over all attempts, in the order in which they began."""

    rollout_id: RolloutId
    steps: list[RolloutStep]
    dropped: Integer = 0
    """The steps that were not recorded, since an attempt keeps a bounded number of them."""


class AttemptSteps(WireModel):
    """The steps of one attempt as columns: entry i of each is of step i, in the order in which they began.

    Columns are small and quick to read. `lanes` and `errors` are empty if no step has one.
    """

    attempt: Integer
    environment: str = ""
    run_id: str | None = None
    group: Integer | None = None
    started_at: Real
    """Unix seconds; all other times are microseconds after it."""
    us: Integer
    """How long the attempt took, or has taken so far."""
    outcome: dict[str, JsonValue] = {}
    """How it ended: the rollout's `state`, with `reward`, `stop_reason` and `code` if there are any."""
    dropped: Integer = 0
    stages: list[tuple[Stage, Integer]] = []
    """The stages, with when each was first waited for."""
    kinds: list[StepKind] = []
    names: list[str] = []
    starts: list[Integer] = []
    lengths: list[Integer] = []
    lanes: list[str] = []
    errors: list[str | None] = []
    details: list[dict[str, JsonValue]] = []


class RolloutAttempts(WireModel):
    """The steps of a rollout as columns, attempt by attempt: one line of `GET /v1/steps`."""

    rollout_id: RolloutId
    attempts: list[AttemptSteps]
