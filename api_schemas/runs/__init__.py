"""Runs: a trainer's standing orders, and the batches of groups that they deliver by lease and acknowledgment.

A group is `group_size` rollouts of one task; a batch is `batch_size` groups that passed the run's filters.
Counts are in groups unless a name says otherwise. The rollouts of a group are ordinary rollouts with the ids
`<run>.<task number>.<sample>`; a rollout that was repeated after an infrastructure failure has `.<retry>` appended.
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
    TraceContext,
    WireModel,
    tagged,
)
from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import Rollout, Sampling
from api_schemas.rollouts.figures import RunParallel, StepsSpread
from api_schemas.rollouts.trees import NodeDetail
from api_schemas.runs.auxiliary import Auxiliary, RewardPart, RewardWeights
from api_schemas.runs.live import LiveDelivery
from api_schemas.tasks import Limits, Task

RunId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
"""The identifier of a run: 1-64 letters, digits, `_` or `-`."""

BatchId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")]
"""The identifier of a batch: `<run>.b<number>`."""

MAX_FAILED_IN_A_ROW = 32
"""The default of a run's `max_failed_in_a_row`: more than one broken corner of a data set has, since tasks are often
sorted, and few enough that a broken grader wastes minutes of the engines, not a night."""

BINARY_MEDIA_TYPE = "application/vnd.rollout.batch+safetensors"
"""The media type that a client accepts to get a batch as arrays; JSON is the default."""
COMPRESSED_MEDIA_TYPE = f"{BINARY_MEDIA_TYPE}+zstd"
"""The same as frames of zstd."""
DECODED_LENGTH = "X-Decoded-Content-Length"
"""The header of a compressed batch with its length in bytes before."""


class InlineTasks(WireModel):
    """Tasks that are part of the request, or are appended later."""

    model_config = ConfigDict(json_schema_extra=tagged("kind"))

    kind: Literal["inline"] = "inline"
    tasks: list[Task] = []
    open: Flag = False
    """Whether more tasks may be appended; such a run goes on until an append closes it, or until it is ended."""
    seed: Signed = 0
    epochs: Count | None = 1
    """The number of passes over the tasks; null means endless."""
    shuffle: Flag = False
    """Whether to shuffle each epoch, from the seed and the number of the epoch."""

    @model_validator(mode="after")
    def _open_is_in_order(self) -> Self:
        if self.open and (self.shuffle or self.epochs != 1):
            raise ValueError("tasks that may be appended to are taken once and in order")
        return self


class FileTasks(WireModel):
    """Instances of one environment from a file on the service's machine. It must not change while the run lasts."""

    model_config = ConfigDict(json_schema_extra=tagged("kind"))

    kind: Literal["file"] = "file"
    path: str
    """A `.jsonl` file with one instance (an object) per line, or a `.parquet` file with one instance per row.
    A key with the role `submit` may name only files in the folders of the service's setting `data_dirs`."""
    environment: Name
    seed: Signed = 0
    epochs: Count | None = 1
    """The number of passes over the file; null means endless."""
    shuffle: Flag = False
    """Whether to shuffle each epoch, from the seed and the number of the epoch."""


class DatasetTasks(WireModel):
    """Instances that ship with an environment. They must not change while the run lasts."""

    model_config = ConfigDict(json_schema_extra=tagged("kind"))

    kind: Literal["dataset"] = "dataset"
    environment: Name
    split: str | None = None
    """The part of the data set to use, such as `train`; required if, and only if, the data set has splits."""
    seed: Signed = 0
    epochs: Count | None = 1
    """The number of passes over the instances; null means endless."""
    shuffle: Flag = False
    """Whether to shuffle each epoch, from the seed and the number of the epoch."""


TaskSource = Annotated[InlineTasks | FileTasks | DatasetTasks, Field(discriminator="kind")]


class FilterSpec(WireModel):
    """A filter by its name, such as `zero_variance`, with its options."""

    name: Name
    options: dict[str, JsonValue] = {}


class Stragglers(WireModel):
    """When a group stops waiting for its slowest rollouts, which are then cancelled and masked.

    A rollout is cut off once it has run longer than `factor` times the `quantile` of this run's rollout times, if at
    least `min_samples` rollouts of its group have ended.
    """

    quantile: Annotated[float, Number] = Field(0.95, gt=0.0, lt=1.0)
    factor: Annotated[float, Number] = Field(1.5, ge=1.0, le=1e6)
    min_samples: Annotated[int, Number] = Field(2, ge=2, le=MAX_INT)


class BranchAt(StrEnum):
    """The turns at which a group's branches begin."""

    UNCERTAIN = "uncertain"
    """Those whose tokens have the lowest mean log-probability."""
    SPREAD = "spread"
    """Turns at equal distances."""
    TOOL_ERROR = "tool_error"
    """Turns with a tool call that failed, in order, so that another call is sampled."""
    PROPOSED = "proposed"
    """Turns that the environment proposed, in order."""


