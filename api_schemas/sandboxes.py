"""Live sandboxes, for operators."""

from __future__ import annotations

from typing import Literal

from api_schemas.base import WireModel


class SandboxView(WireModel):
    """A sandbox that is alive."""

    id: str
    label: str
    """What it was started for, such as the id of a rollout."""
    image: str
    provider: str
    started_at: float
    """Unix time."""
    pid: int | None
    """The launcher's process on the host."""
    state: Literal["in_use", "warm"]
    """A warm sandbox waits in a pool and does not belong to a rollout yet."""
