"""Requests and responses about backends, pools and weights."""

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
    Timestamp,
    WireModel,
    tagged,
)

FROZEN = "frozen"
FROZEN_NAMES = f"`{FROZEN}` or begins with `{FROZEN}-`"
"""The names of frozen pools, in words."""


def is_frozen(pool: str) -> bool:
    """Return whether a pool is frozen: it takes no new weights, and no run trains it. Its name alone decides."""
    return pool == FROZEN or pool.startswith(f"{FROZEN}-")


class BackendState(StrEnum):
    """Whether a backend takes requests."""

    READY = "ready"
    """In service."""
    FAILED = "failed"
    """Out of service until its probes succeed again."""
    DRAINING = "draining"
    """Finishing its requests, and taking no new ones."""
    PAUSED = "paused"
    """Paused together with its pool."""


class BackendSpec(WireModel):
    """An engine to register. Sending the same URL again changes nothing."""

    url: HttpUrl
    """The address of the engine's own HTTP API."""
    pool: Name = "policy"
    """The pool that the engine joins."""
    kind: Name | None = None
    """The engine's protocol: `sglang`, which the embedded engine has too, `vllm`, or that of a plug-in. If left out,
    the engine is asked which of the first two it has."""
    tokenizer: str | None = None
    """The tokenizer's folder or hub name; if left out, the engine's own path."""
    renderer: str = "auto"
    """The chat format, such as `qwen3`; `auto` chooses it by the model's type."""
    max_in_flight: Count | None = None
    """The most requests that the engine is given at once; if left out, the pool's setting."""
    lease_seconds: Annotated[float, Number] | None = Field(None, ge=1, le=86_400, exclude_if=lambda it: it is None)
    """How long the engine stays registered unless its lease is renewed; if left out, until it is removed. When a pool
    has lost its last engine this way, its rollouts are cancelled."""
    trace: Annotated[Flag, Field(exclude_if=lambda trace: not trace)] = False
    """Whether requests to the engine carry a `traceparent` header, for an engine that exports traces itself. Left out
    of JSON if false."""

    @field_validator("url")
    @classmethod
    def _plain(cls, url: HttpUrl) -> HttpUrl:
        if any(part is not None for part in (url.username, url.password, url.query, url.fragment)):
            raise ValueError("an engine's address has no user, query or fragment")
        return url


class BackendView(WireModel):
    """A registered backend in its present state."""

    backend_id: str
    url: str
    pool: Name
    kind: Name = "sglang"
    state: BackendState
    model_path: str
    tokenizer_path: str
    weight_version: int
    sampled_version: int | None = None
    """The version that its newest tokens have, if it is another: somebody else gave the engine weights."""
    context_length: int
    exports: list[str] = []
    """The token extras that it can return: `top_logprobs`, `prompt_logprobs`, `routed_experts`."""
    in_flight: int
    """Requests of this service that it is working on."""
    queued: int | None = None
    """Requests of all services in its own queue, by its last report; null if it does not report any."""
    served: int
    """Requests of this service that it has answered."""
    failures: int
    """Failed requests and probes."""
    last_error: str | None = None
    failed_at: Timestamp | None = None
    """When the last of them was; null before the first."""


class PauseMode(StrEnum):
    """The effect of a pause on the requests in flight."""

    ABORT = "abort"
    """Requests return the tokens sampled so far, and continue from them later."""
    RETRACT = "retract"
    """Requests return to the engine's queue, and their cache may be flushed."""
    IN_PLACE = "in_place"
    """Requests freeze and keep their cache."""
    DRAIN = "drain"
    """Requests end normally; those that take longer than `drain_seconds` are treated as by `abort`."""


class PauseRequest(WireModel):
    """A request to pause the generation of a pool."""

    pool: Name = "policy"
    mode: PauseMode = PauseMode.ABORT
    drain_seconds: SecondsOrZero = 60.0
    """How long the mode `drain` waits for the requests in flight."""


class ResumeRequest(WireModel):
    """A request to resume the generation of a paused pool."""

    pool: Name = "policy"


class AbortRequest(WireModel):
    """A request to cancel rollouts."""

    rollout_ids: list[RolloutId] | None = None
    """The rollouts to cancel; null means all that have not ended."""


class KvHandling(StrEnum):
    """The handling of the older weights' KV when new weights were loaded."""

    FLUSHED = "flushed"
    """It was dropped: every later token is sampled as if the new weights had read the whole prompt."""
    KEPT = "kept"
    """It stayed in use: later tokens attend to KV that older weights computed."""


DType = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int8", "uint8"]
"""The type of a tensor, by its name in torch."""


class DiskWeights(WireModel):
    """Weights in a folder that the engines can read."""

    model_config = ConfigDict(json_schema_extra=tagged("type"))

    type: Literal["disk"] = "disk"
    path: str = Field(min_length=1)
    """The folder, as the engines see it."""


