"""The contract of the store of runs, groups and batches.

- Each method is one transaction.
- A run's cursor moves in the transaction that makes the group's rollouts durable: a crash neither repeats nor skips a
  task.
- A group that was acknowledged or dropped never changes again, and neither does an acknowledged batch.
- A batch is leased until it is acknowledged or returned, or the lease expires. Its content is the same in every lease.
- If a group of a batch has become too old for another lease, the batch is dissolved: its groups go into later batches
  without their stale samples, and the batch's id is refused.

Events: `run.state` and `run.changed` (subject: the run's id), `group.closed` (the group's id; `run`, `state`, `reason`)
and `batch.leased`, `batch.returned`, `batch.acknowledged`, `batch.dissolved` (the batch's id; `run`, `delivery`). A
`run.changed` reports what no other event does: the run's version, request, tasks or problem, or a group that waits.

The decisions that a store makes are in `store.rules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from pydantic import JsonValue

from api_schemas.errors import ErrorInfo
from api_schemas.exports import ExportedSample, RecordedRollout
from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.rollouts.figures import StepsSpread
from api_schemas.runs import Group, RunRequest, RunState
from api_schemas.runs.auxiliary import RewardPart, RewardWeights
from api_schemas.tasks import Task
from rollout_service.groups.shares import Owner
from rollout_service.groups.statistics import GroupFigures
from rollout_service.settings import RetentionSettings
from rollout_service.store.cluster_contract import RoleLease
from rollout_service.store.codec.trajectories import Columns
from rollout_service.store.lists_contract import RunLists


@dataclass(frozen=True, slots=True)
class RunRecord:
    run_id: str
    request: RunRequest
    """The request with all patches applied; inline tasks are stored separately."""
    state: RunState
    version: int
    first_version: int
    tasks: int
    """The tasks of one epoch so far."""
    total: int | None
    """The tasks of all epochs; None while unbounded."""
    digest: str | None
    """The digest of the file with the tasks."""
    cursor: int
    counters: Mapping[str, int]
    """Groups by state, dropped ones as `dropped:<reason>`; `masked`, `masked:stale` and `retried` samples; acknowledged
    batches as `batches:acknowledged`; sums of how rollouts used sub-agents as `work:<name>`; groups in a row that were
    dropped, or that an error ended, as `in_a_row:dropped:<reason>` and `in_a_row:failed:<code>`."""
    problem: ErrorInfo | None
    created_at: datetime
    changed_at: datetime

    @property
    def exhausted(self) -> bool:
        over = self.total is not None and self.cursor >= self.total
        return over or self.state in (RunState.ENDED, RunState.FINISHED)

    def count(self, name: str) -> int:
        return self.counters.get(name, 0)


@dataclass(frozen=True, slots=True)
class NewGroup:
    number: int
    epoch: int
    requests: Sequence[RolloutRequest]


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A rollout of an open group, as far as its state is cheap to read."""

    sample: int
    rollout_id: str
    state: RolloutState
    reward: float | None
    rolling_seconds: float | None
    """How long its agent has been working, by the store's clock; None unless it is working."""
    oldest_version: int | None
    newest_version: int | None
    is_straggler: bool
    is_erased: bool = False


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group whose rollouts have not all ended, or that was not closed yet."""

    number: int
    members: Sequence[GroupMember]
    cancel_reason: str | None
    lost: Sequence[str] = ()
    """Rollouts that the store has lost."""
    reward_weights: RewardWeights | None = None
    """The weights with which it was closed, if its run has an auxiliary reward."""


@dataclass(frozen=True, slots=True)
class ClosedSample:
    """One sample of a closed group: `GroupSample` without the rollout."""

    sample: int
    rollout_id: str
    usable: bool
    masked_because: str | None
    reward: float | None
    advantage: float | None
    owner: Owner | None = None
    """None for an attempt at a task, and for a sample that was erased."""


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    number: int
    oldest_version: int | None
    owners: Sequence[Owner] = ()
    """Whose sessions its samples are parts of, in runs of live sessions."""


@dataclass(frozen=True, slots=True)
class GroupClosure:
    number: int
    reason: str | None
    """Why the group is dropped; None if it is kept."""
    samples: Sequence[ClosedSample]
    reward_mean: float | None
    reward_std: float | None
    oldest_version: int | None
    """The lowest version of a token in a usable sample."""
    newest_version: int | None
    reward_weights: RewardWeights | None = None
    """None if the run has no auxiliary reward."""
    measured_on: RewardPart | None = None
    """The part of the rewards whose mean and deviation these are; None if it is their total."""
    filtered_on: Sequence[RewardPart] = ()
    """Parts of the rewards that the filters looked at, if there are parts."""
    critical_steps: StepsSpread | None = None
    failure: str | None = None
    """The code of the permanent error that ended every sample, if there is one such error."""
    figures: GroupFigures | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    """Added to the run's counters when the group is closed, and not when it is closed again."""

    @property
    def state(self) -> str:
        return "ready" if self.reason is None else "dropped"


