"""Events: what happened in the service, in order, for dashboards and progress bars."""

from __future__ import annotations

from pydantic import JsonValue

from api_schemas.base import Timestamp, WireModel


class Event(WireModel):
    """Something that happened. Ids grow by one and survive a restart, so that a reader can resume."""

    event_id: int
    time: Timestamp
    kind: str
    """As in `rollout.state` or `backend.failed`."""
    subject: str
    """What it happened to: the id of a rollout or a backend."""
    data: dict[str, JsonValue] = {}
