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
    """Times are Unix times."""

    session_id: str
    key_hash: bytes
    """SHA-256; empty for a session that a client began by its own id."""
    pool: str
    """May be a candidate's."""
    user: str
    """A salted hash."""
    tenant: str
    train: bool
    explicit: bool
    """Opened by a request of its own."""
    client: str = ""
    """A hash of the id by which a client began it; empty for one that was opened by a request."""
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
    """Turns, stored or not."""
    opted_out: int = 0
    """Turns that were not stored."""


DIGEST_BYTES = 8
MAX_DIGESTS = 4_096
"""Hashes of one conversation: 32 KiB, which each turn without consent writes again."""


@dataclass(frozen=True, slots=True)
class OptOuts:
    """Texts of a conversation that may not be stored."""

    digests: frozenset[bytes] = frozenset()
    """Keyed hashes of `DIGEST_BYTES`, from which nothing can be read."""
    is_complete: bool = True
    """False if there are others that are not known."""

    def with_others(self, added: OptOuts) -> OptOuts:
        """Keep some of too many, which are then incomplete."""
        digests = self.digests | added.digests
        is_complete = self.is_complete and added.is_complete and len(digests) <= MAX_DIGESTS
        return OptOuts(frozenset(sorted(digests)[:MAX_DIGESTS]), is_complete)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStateRecord:
    """All messages from a turn's answer to the next request."""

    role: Literal["user", "tool", "mixed"]
    text: str
    is_error: bool = False
    """A tool's result says that it failed."""
    arrived_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMarkRecord:
    value: float | None
    reason: MarkReason
    source: str
    votes: Votes | None = None
    judge: JudgedBy | None = None
    hint: Hint | None = None
    hint_dropped: str = ""
    """Why there is none although it was asked for."""
    at: float


@dataclass(frozen=True, slots=True)
class UnjudgedTurn:
    session_id: str
    turn: int
    since: float
    """Unix time when its next state arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    session_id: str
    turn: int
    """Id in the session's trajectory."""
    kind: TurnKind
    answer: str
    """The text of the answer with its tool calls, as the judge reads it; empty if something in it was redacted."""
    version: int
    """The newest that sampled a token of it."""
    truncated: bool
    """Cut off by the token limit."""
    malformed: int
    """Tool calls that could not be read."""
    calls: tuple[str, ...] = ()
    """Canonical JSON, to find repeated calls."""
    recorded_at: float
    delivered: bool = False
    mask: MaskReason | None = None
    """Why it can never be trained on, if that is known."""
    body: bytes
    """Enough to capture the turn again, and to build trajectories: `live.replay`."""
    next_state: NextStateRecord | None = None
    mark: TurnMarkRecord | None = None
    part: int | None = None
    """The part that took it, usable or not."""
    dropped: MaskReason | None = None
    """Why it is not usable in its part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTurn:
    """A turn that is in no part, without its content."""

    turn: int
    kind: TurnKind
    recorded_at: float
    delivered: bool
    mask: MaskReason | None
    followed_at: float | None
    """Arrival of its next state."""
    marked_at: float | None
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """Turns of one session that are handed to one run together."""

    session_id: str
    part: int
    run_id: str
    usable: tuple[int, ...]
    """Ids of the turns that are trained on."""
    offset: int | None = None
    """The number of its task in the run, once known."""
    rollout_id: str | None = None
    """The rollout that claimed it, without the suffix of a retry."""
    closed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    sessions: tuple[str, ...]
    turns: int
    parts: tuple[PartRecord, ...]
