"""Events of the service, in order, for dashboards and progress bars."""

from __future__ import annotations

from pydantic import JsonValue

from api_schemas.base import Timestamp, WireModel


class Event(WireModel):
    """Something that happened in the service."""

    event_id: int
    """A number that grows by one per event, also across restarts; a reader can resume after it."""
    time: Timestamp
    kind: str
    """The kind of event, such as `rollout.state` or `backend.failed`."""
    subject: str
    """The id of what it concerns, such as a rollout or a backend."""
    data: dict[str, JsonValue] = {}
