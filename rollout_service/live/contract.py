"""The contract between the parts of live sessions: the records of the store, and the store itself.

A turn passes through four steps, none of which waits for the next: it is *recorded* when it is served, its *next state*
is set when the client's next request arrives, it is *judged*, and a *part* of the session hands it to a run. Guarantees
of every store: a write whose method has returned is on the disk, or in the operating system's hands; a turn is in at
most one part, and a part in at most one rollout; deleting leaves no byte of a session in the store's files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

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
from api_schemas.sessions import FeedbackByVersion
from rollout_service.base.errors import StoreError


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """A recorded turn of a session."""

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
class TurnFate:
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


class LiveStore(Protocol):
    """The durable sessions of one node."""

    @property
    def problem(self) -> StoreError | None:
        """Why the store cannot be written to at the moment; None if no reason is known."""
        ...

    # -- sessions --

    async def open(self, session: SessionRecord) -> bool:
        """Keep a new session; return False, and change nothing, if its id is known."""
        ...

    async def session(self, session_id: str) -> SessionRecord | None: ...

    async def session_of_key(self, key_hash: bytes) -> SessionRecord | None: ...

    async def latest_of_client(self, client: str) -> SessionRecord | None:
        """Return the newest session of a client's own id, by its hash."""
        ...

    async def sessions(
        self,
        *,
        before: tuple[float, str] | None = None,
        limit: int = 100,
        is_open: bool | None = None,
        user: str | None = None,
    ) -> Sequence[SessionRecord]:
        """Return sessions, the newest first, that were opened before this time and id; `user` is a hash."""
        ...

    async def group(self, tenant: str, name: str) -> Sequence[SessionRecord]:
        """Return a tenant's sessions that work on the same task, the oldest first."""
        ...

    async def sessions_of(self, user: str) -> int:
        """Return how many sessions a user has had, deleted ones not counted."""
        ...

    async def tenants(self) -> Sequence[str]:
        """Return the tenants that have sessions."""
        ...

    async def served(self, session_id: str, at: float, *, opted_out: bool) -> None:
        """Note that a turn was served. One that is opted out is counted here, and leaves nothing else; others are
        counted when they are recorded.
        """
        ...

    async def opt_out(self, conversation: str, added: OptOuts, at: float) -> None:
        """Remember further opt-outs of a conversation. Of too much, some is kept, and noted as incomplete."""
        ...

    async def opt_outs(self, conversation: str) -> OptOuts:
        """Return the opt-outs of a conversation, also once its sessions are gone."""
        ...

    async def forget_opt_outs(self, before: float) -> None:
        """Forget the opt-outs of conversations that had none since a time."""
        ...

    async def use(self, session_id: str, at: float) -> None:
        """Note that a request arrived."""
        ...

    async def close_session(self, session_id: str, because: ClosedBecause, at: float) -> bool:
        """Close a session; return False if it was closed before."""
        ...

    async def expired(self, now: float, idle: float, age: float) -> Sequence[tuple[str, ClosedBecause]]:
        """Return the open sessions whose last request, or whose opening, is longer ago than allowed."""
        ...

    # -- turns --

    async def record(self, turn: TurnRecord) -> None:
        """Keep a turn. One with the same id changes nothing."""
        ...

    async def deliver(self, session_id: str, turn: int) -> None:
        """Note that the client got the turn's last token."""
        ...

    async def mask(self, session_id: str, turn: int, because: MaskReason) -> None:
        """Note that a turn can never be trained on; the first reason stays."""
        ...

    async def follow(self, session_id: str, turn: int, state: NextStateRecord) -> bool:
        """Set a turn's next state; return False if it has one, which stays."""
        ...

    async def mark(self, session_id: str, turn: int, mark: TurnMarkRecord) -> bool:
        """Set a turn's value unless it has one that wins: explicit ones win over all, and the first of others stays.

        Return whether it was set. A turn that a part has taken keeps its value; the new one is kept as a revision.
        """
        ...

    async def turns(self, session_id: str, first: int = 0) -> Sequence[TurnRecord]:
        """Return the turns of a session from this one on, by their ids."""
        ...

    async def turn(self, session_id: str, turn: int) -> TurnRecord | None: ...

    async def to_judge(self, limit: int) -> Sequence[TurnRecord]:
        """Return turns that may be judged and are not, the longest waiting first.

        They are main turns that were delivered, have a next state, and neither a mask, a mark nor a part.
        """
        ...

    # -- parts --

    async def undecided(self, limit: int) -> Sequence[SessionRecord]:
        """Return sessions with a turn that is in no part, those first that were looked at longest ago."""
        ...

    async def fates(self, session_ids: Sequence[str]) -> Mapping[str, Sequence[TurnFate]]:
        """Return the turns of each session that are in no part, by their ids."""
        ...

    async def take_part(
        self,
        session_id: str,
        run_id: str | None,
        usable: Sequence[int],
        dropped: Mapping[int, MaskReason],
        at: float,
    ) -> PartRecord | None:
        """Put turns into a part, all of them or, if one is in a part, none.

        Without usable turns there is no part: the dropped ones are decided, and None is returned.
        """
        ...

    async def parts(
        self, run_id: str | None = None, *, unsubmitted: bool = False, session_id: str | None = None
    ) -> Sequence[PartRecord]:
        """Return parts, the oldest first."""
        ...

    async def give_back_part(self, session_id: str, part: int) -> bool:
        """Undo a part that has no offset, so that its turns can go into another; return False if it has one."""
        ...

    async def set_offset(self, session_id: str, part: int, offset: int | None) -> None:
        """Keep the number of the part's task in its run before it is appended there."""
        ...

    async def claim(self, parts: Sequence[tuple[str, int]], rollout_id: str) -> PartRecord | None:
        """Give a rollout the first of these parts that is free or its own already; None if there is none."""
        ...

    # -- the end --

    async def counts(self, session_id: str | None = None) -> Mapping[str, int]:
        """Return the numbers of turns: `served`, `recorded`, `judged`, `delivered`, `waiting`, `dropped:<reason>`.

        Without an id they are over all sessions, removed ones included.
        """
        ...

    async def feedback(self) -> Sequence[FeedbackByVersion]:
        """Return the values of turns by their session's pool and by their version, removed ones included."""
        ...

    async def delete(self, *, session_id: str | None = None, user: str | None = None) -> Deleted:
        """Remove a session, or all of a user, so that no byte of them stays in the store's files; counts stay."""
        ...

    async def prune(self, now: float, bytes_per_user: int | None) -> int:
        """Remove closed sessions whose turns are all decided, or whose retention is over; return how many."""
        ...


KINDS: Mapping[str, TurnKind] = {kind.value: kind for kind in TurnKind}
"""The values of `X-Turn-Type`."""
