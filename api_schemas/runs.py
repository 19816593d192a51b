"""Runs: a trainer's standing order, and the batches of groups that it yields by lease and acknowledgement.

A group is `group_size` rollouts of one task; a batch is `batch_size` groups that passed the run's filters.
Counting is in groups unless a name says otherwise. The rollouts of a group are ordinary rollouts with the ids
`<run>.<task number>.<sample>`, and `.<retry>` behind it when one was repeated after an infrastructure failure.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, StringConstraints, model_validator
from typing_extensions import Self

from api_schemas.base import (
    MAX_INT,
    Count,
    CountOrZero,
    Flag,
    Name,
    Number,
    RolloutId,
    SecondsOrZero,
    Signed,
    StrEnum,
    Timestamp,
    WireModel,
    tagged,
)
from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import Rollout, Sampling
from api_schemas.tasks import Limits, Task

RunId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
"""An identifier of a run: 1-64 letters, digits, `_` or `-`."""

BatchId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")]
"""An identifier of a batch: `<run>.b<number>`."""

BINARY_MEDIA_TYPE = "application/vnd.rollout.batch+safetensors"
"""What a client accepts to get a batch as arrays; JSON is the default."""


class InlineTasks(WireModel):
    """Tasks that come with the request, or are appended later."""

    model_config = ConfigDict(json_schema_extra=tagged("kind"))

    kind: Literal["inline"] = "inline"
    tasks: list[Task] = []
    open: Flag = False
    """Whether more may be appended; such a run goes on until an append closes it, or it is ended."""
    seed: Signed = 0
    epochs: Count | None = 1
    """How often the tasks are gone through; null means endless."""
    shuffle: Flag = False
    """Whether each epoch has an order of its own, drawn from the seed and the epoch's number."""

    @model_validator(mode="after")
    def _open_is_in_order(self) -> Self:
        if self.open and (self.shuffle or self.epochs != 1):
            raise ValueError("tasks that may be appended to are taken once and in order")
        return self


class FileTasks(WireModel):
    """Instances of one environment from a file that the service can read; it must not change while the run lasts."""

    model_config = ConfigDict(json_schema_extra=tagged("kind"))

    kind: Literal["file"] = "file"
    path: str
    """A `.jsonl` file with an instance (an object) a line, or a `.parquet` file with an instance a row."""
    environment: Name
    seed: Signed = 0
    epochs: Count | None = 1
    """How often the file is gone through; null means endless."""
    shuffle: Flag = False
    """Whether each epoch has an order of its own, drawn from the seed and the epoch's number."""


class DatasetTasks(WireModel):
    """Instances that ship with an environment; they must not change while the run lasts."""

    model_config = ConfigDict(json_schema_extra=tagged("kind"))

    kind: Literal["dataset"] = "dataset"
    environment: Name
    split: str | None = None
    """Which part of the data set, such as `train`; needed exactly where the data set has splits."""
    seed: Signed = 0
    epochs: Count | None = 1
    """How often the instances are gone through; null means endless."""
    shuffle: Flag = False
    """Whether each epoch has an order of its own, drawn from the seed and the epoch's number."""


TaskSource = Annotated[InlineTasks | FileTasks | DatasetTasks, Field(discriminator="kind")]


class FilterSpec(WireModel):
    """A filter by its name, as in `zero_variance`, with its options."""

    name: Name
    options: dict[str, JsonValue] = {}


class Stragglers(WireModel):
    """When a group stops waiting for its slowest rollouts: they are cancelled and masked.

    A rollout is cut off once it has run longer than `factor` times the `quantile` of this run's rollout times, in
    a group where at least `min_samples` have ended.
    """

    quantile: Annotated[float, Number] = Field(0.95, gt=0.0, lt=1.0)
    factor: Annotated[float, Number] = Field(1.5, ge=1.0, le=1e6)
    min_samples: Annotated[int, Number] = Field(2, ge=2, le=MAX_INT)