class Branching(WireModel):
    """Groups that are trees: `roots` samples run from the task; once they have ended, the others branch off them.

    A sample runs from the task as well if no root has a turn to branch at, after its first.
    """

    roots: Count
    """How many; half of the group is a good choice if the trainer's loss is a mean over tokens."""
    at: BranchAt | Annotated[list[Count], Field(min_length=1, max_length=64)] = BranchAt.UNCERTAIN
    """The turns at which branches begin, by a rule or by their numbers, counted from 0. Roots without such a turn are
    branched as with `uncertain`."""
    reuse_results: Flag = False
    """As in `BranchPoint`."""


class OverlongPenalty(WireModel):
    """DAPO's soft penalty for long rollouts.

    It is 0 up to `max_tokens - buffer_tokens` sampled tokens, then falls to `-penalty`.
    """

    max_tokens: Count
    buffer_tokens: Count
    penalty: Annotated[float, Number] = Field(1.0, gt=0.0, le=1e6)

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError("buffer_tokens may not exceed max_tokens")
        return self


class Advantages(StrEnum):
    """The kind of advantages that samples get."""

    NONE = "none"
    GROUP_NORM = "group_norm"
    """(reward - mean) / standard deviation over the group's usable samples."""
    LEAVE_ONE_OUT = "leave_one_out"
    """reward - mean of the group's other usable samples."""
    PARTS_NORM = "parts_norm"
    """The sum of the weighted parts of the reward, each first normalized alone as by `group_norm`; for runs with an
    `auxiliary` reward."""


class Surplus(StrEnum):
    """The treatment of groups that the next batch does not need."""

    CANCEL = "cancel"
    """Groups under way are cancelled as soon as the requested batch is complete, and count as dropped."""
    CARRY_OVER = "carry_over"
    """Groups go into the next batch, as long as their staleness allows it."""


class Retention(WireModel):
    """How long the tokens of acknowledged and dropped groups are kept. Unacknowledged groups are never deleted."""

    seconds: SecondsOrZero | None = 86_400.0
    """The time since the acknowledgment; null means forever."""
    max_bytes: CountOrZero | None = None
    """The limit of the run's compressed bytes; the oldest are deleted first."""