@dataclass(frozen=True, slots=True)
class GroupHead:
    """A closed group without tokens."""

    number: int
    json: bytes
    """A `Group` with empty columns."""
    samples: Sequence[ClosedSample]
    tokens: Sequence[Sequence[int]]
    """The number of tokens of each segment, by sample; empty for a sample without a trajectory."""
    oldest_version: int | None
    newest_version: int | None


@dataclass(frozen=True, slots=True)
class BatchLeaseRequest:
    run_id: str
    key: str
    """A consumer that repeats a key gets the batch it already holds, for example after a lost response."""
    seconds: float
    allow_stale: bool = False


@dataclass(frozen=True, slots=True)
class BatchLease:
    """A leased batch; its groups are read one by one."""

    batch_id: str
    run_id: str
    number: int
    groups: Sequence[int]
    delivery: int
    lease_until: datetime
    version: int
    dropped: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class NoBatch:
    over: bool
    """Whether there will never be another batch."""
    due_in: float
    """Seconds until the next lease expires, so that a batch may become available; infinity if none is out. A duration,
    since the caller's host may have another time than the store."""
    stale: bool = False
    """Whether waiting groups have become too old: call `reclose_group` for each, then ask again."""


class RunStore(RunLists, Protocol):
    """
    Raises:
        StoreError: The store fails; every method can raise it.
        NotFoundError: There is no run or batch of that id; every method that takes one can raise it.
    """

    async def create(
        self, request: RunRequest, *, tasks: int, digest: str | None, version: int
    ) -> tuple[RunRecord, bool]:
        """Make a run durable; return it and whether it is new. `request.run_id` must be set.

        Raises:
            ConflictError: The id is taken by a different request.
        """

    async def get(self, run_id: str) -> RunRecord: ...

    async def list(self) -> Sequence[RunRecord]:
        """Return all runs, oldest first."""

    async def active(self) -> Sequence[RunRecord]:
        """Return the runs that are not over, and ended runs whose groups are still open."""

    async def update(
        self,
        run_id: str,
        *,
        state: RunState | None = None,
        version: int | None = None,
        changes: Mapping[str, JsonValue] | None = None,
        problem: ErrorInfo | None = None,
    ) -> RunRecord:
        """Change the given fields, and return the run; `changes` are fields of its request.

        A version only grows. Resuming clears the problem, and the counters of groups in a row.

        Raises:
            ConflictError: The run is over and cannot be paused or resumed.
        """

    async def append(self, run_id: str, tasks: Sequence[Task], *, offset: int | None, close: bool) -> RunRecord:
        """Append tasks to an open run; repeating the same tasks at the same offset changes nothing.

        Raises:
            ConflictError: The run takes no more tasks, or has another number of them.
        """

    async def inline_tasks(self, run_id: str, *, first: int, limit: int) -> Sequence[Task]:
        """Return inline tasks; `first` is a number in the epoch."""

    async def start_groups(self, run_id: str, groups: Sequence[NewGroup]) -> int:
        """Start the groups that follow the cursor; return how many, 0 if the run is not running."""

    async def open_groups(self, run_id: str) -> Sequence[OpenGroup]:
        """Return the open groups, oldest first."""

    async def extend_group(self, run_id: str, number: int, first: int, requests: Sequence[RolloutRequest]) -> None:
        """Add samples to an open group that has `first` of them; change nothing if it has another number."""

    async def retry_sample(self, run_id: str, number: int, sample: int, request: RolloutRequest) -> None: ...

    async def mark_stragglers(self, run_id: str, number: int, samples: Sequence[int]) -> None:
        """Record that these samples of an open group are being cut off."""

    async def cancel_groups(self, run_id: str, reason: str) -> None:
        """Record why the open groups are being cancelled."""

    async def close_group(self, run_id: str, closure: GroupClosure) -> None:
        """Keep or drop an open group; one that is kept ends the problem of a run that is running.

        Any other group is left unchanged, and so is one with a sample that was erased since the decision.
        """

    async def ready_groups(self, run_id: str) -> Sequence[ReadyGroup]:
        """Return the groups that wait for a batch, oldest first."""

    async def stale_groups(self, run_id: str, bound: int) -> Sequence[OpenGroup]:
        """Return waiting groups with a usable sample older than version `bound`.

        Returned batches that contain such groups are dissolved first.
        """

    async def reclose_group(self, run_id: str, closure: GroupClosure) -> None:
        """Close a waiting group again, with more samples masked; what `close_group` leaves unchanged, this does too."""

    async def lease(self, order: BatchLeaseRequest) -> BatchLease | NoBatch:
        """Lease the oldest batch that was returned or whose lease expired, or else a new one.

        A new batch of a run that cancels its surplus drops the remaining ready groups and cancels the open ones.
        """

    async def renew_batch(self, run_id: str, batch: int, *, key: str | None, seconds: float) -> datetime:
        """Renew the lease of a batch for `seconds` from now; return when it expires.

        An expired lease can be renewed until somebody else leases the batch.

        Raises:
            ConflictError: The batch is no longer leased, or is leased under another key.
        """

    async def acknowledge(self, run_id: str, batch: int) -> None:
        """Acknowledge a batch, so that it is never delivered again; idempotent.

        Raises:
            ConflictError: The batch was dissolved.
        """

    async def give_back(self, run_id: str, batch: int, *, key: str | None = None) -> None:
        """Return a batch, so that it can be leased again at once. A `key` of None returns it whoever has it.

        Raises:
            ConflictError: The batch is acknowledged, or leased under another key.
        """

    async def group_states(self, run_id: str) -> Mapping[int, str]:
        """Return states by number; a dropped group is `dropped:<reason>`."""

    async def group(self, run_id: str, number: int) -> Group:
        """Return a closed group with its rollouts and their trajectories."""

    async def group_heads(self, run_id: str, numbers: Sequence[int]) -> Sequence[GroupHead]:
        """Return closed groups without tokens, in this order; for kept groups they are stored ready-made."""

    async def columns(self, run_id: str, number: int) -> Sequence[Columns]:
        """Return the columns of all segments of a closed group, sample by sample."""

    async def closed_groups(self, run_id: str) -> Sequence[int]:
        """Return the numbers of kept and dropped groups."""

    async def exported_samples(self, run_id: str, number: int) -> Sequence[ExportedSample]: ...

    async def rollout_ids(self, run_id: str) -> Sequence[str]:
        """Return the rollouts of all closed groups, in task order."""

    async def recorded_rollouts(self, rollout_ids: Sequence[str]) -> Sequence[RecordedRollout]:
        """Return rollouts with all that scoring them again needs, in this order, without those that are gone."""

    async def rollouts_of(self, user: str) -> Sequence[str]:
        """Return the rollouts of a user's sessions, by the user's hash; of each sample the first one."""

    async def erase(self, rollout_ids: Sequence[str]) -> Mapping[str, str]:
        """Erase the contents of rollouts that have ended, on a person's demand; return the batches that had them.

        Each is the first rollout of a sample, and those that replaced it are erased with it: tokens, marks, session,
        reward, notes and steps are overwritten as far as the store can, and no steps are stored any more. The sample is
        masked, in an open group once it closes. A group that waits is dropped if it has too few usable samples left; in
        a batch that is not acknowledged, the sample stays in its place.
        """

    async def overwrite_deleted(self) -> None:
        """Overwrite whatever is deleted from now on, since it may be a person's, as far as the store can."""

    async def prune(self, run_id: str, *, seconds: float | None, max_bytes: int | None) -> int:
        """Delete the trajectories of settled groups beyond these limits; return how many groups."""

    async def delete_expired(self, keep: RetentionSettings) -> int:
        """Delete some of the records that have expired; return 0 once none is left."""

    def deliveries(self, run_id: str) -> int:
        """Return a number that grows with every change, other than of time, that may change what `lease` returns."""

    async def wait_for_delivery(self, run_id: str, after: int) -> int:
        """Wait until `deliveries` may be above `after`, then return it."""


class ShardRuns(RunStore, Protocol):
    """The runs of one shard, which the service that leads the role there manages."""

    def fenced(self, lease: RoleLease) -> ShardRuns:
        """Return runs whose writes are refused once another service leads: each can raise LeadershipLostError.

        A store that only one process can have open refuses none.
        """

    async def wait_for_change(self, after: int) -> int:
        """Wait until a run or a rollout of one has changed since the call that returned `after`; start with 0."""
