"""Which live sessions a run trains on, and when their turns are handed to it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from api_schemas.base import Count, Flag, Name, Number, Seconds, WireModel

Share = Annotated[float, Number, Field(gt=0.0, le=1.0)]


class LiveDelivery(WireModel):
    """A run's order for the parts of live sessions of its pool."""

    tenants: list[Name] = Field(["default"], min_length=1)
    """The tenants whose sessions it takes. If several runs would take a session, the oldest does."""
    mix_tenants: Flag = False
    """Whether a batch may have parts of several tenants."""
    close_turns: Count = 8
    """A part of an open session is handed over once it has this many judged turns."""
    close_seconds: Seconds = 300.0
    """It is handed over at the latest this long after its first judged turn."""
    judge_seconds: Seconds = 60.0
    """How long a part waits for turns of it whose judgment is due; then they are `judge_failed`."""
    zeros: Literal["drop", "keep", "at_least_one"] = "drop"
    """The treatment of turns that were judged ambiguous; `at_least_one` keeps one of a part that would have none, the
    one with the longest prefix of judged turns."""
    max_user_share: Share = 0.25
    """The largest share of one user in a batch, but at least one part. A batch waits until other users fill it."""
    max_session_share: Share = 0.25
    """The same for one session."""
    next_state: Flag = False
    """Whether to deliver the text of each turn's next state."""
    teacher: Flag = False
    """Whether to deliver the log-probabilities of a teacher that knows the hint."""
