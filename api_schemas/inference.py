"""Backends, pools and weights on the wire."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, HttpUrl, field_validator, model_validator
from typing_extensions import Self

from api_schemas.base import (
    MAX_INT,
    Count,
    CountOrZero,
    Flag,
    Name,
    Number,
    RolloutId,
    Seconds,
    SecondsOrZero,
    StrEnum,
    WireModel,
    tagged,
)


class BackendState(StrEnum):
    """Whether a backend takes requests."""

    READY = "ready"
    FAILED = "failed"
    """Out of service until its probes succeed again."""
    DRAINING = "draining"
    """Finishes what it has and takes nothing new."""
    PAUSED = "paused"


class EngineKind(StrEnum):
    """Which protocol an engine speaks."""

    SGLANG = "sglang"
    """SGLang's own; the embedded engine's too."""
    VLLM = "vllm"
    """vLLM's token-in, token-out route."""


class BackendSpec(WireModel):
    """An engine to register. Sending the same URL again changes nothing."""

    url: HttpUrl
    """Address of the engine's own HTTP API."""
    pool: Name = "policy"
    """The policy that it serves."""
    kind: EngineKind | None = None
    """Left out, the engine is asked which it is."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; the engine's own path when left out."""
    renderer: str = "auto"
    """The chat format, as in `qwen3`; `auto` goes by the model's type."""
    max_in_flight: Count | None = None
    """Requests that it is given at once; the pool's setting when left out."""

    @field_validator("url")
    @classmethod
    def _plain(cls, url: HttpUrl) -> HttpUrl:
        if any(part is not None for part in (url.username, url.password, url.query, url.fragment)):
            raise ValueError("an engine's address has no user, query or fragment")
        return url


class BackendView(WireModel):
    """A backend as the service sees it."""

    backend_id: str
    url: str
    pool: Name
    kind: EngineKind = EngineKind.SGLANG
    state: BackendState
    model_path: str
    tokenizer_path: str
    weight_version: int
    context_length: int
    exports: list[str] = []
    """What it gives beside ids and log-probabilities, when a rollout asks for it: `top_logprobs`, `prompt_logprobs`,
    `routed_experts`."""
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
    DRAIN = "drain"
    """They end as they would have; those that take longer than `drain_seconds` are aborted and resumed."""


class PauseRequest(WireModel):
    """Pause the generation of a pool."""

    pool: Name = "policy"
    mode: PauseMode = PauseMode.ABORT
    drain_seconds: SecondsOrZero = 60.0
    """How long the mode `drain` waits."""


class ResumeRequest(WireModel):
    """Let a paused pool go on."""

    pool: Name = "policy"


class AbortRequest(WireModel):
    """Cancel rollouts: those named, or all that are not finished."""

    rollout_ids: list[RolloutId] | None = None


class KvHandling(StrEnum):
    """What became of the KV that older weights had computed when new ones were loaded."""

    FLUSHED = "flushed"
    """It was dropped: every later token is sampled as if the new weights had read the whole prompt."""
    KEPT = "kept"
    """It stayed in use: later tokens attend to what older weights computed."""


DType = Literal[
    "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int8", "uint8"
]
"""The name of a tensor's type, as torch spells it."""


class DiskWeights(WireModel):
    """Weights in a folder that the engines can read."""

    model_config = ConfigDict(json_schema_extra=tagged("type"))

    type: Literal["disk"] = "disk"
    path: str = Field(min_length=1)


class DistributedWeights(WireModel):
    """Weights that rank 0 of a process group broadcasts, tensor by tensor in the order of `names`.

    The backends must have joined the group: `POST /v1/weights/group`.
    """

    type: Literal["distributed"]
    group_name: Name = "weights"
    names: list[str] = Field(min_length=1)
    dtypes: list[DType]
    shapes: list[list[CountOrZero]]
    bucket_bytes: Annotated[int, Number] = Field(1 << 30, ge=1, le=MAX_INT)
    """The engines receive the tensors in portions of about this size, so that they need room for one only."""

    @model_validator(mode="after")
    def _equal_lengths(self) -> Self:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError("names, dtypes and shapes must have one entry for each tensor")
        return self


Weights = Annotated[DiskWeights | DistributedWeights, Field(discriminator="type")]


class WeightsRequest(WireModel):
    """Load new weights into every backend of a pool.

    The same version again changes nothing; an older one than the pool has is a 409.
    """

    path: str | None = Field(None, min_length=1)
    """Short for a `source` of the type `disk`."""
    source: Weights | None = None
    version: CountOrZero
    pool: Name = "policy"
    mode: PauseMode = PauseMode.ABORT
    drain_seconds: SecondsOrZero = 60.0
    """How long the mode `drain` waits for the requests in flight."""
    timeout_seconds: Seconds = 900.0
    """A backend that takes longer leaves service."""
    force: Flag = False
    """Load them even if the pool has this version, or a later one."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.source is None):
            raise ValueError("give either path or source")
        return self

    @property
    def weights(self) -> DiskWeights | DistributedWeights:
        """Where the weights come from, in whichever way it was said."""
        return self.source or DiskWeights(path=self.path or "")


class WeightsGroupRequest(WireModel):
    """Let the backends of a pool join a process group, in which the trainer has the first ranks.

    The trainer joins at the same time, with torch's own process group; rank 0 of it listens at
    `master_address`. The backends take the ranks from `rank_offset` on, in the order of their registration.
    """

    pool: Name = "policy"
    group_name: Name = "weights"
    master_address: str = Field(min_length=1)
    master_port: Annotated[int, Number] = Field(ge=1, le=65_535)
    world_size: Annotated[int, Number] = Field(ge=2, le=MAX_INT)
    """The trainer's ranks and one for each accelerator of each backend that is in service."""
    rank_offset: Count = 1
    """How many ranks the trainer has."""
    backend: Literal["gloo", "nccl"] = "nccl"
    timeout_seconds: Seconds = 120.0


class BackendOutcome(WireModel):
    """What one backend answered to an order that went to all of them."""

    backend_id: str
    ok: bool
    seconds: float
    steps: dict[str, float] = {}
    """Seconds of each part of the order that it has begun, as `pause`, `load`, `resume`."""
    error: str | None = None
    code: str | None = None
    """The kind of the error, as in `backend_rejected`; `out_of_service` for a backend that the order did not wait
    for, because it was away before."""
    in_flight: int = 0
    """Requests of this service that it was working on when the order came."""
    version_before: int | None = None
    version_after: int | None = None
    """None where it is not known: the backend is out of service until it has the pool's weights."""
    ranks: list[int] = []
    """Its ranks in the process group that it has joined."""


class PoolOutcome(WireModel):
    """The answers of all backends of a pool to one order."""

    pool: Name
    version: int | None = None
    """The version of the pool's weights."""
    changed: bool = True
    """False for weights that the pool had already: nothing was done."""
    kv: KvHandling | None = None
    """What became of the KV of the weights before."""
    held: int = 0
    """Requests that were waiting when the order had been carried out."""
    held_seconds: float = 0.0
    """How long requests were held for it."""
    outcomes: list[BackendOutcome]