class OverlongPenalty(WireModel):
    """DAPO's soft penalty: 0 up to `max_tokens - buffer_tokens` sampled tokens, then falling to `-penalty`."""

    max_tokens: Count
    buffer_tokens: Count
    penalty: Annotated[float, Number] = Field(1.0, gt=0.0, le=1e6)

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError("buffer_tokens may not exceed max_tokens")
        return self


class Advantages(StrEnum):
    """Which advantages are attached to the samples."""

    NONE = "none"
    GROUP_NORM = "group_norm"
    """(reward - mean) / standard deviation over the group's usable samples."""
    LEAVE_ONE_OUT = "leave_one_out"
    """reward - mean of the group's other usable samples."""


class Surplus(StrEnum):
    """What becomes of groups beyond those that the next batch needs."""

    CANCEL = "cancel"
    """Those under way are cancelled as soon as what was asked for is there, and counted as dropped."""
    CARRY_OVER = "carry_over"
    """They go into the next batch while their staleness allows."""


class Retention(WireModel):
    """How long the tokens of groups are kept that were acknowledged or dropped. Nothing unacknowledged is deleted."""

    seconds: SecondsOrZero | None = 86_400.0
    """Since the acknowledgement; null is for ever."""
    max_bytes: CountOrZero | None = None
    """Compressed bytes of this run; the oldest go first."""


class RunRequest(WireModel):
    """A standing order. Sending it again under the same `run_id` changes nothing."""

    run_id: RunId | None = None
    """Chosen by the caller, or by the service when left out."""
    source: TaskSource
    group_size: Annotated[int, Number] = Field(8, ge=1, le=1_024)
    """Rollouts of each task."""
    batch_size: Annotated[int, Number] = Field(ge=1, le=65_536)
    """Groups in a batch. The last batch of a run may have fewer."""
    pool: Name = "policy"
    sampling: Sampling = Sampling()
    """A seed of it is made each sample's own by adding the sample's number."""
    limits: Limits = Limits()
    filters: list[FilterSpec] = [FilterSpec(name="zero_variance")]
    """A group is dropped by the first of them that says so, with the reason counted."""
    version: CountOrZero = 0
    """The version of the trainer when the run begins."""
    max_staleness: CountOrZero | None = None
    """Eta: how many versions the oldest token of a batch may lie behind the trainer; null does not look."""
    max_concurrent: Count = 64
    """Groups under way at once, at most."""
    prefetch_batches: CountOrZero = 1
    """Batches that may be made ahead of the one that is asked for."""
    surplus: Surplus = Surplus.CARRY_OVER
    stragglers: Stragglers | None = None
    overlong: OverlongPenalty | None = None
    advantages: Advantages = Advantages.NONE
    infrastructure_retries: CountOrZero = 1
    """How often a sample that failed without being the policy's fault is rolled out again before it is masked."""
    min_usable: Count = 1
    """A group with fewer usable samples is dropped."""
    priority: Signed = 0
    """Runs of a higher priority are served first."""
    weight: Annotated[float, Number] = Field(1.0, gt=0.0, le=1e6)
    """The share of the service among runs of one priority."""
    retention: Retention = Retention()
    metadata: dict[str, JsonValue] = {}
    """Handed back untouched."""

    @model_validator(mode="after")
    def _usable_fits(self) -> Self:
        if self.min_usable > self.group_size:
            raise ValueError("min_usable may not exceed group_size")
        return self


class RunState(StrEnum):
    """Where a run stands. The last two are final."""

    RUNNING = "running"
    PAUSED = "paused"
    """No group is begun; those under way end, and batches are still leased."""
    ENDED = "ended"
    """Its caller ended it: what was under way is cancelled; finished groups can still be leased."""
    FINISHED = "finished"
    """Every task was taken, and every batch is acknowledged."""


