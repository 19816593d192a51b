"""Backends, pools and weights on the wire."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, HttpUrl

from api_schemas.base import Name, RolloutId, WireModel


class BackendState(StrEnum):
    """Whether a backend takes requests."""

    READY = "ready"
    FAILED = "failed"
    """Out of service until its probes succeed again."""
    DRAINING = "draining"
    """Finishes what it has and takes nothing new."""
    PAUSED = "paused"


class BackendSpec(WireModel):
    """An engine to register. Sending the same URL again changes nothing."""

    url: HttpUrl
    pool: Name = "policy"
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; the engine's own path when left out."""
    renderer: str = "auto"
    """The chat format, as in `qwen3`; `auto` goes by the model's type."""


class BackendView(WireModel):
    """A backend as the service sees it."""

    backend_id: str
    url: str
    pool: Name
    state: BackendState
    model_path: str
    tokenizer_path: str
    weight_version: int
    context_length: int
    in_flight: int
    """Requests of this service that it is working on."""
    served: int
    failures: int
    last_error: str | None = None


class PauseMode(StrEnum):
    """What a pause does to the requests in flight."""

    ABORT = "abort"
    """They return what they have, and are resumed from it."""
    RETRACT = "retract"
    """They go back to the engine's queue, and their cache may be flushed."""
    IN_PLACE = "in_place"
    """They freeze and keep their cache."""


class PauseRequest(WireModel):
    """Pause the generation of a pool."""

    pool: Name = "policy"
    mode: PauseMode = PauseMode.ABORT


class ResumeRequest(WireModel):
    """Let a paused pool go on."""

    pool: Name = "policy"


class AbortRequest(WireModel):
    """Cancel rollouts: those named, or all that are not finished."""

    rollout_ids: list[RolloutId] | None = None


class WeightsRequest(WireModel):
    """Load new weights into every backend of a pool, from a folder that the engines can read."""

    path: str = Field(min_length=1)
    version: int = Field(ge=0)
    pool: Name = "policy"
    mode: PauseMode = PauseMode.ABORT


class BackendOutcome(WireModel):
    """What one backend answered to an order that went to all of them."""

    backend_id: str
    ok: bool
    seconds: float
    error: str | None = None


class PoolOutcome(WireModel):
    """The answers of all backends of a pool to one order."""

    pool: Name
    version: int | None = None
    outcomes: list[BackendOutcome]
