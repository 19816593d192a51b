"""The records of live sessions, as `sqlite.store` keeps them and the other parts share them.

A turn passes through four steps, none of which waits for the next: it is *recorded* when it is served, its *next state*
is set when the client's next request arrives, it is *judged*, and a *part* of the session hands it to a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

from api_schemas.rollouts.sessions import (
    ClosedBecause,
    Hint,
    JudgedBy,
    MarkReason,
    MaskReason,
    TurnKind,
    Votes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """A session as it is stored. Times are Unix times."""

    session_id: str
    key_hash: bytes
    """SHA-256 of its key; empty for a session that a client began by its own id."""
    pool: str
    """The pool that answers, which may be a candidate's."""
    user: str
    """The salted hash of the user."""
    tenant: str
    train: bool
    explicit: bool
    """Whether it was opened by a request of its own."""
    client: str = ""
    """The hash of the id by which a client began it; empty for one that was opened by a request."""
    quarantined: bool = False
    retention_seconds: float
    continues: str | None = None
    group: str | None = None
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    opened_at: float
    used_at: float
    closed_at: float | None = None
    closed_because: ClosedBecause | None = None
    served: int = 0
    """The turns that were served, stored or not."""
    opted_out: int = 0
    """Those of them that were not stored."""


DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class OptOuts:
    """The texts of a conversation that were not to be stored, as hashes."""

    digests: frozenset[bytes] = frozenset()
    """Hashes of messages, of `DIGEST_BYTES` each, from which nothing can be read."""
    is_complete: bool = True
    """False if there are others, of which nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStateRecord:
    """All messages since a turn's answer, up to the next request that follows it."""

    role: Literal["user", "tool", "mixed"]
    text: str
    is_error: bool = False
    """Whether a tool's result says that it failed."""
    arrived_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMarkRecord:
    """The value of a turn, or why it has none."""

    value: float | None
    reason: MarkReason
    source: str
    votes: Votes | None = None
    judge: JudgedBy | None = None
    hint: Hint | None = None
    hint_dropped: str = ""
    """Why there is no hint although one was asked for."""
    at: float


@dataclass(frozen=True, slots=True)
class UnjudgedTurn:
    session_id: str
    turn: int
    since: float
    """When its next state arrived, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    session_id: str
    turn: int
    """Its id in the session's trajectory."""
    kind: TurnKind
    answer: str
    """The text of the answer with its tool calls, as the judge reads it; empty if something in it was redacted."""
    version: int
    """The newest version that sampled a token of it."""
    truncated: bool
    """Whether the token limit cut it off."""
    malformed: int
    """Its tool calls that could not be read."""
    calls: tuple[str, ...] = ()
    """Its tool calls as canonical JSON, to find repeated ones."""
    recorded_at: float
    delivered: bool = False
    mask: MaskReason | None = None
    """Why it can never be trained on, if that is known: side, superseded, redacted, opted out, foreign."""
    body: bytes
    """All that is needed to capture the turn again after a restart, and to build trajectories: `live.replay`."""
    next_state: NextStateRecord | None = None
    mark: TurnMarkRecord | None = None
    part: int | None = None
    """The part that took it, usable or not."""
    dropped: MaskReason | None = None
    """Why it is not usable in that part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTurn:
    """The state of a turn that is in no part, without its content."""

    turn: int
    kind: TurnKind
    recorded_at: float
    delivered: bool
    mask: MaskReason | None
    followed_at: float | None
    """When its next state arrived."""
    marked_at: float | None
    """When it got its mark."""
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """Turns of one session that are handed to one run together."""

    session_id: str
    part: int
    run_id: str
    usable: tuple[int, ...]
    """The ids of the turns that are trained on."""
    offset: int | None = None
    """The number of its task in the run, once it is known."""
    rollout_id: str | None = None
    """The rollout that claimed it, without the suffix of a retry."""
    closed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """The data that a deletion removed."""

    sessions: tuple[str, ...]
    turns: int
    parts: tuple[PartRecord, ...]