class RunPatch(WireModel):
    """What may change while a run lasts; a field that is left out stays."""

    state: Literal[RunState.RUNNING, RunState.PAUSED, RunState.ENDED] | None = None
    version: CountOrZero | None = None
    """The version that the trainer has reached; it never goes back."""
    priority: Signed | None = None
    weight: Annotated[float, Number] | None = Field(None, gt=0.0, le=1e6)
    max_concurrent: Count | None = None


class AppendTasks(WireModel):
    """Tasks for an open run. Sending them again at the same offset changes nothing."""

    tasks: list[Task]
    offset: CountOrZero | None = None
    """How many tasks the run has before these; another number is a conflict. Left out, they go to the end."""
    close: Flag = False
    """Whether these are the last."""


class RunCounts(WireModel):
    """How many groups of a run are where, and what became of the others."""

    open: int = 0
    """Under way."""
    ready: int = 0
    """They passed the filters and wait for a batch."""
    batched: int = 0
    """In a batch that is not acknowledged."""
    acknowledged: int = 0
    dropped: dict[str, int] = {}
    """By reason, as in `zero_variance`, `stale` or `cancelled`."""
    samples_masked: int = 0
    samples_stale: int = 0
    """Those among the masked ones that had grown too old."""
    samples_retried: int = 0
    batches_acknowledged: int = 0


class Run(WireModel):
    """A run as it stands."""

    run_id: RunId
    state: RunState
    request: RunRequest
    """As it was ordered, with what was patched since; inline tasks are left out."""
    version: int
    """The newest version known of the trainer."""
    tasks: int | None
    """Tasks in one epoch, so far."""
    cursor: int
    """Tasks taken so far, over all epochs; the number of the next one."""
    acceptance_rate: float
    """The share of closed groups that pass the filters, as learned so far."""
    counts: RunCounts
    problem: ErrorInfo | None = None
    """Why the run cannot go on, and what to do; it goes on when it is resumed."""
    created_at: Timestamp
    ended_at: Timestamp | None = None


class RunPage(WireModel):
    """All runs, oldest first."""

    runs: list[Run]


class GroupSample(WireModel):
    """One rollout of a group, and whether it counts."""

    sample: int
    """Counted from 0."""
    rollout: Rollout
    """With its trajectory."""
    usable: bool
    """Whether it was scored; one that is not is masked and has no advantage."""
    masked_because: str | None = None
    """The code of the error, `straggler`, `cancelled`, or `stale`, which comes without its trajectory."""
    reward: float | None = None
    """The reward with the penalties of the run; null exactly when the sample is masked."""
    advantage: float | None = None
    """When the run asks for one and the sample is usable."""


class Group(WireModel):
    """The rollouts of one task."""

    group_id: RolloutId
    """`<run>.<task number>`"""
    number: int
    """The task's number over all epochs."""
    epoch: int
    task: Task
    samples: list[GroupSample]
    usable: int
    """How many samples count."""
    reward_mean: float | None
    reward_std: float | None
    """Over the usable samples, dividing by their number."""
    oldest_version: int | None
    """The oldest version that sampled a token of a usable sample; null when nothing was sampled."""
    newest_version: int | None


class Batch(WireModel):
    """Groups to train on, leased until it is acknowledged, given back, or the lease runs out."""

    batch_id: BatchId
    run_id: RunId
    number: int
    """Counted from 0."""
    groups: list[Group]
    delivery: int
    """How often it was leased, this time included; from 2 on it may have been seen before."""
    lease_until: Timestamp
    version: int
    """The trainer's version when it was leased."""
    oldest_version: int | None
    """Over the groups."""
    newest_version: int | None
    dropped: dict[str, int]
    """Groups of this run dropped between the batch before and this one, by reason."""


class BatchAnswer(WireModel):
    """What became of an acknowledgement, its opposite, or a renewal."""

    batch_id: BatchId
    state: Literal["acknowledged", "returned", "leased"]
    lease_until: Timestamp | None = None
    """Set if and only if it is leased."""
