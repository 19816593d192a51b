"""Live sessions in rollouts: the outcome of each turn of served traffic, and whose session it is.

A part of a session is a rollout of the task `{"environment": "session"}`. Its trajectory is that of the session so far,
with mask 1 on the usable turns of this part alone: an unusable turn stays in the context of later ones, with mask 0.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from api_schemas.base import Flag, Integer, Name, Real, StrEnum, Timestamp, WireModel


class RolloutKind(StrEnum):
    """Where a rollout comes from."""

    TASK = "task"
    """An agent worked on a task."""
    SESSION = "session"
    """It is a part of a live session, which was served before."""


class TurnKind(StrEnum):
    """The purpose of a session's turn."""

    MAIN = "main"
    """A turn that serves the user."""
    SIDE = "side"
    """A call beside it, such as one for a title: served, never judged, never trained."""


class MaskReason(StrEnum):
    """Why a turn of a session is not trained on."""

    SIDE = "side"
    NO_NEXT_STATE = "no_next_state"
    """Nothing followed it, so nothing tells how good it was."""
    ZERO = "zero"
    """It was judged ambiguous, and the run drops such turns."""
    SUPERSEDED = "superseded"
    """Its client did not get it, and asked again."""
    UNDELIVERED = "undelivered"
    """Its client went away before its last token."""
    REDACTED = "redacted"
    """A detector found something in it that may not be kept."""
    OPTED_OUT = "opted_out"
    """The request or the session is not to be trained on."""
    JUDGE_FAILED = "judge_failed"
    """The judge gave no verdict, in time or at all."""
    FOREIGN = "foreign"
    """Its log-probabilities are not the policy's own, as for an answer that had to fit a schema."""
    QUARANTINED = "quarantined"
    """It belongs to one of the first sessions of a new user."""
    NO_RUN = "no_run"
    """It was kept as long as the settings allow, and no run took it."""


class MarkReason(StrEnum):
    """The reason for a turn's value, or for the lack of one."""

    MAJORITY = "majority"
    """More of the judge's valid votes agree on it than on any other."""
    TIE = "tie"
    """No value has most of the valid votes: the value is 0."""
    ALL_FAILED = "all_failed"
    """No vote is valid: there is no value."""
    TIMEOUT = "timeout"
    """No vote came in time: there is no value."""
    OVERRIDE = "override"
    """A rule of the settings decided, whatever the judge says; `source` names it."""
    EXPLICIT = "explicit"
    """The user's own feedback."""


class Votes(WireModel):
    """The judge's votes on one turn."""

    minus: Integer = 0
    zero: Integer = 0
    plus: Integer = 0
    failed: Integer = 0
    """Votes that did not come in time, or have no value that can be read."""


class JudgedBy(WireModel):
    """Which judge it was."""

    pool: Name
    model: str
    """The model, as `path@version`."""
    prompt_hash: str
    """Identifies the prompt's template, without any content."""


class NextState(WireModel):
    """The messages that followed a turn's answer, up to the client's next request."""

    role: Literal["user", "tool", "mixed"]
    chars: Integer
    sha256: str
    """The SHA-256 of the text, encoded as UTF-8."""
    text: Annotated[str | None, Field(exclude_if=lambda text: text is None)] = None
    """The text; left out unless the run asks for it."""


class Hint(WireModel):
    """A hint, taken from the next state, at how the answer should have been."""

    text: str
    prompt_ids: list[Integer]
    """The turn's prompt with the hint at the end of its last user message, by the policy's own chat format. Followed by
    the turn's sampled ids, it is the input of a teacher."""
    candidates: Integer
    """The number of hints that the judge proposed."""
    selected_by: Literal["longest", "overlap"]


class Teacher(WireModel):
    """How likely the turn's sampled tokens are to a model that knows the hint; one entry per sampled token."""

    model: str
    """The model, as `path@version`."""
    logprobs: list[Real]
    top_ids: Annotated[list[list[Integer]] | None, Field(exclude_if=lambda ids: ids is None)] = None
    top_logprobs: Annotated[list[list[Real]] | None, Field(exclude_if=lambda top: top is None)] = None


class TurnMark(WireModel):
    """The value of one turn of a session, and whether it is trained on."""

    turn: Integer
    """The turn's id in the trajectory: it stands for all tokens with this `turn_ids`."""
    kind: TurnKind = TurnKind.MAIN
    usable: Flag
    """Whether it is trained on in this part."""
    masked_because: MaskReason | None = None
    """Null if it is usable, and where nothing is decided yet, as in an open session."""
    value: Real | None = None
    """From -1 to 1; null if nobody judged it, which is not the same as 0."""
    reason: MarkReason | None = None
    """The reason for the value, or for the lack of one; null if the turn was never to be judged."""
    source: str | None = None
    """`judge`, `explicit`, or `override:<name>`."""
    votes: Annotated[Votes | None, Field(exclude_if=lambda votes: votes is None)] = None
    judge: Annotated[JudgedBy | None, Field(exclude_if=lambda judge: judge is None)] = None
    next_state: Annotated[NextState | None, Field(exclude_if=lambda state: state is None)] = None
    hint: Annotated[Hint | None, Field(exclude_if=lambda hint: hint is None)] = None
    teacher: Annotated[Teacher | None, Field(exclude_if=lambda teacher: teacher is None)] = None


class ClosedBecause(StrEnum):
    """Why a session ended."""

    EXPLICIT = "explicit"
    IDLE = "idle"
    MAX_AGE = "max_age"
    DELETED = "deleted"
    DRAINED = "drained"


class SessionInfo(WireModel):
    """The session that a rollout is a part of."""

    session_id: str
    """Opaque: any text of up to 256 characters."""
    user: str
    """A salted hash of the user, the same for all sessions of one user of this service."""
    tenant: Name
    continues: str | None = None
    """The session that this one goes on from."""
    closed_because: ClosedBecause | None = None
    """Null while the session is open."""
    opened_at: Timestamp
    closed_at: Timestamp | None = None
    part: Integer
    """The number of this part of the session, counted from 0."""