class DistributedWeights(WireModel):
    """Weights that rank 0 of a process group broadcasts, one tensor at a time, in the order of `names`.

    The backends must have joined the group with `POST /v1/weights/group`.
    """

    type: Literal["distributed"]
    group_name: Name = "weights"
    names: list[str] = Field(min_length=1)
    """The names of the tensors."""
    dtypes: list[DType]
    """The type of each tensor."""
    shapes: list[list[CountOrZero]]
    """The shape of each tensor."""
    bucket_bytes: Annotated[int, Number] = Field(1 << 30, ge=1, le=MAX_INT)
    """The approximate size of the portions in which engines receive the tensors; they need memory for one portion."""

    @model_validator(mode="after")
    def _equal_lengths(self) -> Self:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError("names, dtypes and shapes must have one entry for each tensor")
        return self


class ExternalWeights(WireModel):
    """Weights that the trainer has loaded into the engines itself.

    No engine is paused or asked. The tokens of later requests have this version, whatever the engines report, and those
    of open requests the version before. The trainer sees to it that the engines drop KV of older weights.
    """

    type: Literal["external"]


Weights = Annotated[DiskWeights | DistributedWeights | ExternalWeights, Field(discriminator="type")]


class WeightsRequest(WireModel):
    """A request to load new weights into every backend of a pool.

    Sending the pool's own version again changes nothing; an older version is a 409.
    """

    path: str | None = Field(None, min_length=1)
    """Short for a `source` of the type `disk`."""
    source: Weights | None = None
    """The source of the weights; either this or `path` is required."""
    version: CountOrZero
    """The version number of the new weights."""
    pool: Name = "policy"
    mode: PauseMode = PauseMode.ABORT
    """The treatment of the requests in flight."""
    drain_seconds: SecondsOrZero = 60.0
    """How long the mode `drain` waits for the requests in flight."""
    timeout_seconds: Seconds = 900.0
    """The time limit of each backend; a slower one is taken out of service."""
    force: Flag = False
    """Whether to load the weights even if the pool has this version or a later one."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.source is None):
            raise ValueError("give either path or source")
        return self

    @property
    def weights(self) -> DiskWeights | DistributedWeights | ExternalWeights:
        """The source of the weights, also if it was given as `path`."""
        return self.source or DiskWeights(path=self.path or "")


class WeightsGroupRequest(WireModel):
    """A request that the backends of a pool join a process group, in which the trainer has the first ranks.

    The trainer joins at the same time, through torch's own process groups; its rank 0 listens at `master_address`. The
    backends take the ranks from `rank_offset` on, in the order of their registration.
    """

    pool: Name = "policy"
    group_name: Name = "weights"
    master_address: str = Field(min_length=1)
    """The address of the trainer's rank 0, as the engines reach it."""
    master_port: Annotated[int, Number] = Field(ge=1, le=65_535)
    world_size: Annotated[int, Number] = Field(ge=2, le=MAX_INT)
    """The number of ranks: the trainer's, and one for each accelerator of each backend in service."""
    rank_offset: Count = 1
    """The number of the trainer's ranks."""
    backend: Literal["gloo", "nccl"] = "nccl"
    timeout_seconds: Seconds = 120.0


class BackendOutcome(WireModel):
    """The outcome of an order at one backend of a pool."""

    backend_id: str
    ok: bool
    """Whether the backend carried out the order."""
    seconds: float
    """The time that the order took there."""
    steps: dict[str, float] = {}
    """The seconds of each step that the backend began, such as `pause`, `load`, `resume` and `try`."""
    error: str | None = None
    code: str | None = None
    """The error code, such as `backend_rejected`. It is `out_of_service` for a backend that was out of service before,
    which the order did not wait for."""
    in_flight: int = 0
    """Requests of this service that it was working on when the order arrived."""
    version_before: int | None = None
    version_after: int | None = None
    """The version that it has now; null if unknown, in which case it is out of service until it has the pool's
    weights."""
    ranks: list[int] = []
    """Its ranks in the process group that it joined."""


class PoolOutcome(WireModel):
    """The outcome of an order at all backends of a pool."""

    pool: Name
    version: int | None = None
    """The version of the pool's weights."""
    changed: bool = True
    """Whether the order changed anything; false, for example, if the pool had these weights already."""
    kv: KvHandling | None = None
    """The handling of the previous weights' KV."""
    held: int = 0
    """Requests that were waiting when the order was complete."""
    held_seconds: float = 0.0
    """How long requests were held for the order."""
    outcomes: list[BackendOutcome]
    """The outcome at each backend."""
    nodes_not_held: list[str] = []
    """Nodes of a cluster that did not confirm in time that they hold their requests; the order did not wait longer."""