class RunRequest(WireModel):
    """A trainer's standing order for batches. Sending it again under the same `run_id` changes nothing."""

    run_id: RunId | None = None
    """The run's id; if left out, the service chooses one."""
    source: TaskSource
    group_size: Annotated[int, Number] = Field(8, ge=1, le=1_024)
    """The number of rollouts of each task."""
    batch_size: Annotated[int, Number] = Field(ge=1, le=65_536)
    """The number of groups in a batch; the last batch of a run may have fewer."""
    pool: Name = "policy"
    """The pool of engines that serves the agents."""
    sampling: Sampling = Sampling()
    """How the policy is sampled. Each sample gets a seed of its own, if there is one: made of it, of the task's number
    over all epochs, and of the sample's number."""
    limits: Limits = Limits()
    nodes: Annotated[NodeDetail, Field(exclude_if=lambda detail: detail is NodeDetail.NONE)] = NodeDetail.NONE
    """How much of the agents' sub-agents to return with the rollouts, as their `exports.nodes`."""
    live: Annotated[LiveDelivery | None, Field(exclude_if=lambda live: live is None)] = None
    """Which live sessions the run trains on. It needs an open inline source without tasks, since the service appends
    the parts of sessions to it; null means none, and is left out of JSON."""
    filters: list[FilterSpec] = [FilterSpec(name="zero_variance")]
    """The filters, in order: the first that objects drops a group, and its reason is counted."""
    version: CountOrZero = 0
    """The trainer's version when the run begins."""
    max_staleness: CountOrZero | None = None
    """How many versions the oldest token of a batch may be behind the trainer (eta); null means no limit."""
    max_concurrent: Count = 64
    """The most groups under way at once."""
    prefetch_batches: CountOrZero = 1
    """The number of batches to prepare ahead of the one that is requested."""
    surplus: Surplus = Surplus.CARRY_OVER
    """The treatment of groups that the next batch does not need."""
    stragglers: Stragglers | None = None
    """When to cut off slow rollouts; null means never."""
    branching: Annotated[Branching | None, Field(exclude_if=lambda branching: branching is None)] = None
    """Where samples of a group begin in others; null, which is left out of JSON, means that all run from the task."""
    overlong: OverlongPenalty | None = None
    """A penalty on the rewards of long rollouts; null means none."""
    auxiliary: Annotated[Auxiliary | None, Field(exclude_if=lambda auxiliary: auxiliary is None)] = None
    """Rewards for handing on work to sub-agents; null means none, and is left out of JSON."""
    advantages: Advantages = Advantages.NONE
    infrastructure_retries: CountOrZero = 1
    """How often a sample is repeated after a failure that was not the policy's fault, before it is masked."""
    min_usable: Count = 1
    """The fewest usable samples of a group; a group with fewer is dropped."""
    max_failed_in_a_row: Annotated[Count | None, Field(exclude_if=lambda count: count == MAX_FAILED_IN_A_ROW)] = (
        MAX_FAILED_IN_A_ROW
    )
    """The run is paused with its `problem` once this many groups in a row were dropped because every sample failed with
    the same error, which another attempt would not mend, such as that of a broken grader; null sets no limit. The
    default is left out of JSON."""
    max_dropped_in_a_row: Annotated[Count | None, Field(exclude_if=lambda count: count is None)] = None
    """The run is paused with its `problem` once this many groups in a row were dropped, for whatever reason other than
    `stale`, `surplus` or `cancelled`; null sets no limit, and is left out of JSON."""
    priority: Signed = 0
    """The priority of the run; runs with a higher priority are served first."""
    weight: Annotated[float, Number] = Field(1.0, gt=0.0, le=1e6)
    """The run's share of the service, relative to other runs of the same priority."""
    retention: Retention = Retention()
    metadata: dict[str, JsonValue] = {}
    """Data of the caller, returned unchanged."""
    trace: Annotated[TraceContext | None, Field(exclude_if=lambda trace: trace is None)] = None
    """The caller's span, to which the traces of the run's rollouts link; if left out, the header `traceparent` says
    it."""

    @model_validator(mode="after")
    def _usable_fits(self) -> Self:
        if self.min_usable > self.group_size:
            raise ValueError("min_usable may not exceed group_size")
        return self

    @model_validator(mode="after")
    def _roots_fit(self) -> Self:
        if self.branching is not None and self.branching.roots >= self.group_size:
            raise ValueError("branching.roots must be less than group_size")
        if self.branching is not None and self.live is not None:
            raise ValueError("live sessions cannot branch")
        return self

    @model_validator(mode="after")
    def _sessions_have_a_source(self) -> Self:
        if self.live is not None and not (isinstance(self.source, InlineTasks) and self.source.open):
            raise ValueError("a run of live sessions needs an open inline source")
        return self

    @model_validator(mode="after")
    def _parts_are_there(self) -> Self:
        if self.advantages is Advantages.PARTS_NORM and self.auxiliary is None:
            raise ValueError("advantages of parts_norm need an auxiliary reward")
        return self


class RunState(StrEnum):
    """The state of a run. The last two are final."""

    RUNNING = "running"
    PAUSED = "paused"
    """No new groups begin; groups under way end, and batches can still be leased."""
    ENDED = "ended"
    """The caller ended the run: work under way is cancelled, and finished groups can still be leased."""
    FINISHED = "finished"
    """Every task was taken, and every batch is acknowledged."""


class RunPatch(WireModel):
    """Changes to a run that has not ended; fields that are left out stay."""

    state: Literal[RunState.RUNNING, RunState.PAUSED, RunState.ENDED] | None = None
    version: CountOrZero | None = None
    """The version that the trainer has reached; it never goes back."""
    priority: Signed | None = None
    weight: Annotated[float, Number] | None = Field(None, gt=0.0, le=1e6)
    max_concurrent: Count | None = None
    max_failed_in_a_row: Count | None = None
    max_dropped_in_a_row: Count | None = None
    """Like the request's field of this name, except that null leaves it as it is."""


class AppendTasks(WireModel):
    """Tasks for an open run. Sending them again at the same offset changes nothing."""

    tasks: list[Task]
    offset: CountOrZero | None = None
    """The number of tasks that the run has before these; a different number is a conflict. If it is left out, the tasks
    are appended at the end."""
    close: Flag = False
    """Whether these tasks are the last."""


class RunCounts(WireModel):
    """The numbers of a run's groups by state, and of its samples."""

    open: int = 0
    """Groups under way."""
    ready: int = 0
    """Groups that passed the filters and wait for a batch."""
    batched: int = 0
    """Groups in a batch that is not acknowledged."""
    acknowledged: int = 0
    dropped: dict[str, int] = {}
    """Dropped groups by reason, such as `zero_variance`, `stale` or `cancelled`."""
    samples_masked: int = 0
    samples_stale: int = 0
    """Masked samples that had become too stale."""
    samples_retried: int = 0
    batches_acknowledged: int = 0


