"""Live sessions: served traffic of a user's own agent, which becomes training data where its user agrees.

Whoever runs an agent opens a session, and gives the agent the session's URL and key in place of a model provider's.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue, StringConstraints, field_validator

from api_schemas.base import (
    Count,
    CountOrZero,
    Flag,
    Integer,
    Name,
    Number,
    Real,
    RolloutId,
    Seconds,
    StrEnum,
    Timestamp,
    WireModel,
)
from api_schemas.rollouts.sessions import ClosedBecause, MaskReason, TurnMark
from api_schemas.runs import BatchId, RunId

SessionId = Annotated[str, StringConstraints(min_length=1, max_length=256)]
"""Any text of up to 256 characters; nothing is read into it."""

RESERVED_IDS = frozenset({"canary", "feedback", ".", ".."})
"""Ids that no path can name: other routes use these words in the same place, or clients remove them."""


class SessionRequest(WireModel):
    """A request to open a session. Sending it again under the same `session_id` returns the session without its key."""

    session_id: SessionId | None = None
    """The session's id; if left out, the service chooses one."""
    pool: Name = "policy"
    """The pool of engines that answers."""
    user: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    """Who is served; only a salted hash of it is kept. Sessions without one are users of their own."""
    tenant: Name = "default"
    """Whose users they are. Tenants share no batch, unless a run allows it."""
    train: Flag | None = None
    """Whether turns may be stored, judged and trained on. If left out, the service's setting, which is no."""
    retention_seconds: Seconds | None = None
    """How long turns are kept that no run took; at most the service's setting, which is the default."""
    continues: SessionId | None = None
    """The session that this one goes on from."""
    group: RolloutId | None = None
    """A tenant's sessions with the same value work on the same task: a run with `group_size` n gets them as groups of
    n, once all have ended. Those that fill no group wait for others."""
    metadata: dict[str, JsonValue] = {}
    """Data of the caller, returned unchanged but for texts with secrets, which become `[redacted]`."""

    @field_validator("session_id")
    @classmethod
    def _is_no_route(cls, session_id: str | None) -> str | None:
        if session_id in RESERVED_IDS:
            raise ValueError(f"{session_id!r} cannot stand in a path; choose another id")
        return session_id


class SessionState(StrEnum):
    """The state of a session."""

    OPEN = "open"
    CLOSED = "closed"


class SessionCounts(WireModel):
    """The numbers of a session's turns, by outcome.

    Every served turn is in exactly one of `delivered`, `dropped` and `waiting`.
    """

    served: CountOrZero = 0
    recorded: CountOrZero = 0
    """The turns that were stored; the others are dropped as `opted_out`."""
    judged: CountOrZero = 0
    """The turns with a value."""
    delivered: CountOrZero = 0
    """The turns that are trained on in a part that was handed to a run."""
    dropped: dict[MaskReason, CountOrZero] = {}
    waiting: CountOrZero = 0
    """The turns about which nothing is decided yet."""


class SessionPart(WireModel):
    """Turns of a session that were handed to a run together."""

    part: Integer
    """The number of the part in its session, counted from 0."""
    run_id: RunId
    rollout_id: RolloutId | None = None
    """The rollout that the part became, without the suffix of a retry; null until it has begun."""
    turns: list[Integer] = []
    """The turns that are trained on."""
    closed_at: Timestamp


class LiveSession(WireModel):
    """A session in its present state."""

    session_id: SessionId
    state: SessionState
    pool: Name
    user: str
    """A salted hash."""
    tenant: Name
    train: Flag
    continues: SessionId | None = None
    group: RolloutId | None = None
    metadata: dict[str, JsonValue] = {}
    opened_at: Timestamp
    used_at: Timestamp
    """When the last request arrived."""
    closed_at: Timestamp | None = None
    closed_because: ClosedBecause | None = None
    parts: CountOrZero = 0
    """The number of parts that were handed to a run."""
    counts: SessionCounts = SessionCounts()
    turns: Annotated[list[TurnMark], Field(exclude_if=lambda turns: not turns)] = []
    """The turns so far; left out of lists of sessions."""
    handed_over: Annotated[list[SessionPart], Field(exclude_if=lambda parts: not parts)] = []
    """The parts that were handed to runs; left out of lists of sessions."""


class OpenedSession(WireModel):
    """A session, and how an agent reaches it."""

    session: LiveSession
    url: str
    """The base URL for clients that take one without a version; OpenAI's takes `<url>/v1`."""
    key: str | None
    """The session's key, which is shown only once: null if the session was open before."""


class SessionPage(WireModel):
    """A page of sessions, the newest first."""

    sessions: list[LiveSession]
    next_cursor: str | None = None
    """The `cursor` of the next page; null on the last page."""
    counts: SessionCounts = SessionCounts()
    """The turns of all sessions, deleted ones included."""


class SessionFeedback(WireModel):
    """A user's feedback on an answer. It overrides the judge; sending the same again changes nothing."""

    turn: CountOrZero | None = None
    """The turn; null means the last main turn that was delivered."""
    value: Annotated[float, Number] = Field(ge=-1.0, le=1.0)
    text: Annotated[str, StringConstraints(max_length=65_536)] | None = None
    """The user's comment. It is evidence for a hint, and never an instruction."""


class FeedbackAnswer(WireModel):
    """The turn that feedback was taken for."""

    turn: Integer
    value: Real
    revised: Flag = False
    """Whether the turn was handed to a run before, so that the feedback is kept as a revision and changes no batch."""


class LeasedPart(WireModel):
    """A part of deleted data that a trainer may hold already."""

    session_id: SessionId
    part: Integer
    run_id: RunId
    rollout_id: RolloutId | None
    batch_id: BatchId | None
    """The batch that it was delivered in; null if it was not in a batch that was leased."""


class DeletedSessions(WireModel):
    """The outcome of a deletion: the data removed, and the parts that a trainer had leased before."""

    sessions: int
    turns: int
    undelivered: int
    """The parts that were in a run and not leased yet; they were removed there."""
    leased: list[LeasedPart] = []
    """The parts that were leased before, so that a trainer can act."""


class Canary(WireModel):
    """Where a share of a pool's new sessions goes: to the pool with a candidate for its weights."""

    pool: Name
    """The pool that sessions ask for."""
    candidate: Name
    """The pool that serves the candidate."""
    share: Annotated[float, Number] = Field(ge=0.0, le=1.0)
    """The share of new sessions that the candidate serves; each session stays where it began."""


class FeedbackByVersion(WireModel):
    """The values of the turns that one version of a pool's weights sampled."""

    pool: Name
    version: Integer
    turns: Count
    value_mean: Real
    satisfied: Real
    """The share of values above 0."""
