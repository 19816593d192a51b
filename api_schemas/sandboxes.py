"""Live sandboxes, for operators."""

from __future__ import annotations

from typing import Literal

from api_schemas.base import WireModel


class SandboxView(WireModel):
    """A sandbox that is alive."""

    id: str
    label: str
    """The purpose of the sandbox, such as the id of a rollout."""
    image: str
    provider: str
    started_at: float
    """The start as Unix time."""
    pid: int | None
    """The id of the launcher's process on the host."""
    state: Literal["in_use", "warm"]
    """The state of the sandbox; a warm one waits in a pool and does not belong to a rollout yet."""