class Run(WireModel):
    """A run in its present state."""

    run_id: RunId
    state: RunState
    request: RunRequest
    """The request with later changes, without inline tasks."""
    version: int
    """The newest version that the trainer has reported."""
    tasks: int | None
    """The number of tasks in one epoch, so far."""
    cursor: int
    """The number of tasks taken so far over all epochs, which is the number of the next task."""
    acceptance_rate: float
    """The estimated share of closed groups that pass the filters."""
    counts: RunCounts
    problem: ErrorInfo | None = None
    """Why the run cannot continue, or why it delivers nothing although it runs, and what to do about it. A paused run
    continues when it is resumed; the problem of a running one ends with the next group that is kept."""
    warnings: Annotated[list[str], Field(exclude_if=lambda warnings: not warnings)] = []
    """Problems with the request that may defeat its purpose or keep the run waiting; left out of JSON if there are
    none."""
    parallel: Annotated[RunParallel | None, Field(exclude_if=lambda parallel: parallel is None)] = None
    """How its rollouts use sub-agents. Left out of JSON unless requested, and until a scored rollout that may have any
    is in a closed group."""
    created_at: Timestamp
    ended_at: Timestamp | None = None


class RunPage(WireModel):
    """All runs, oldest first."""

    runs: list[Run]


class GroupSample(WireModel):
    """One rollout of a group, and whether it counts."""

    sample: int
    """The number of the sample in its group, counted from 0."""
    rollout: Rollout
    """The rollout with its trajectory."""
    usable: bool
    """Whether the sample counts; one that does not is masked and has no advantage."""
    masked_because: str | None = None
    """Why it is masked: an error code, `straggler`, `cancelled`, `stale`, or `deleted` with a live session. Stale and
    deleted samples keep no trajectory."""
    reward: float | None = None
    """The reward with the run's penalties and its auxiliary rewards; null if, and only if, the sample is masked."""
    reward_weights: Annotated[RewardWeights | None, Field(exclude_if=lambda weights: weights is None)] = None
    """The weights of the parts of the reward; left out of JSON if the run has no auxiliary reward, or the sample is
    masked."""
    advantage: float | None = None
    """The advantage, if the run asks for advantages and the sample is usable."""
    nodes_by_reference: Annotated[bool, Field(exclude_if=lambda referred: not referred)] = False
    """Whether the rollout's `nodes` were left out because they are too large for a batch; read them with
    `GET /v1/rollouts/{id}/nodes`. Left out of JSON if not."""


class Group(WireModel):
    """The rollouts of one task."""

    group_id: RolloutId
    """The group's id: `<run>.<task number>`."""
    number: int
    """The task's number over all epochs."""
    epoch: int
    task: Task
    samples: list[GroupSample]
    usable: int
    """The number of usable samples."""
    reward_mean: float | None
    """The mean reward of the usable samples."""
    reward_std: float | None
    """The standard deviation of the usable samples' rewards, dividing by their number."""
    measured_on: Annotated[RewardPart | None, Field(exclude_if=lambda part: part is None)] = None
    """The part of the reward that `reward_mean` and `reward_std` look at, before penalties. Left out of JSON if the run
    has no auxiliary reward; they then look at the rewards with penalties."""
    filtered_on: Annotated[list[RewardPart], Field(exclude_if=lambda parts: not parts)] = []
    """The parts of the reward that the filters looked at. Left out of JSON if the run has no auxiliary reward."""
    oldest_version: int | None
    """The oldest version that sampled a token of a usable sample; null if nothing was sampled."""
    newest_version: int | None
    """The newest version that sampled a token of a usable sample; null if nothing was sampled."""
    critical_steps: Annotated[StepsSpread | None, Field(exclude_if=lambda steps: steps is None)] = None
    """The critical steps of the usable samples. Left out of JSON unless the run asks for sub-agents (`nodes`), and for
    agents without any."""


class Batch(WireModel):
    """Groups to train on, leased until the batch is acknowledged or given back, or the lease expires."""

    batch_id: BatchId
    run_id: RunId
    number: int
    """The number of the batch in its run, counted from 0."""
    groups: list[Group]
    delivery: int
    """How often the batch was leased, including this time; from 2 on, a trainer may have seen it before."""
    lease_until: Timestamp
    """When the lease expires."""
    version: int
    """The trainer's version when the batch was leased."""
    oldest_version: int | None
    """The oldest version over the groups."""
    newest_version: int | None
    """The newest version over the groups."""
    dropped: dict[str, int]
    """The number of groups of this run dropped since the previous batch, by reason."""


class BatchAnswer(WireModel):
    """The state of a batch after it was acknowledged, given back or renewed."""

    batch_id: BatchId
    state: Literal["acknowledged", "returned", "leased"]
    lease_until: Timestamp | None = None
    """When the lease expires; set if and only if the batch is leased."""
