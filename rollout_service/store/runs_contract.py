"""The contract of the part of the store that keeps runs, groups and batches.

Guarantees: each method is one transaction. The cursor of a run moves in the transaction that makes the group's
rollouts durable, so a crash neither repeats nor skips a task. A group that was acknowledged or dropped, and a
batch that was acknowledged, never change again. A batch is leased until it is acknowledged, returned, or its
time is up, and its content is the same each time, or the batch is dissolved: when a group of it has grown too
old for a new lease, its groups go into later batches without what is stale, and the batch's id is refused.

Events: `run.state` (subject: the run's id), `group.closed` (the group's id; `run`, `state`, `reason`), and
`batch.leased`, `batch.returned`, `batch.acknowledged`, `batch.dissolved` (the batch's id; `run`, `delivery`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from api_schemas.errors import ErrorInfo
from api_schemas.exports import ExportedSample, RecordedRollout
from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.runs import Group, RunRequest, RunState
from api_schemas.tasks import Task
from rollout_service.store.columns import Columns


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as the store knows it."""

    run_id: str
    request: RunRequest
    """With what was patched since; inline tasks are kept apart."""
    state: RunState
    version: int
    first_version: int
    tasks: int
    """Tasks in one epoch, so far."""
    total: int | None
    """Tasks over all epochs; None while there is no end to them."""
    digest: str | None
    """The digest of the file that the tasks come from."""
    cursor: int
    counters: Mapping[str, int]
    """Groups by state, the dropped ones as `dropped:<reason>`; `masked` and `retried` samples; batches as
    `batches:<state>`."""
    problem: ErrorInfo | None
    created_at: datetime
    changed_at: datetime

    @property
    def exhausted(self) -> bool:
        """Whether no further group will be begun."""
        over = self.total is not None and self.cursor >= self.total
        return over or self.state in (RunState.ENDED, RunState.FINISHED)

    def count(self, name: str) -> int:
        """A counter; 0 when there is none."""
        return self.counters.get(name, 0)


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A group to begin."""

    number: int
    epoch: int
    requests: Sequence[RolloutRequest]


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A rollout of an open group as it stands, as far as it is cheap to know."""

    sample: int
    rollout_id: str
    state: RolloutState
    reward: float | None
    rolling_since: float | None
    """Unix seconds when its agent began; None unless it is at work."""
    oldest_version: int | None
    newest_version: int | None
    is_straggler: bool
    """Whether it was cut off as a straggler."""


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group under way."""

    number: int
    members: Sequence[GroupMember]
    cancel_reason: str | None
    """Why it is cancelled, if it is."""
    lost: Sequence[str] = ()
    """The ids of rollouts of it that the store no longer has."""


@dataclass(frozen=True, slots=True)
class ClosedSample:
    """How one sample of a closed group counts; the wire's GroupSample without the rollout."""

    sample: int
    rollout_id: str
    usable: bool
    masked_because: str | None
    reward: float | None
    advantage: float | None


@dataclass(frozen=True, slots=True)
class GroupClosure:
    """How a group ends."""

    number: int
    reason: str | None
    """Why it is dropped; None when it is kept."""
    samples: Sequence[ClosedSample]
    reward_mean: float | None
    reward_std: float | None
    oldest_version: int | None
    """The lowest version of a token in a usable sample."""
    newest_version: int | None

    @property
    def state(self) -> str:
        """The state of the group once it is closed."""
        return "ready" if self.reason is None else "dropped"


@dataclass(frozen=True, slots=True)
class GroupHead:
    """A closed group without its tokens."""

    number: int
    json: bytes
    """The `Group` as JSON; its segments hold no tokens."""
    samples: Sequence[ClosedSample]
    tokens: Sequence[Sequence[int]]
    """For each sample, how many tokens each of its segments has; none for a sample without a trajectory."""
    oldest_version: int | None
    newest_version: int | None


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Seconds after which rows are deleted; None keeps them for ever."""

    ended_runs: float | None = None
    """Whole runs that are over, of which nothing is left to acknowledge; since their last change."""
    settled_groups: float | None = None
    """The rollouts of groups that were acknowledged or dropped; since then."""
    rollouts: float | None = None
    """Rollouts that belong to no run; since their end."""


@dataclass(frozen=True, slots=True)
class BatchLeaseRequest:
    """What a consumer asks for."""

    run_id: str
    key: str
    """The same key gets the batch again that it holds, as when its answer was lost."""
    seconds: float
    allow_stale: bool = False


@dataclass(frozen=True, slots=True)
class BatchLease:
    """A batch that was leased; its groups are read one by one."""

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
    """There is none now."""

    over: bool
    """Whether there will never be one again."""
    due: float
    """Unix seconds when a lease runs out, so that there may be one; infinity without one."""
    stale: bool = False
    """Whether groups that wait have grown too old: `revise` them, and ask again."""


class RunStore(Protocol):
    """Where runs live. All methods raise StoreError; those that name a run or a batch raise NotFoundError."""

    async def create(
        self, request: RunRequest, *, tasks: int, digest: str | None, version: int
    ) -> tuple[RunRecord, bool]:
        """Make a run durable; returns it and whether it is new.

        `request.run_id` must be set. The same id with another body raises ConflictError.
        """
        ...

    async def get(self, run_id: str) -> RunRecord:
        """A run as it stands."""
        ...

    async def list(self) -> Sequence[RunRecord]:
        """All runs, oldest first."""
        ...

    async def active(self) -> Sequence[RunRecord]:
        """The runs that are not over, and those that were ended with groups under way."""
        ...

    async def update(
        self,
        run_id: str,
        *,
        state: RunState | None = None,
        version: int | None = None,
        request: RunRequest | None = None,
        problem: ErrorInfo | None = None,
    ) -> RunRecord:
        """Change what is given. A version only grows; resuming clears the problem; what is over stays over."""
        ...

    async def append(
        self, run_id: str, tasks: Sequence[Task], *, offset: int | None, close: bool
    ) -> RunRecord:
        """Append tasks to an open run; the same tasks at the same offset again change nothing.

        ConflictError: the run takes no more tasks, or has another number of them.
        """
        ...

    async def inline_tasks(self, run_id: str, *, first: int, limit: int) -> Sequence[Task]:
        """Tasks of an inline run by their number in the epoch."""
        ...

    async def start_groups(self, run_id: str, groups: Sequence[NewGroup]) -> int:
        """Begin groups that follow the cursor; returns how many were, 0 if the run no longer runs."""
        ...

    async def open_groups(self, run_id: str) -> Sequence[OpenGroup]:
        """The groups under way, oldest first."""
        ...

    async def retry_sample(self, run_id: str, number: int, sample: int, request: RolloutRequest) -> None:
        """Put another rollout in the place of a sample that failed."""
        ...

    async def mark_stragglers(self, run_id: str, number: int, samples: Sequence[int]) -> None:
        """Remember that these samples of an open group are cut off."""
        ...

    async def cancel_groups(self, run_id: str, reason: str) -> None:
        """Remember that the groups under way are cancelled."""
        ...

    async def close_group(self, run_id: str, closure: GroupClosure) -> None:
        """Keep or drop a group that is open; one that is not stays as it is."""
        ...

    async def stale_groups(self, run_id: str, bound: int) -> Sequence[OpenGroup]:
        """The groups that wait for a batch with a usable sample older than version `bound`.

        Batches that were returned and hold such groups are dissolved first.
        """
        ...

    async def reclose_group(self, run_id: str, closure: GroupClosure) -> None:
        """Close a group that waits for a batch anew, with more of it masked; one that does not wait stays as it is."""
        ...

    async def lease(self, order: BatchLeaseRequest) -> BatchLease | NoBatch:
        """Lease the oldest batch that was returned or whose lease ran out, or else a new one.

        With a new one of a run that cancels its surplus, what is left is dropped or given up.
        """
        ...

    async def renew_batch(self, run_id: str, batch: int, *, key: str | None, seconds: float) -> datetime:
        """Lease a batch for so long from now; returns until when.

        One that ran out can be renewed while nobody else has it. ConflictError: it is not leased any more, or under
        another key.
        """
        ...

    async def acknowledge(self, run_id: str, batch: int) -> None:
        """Settle a batch for good; idempotent. ConflictError when it was dissolved."""
        ...

    async def give_back(self, run_id: str, batch: int) -> None:
        """Return a batch to be leased again at once; what is acknowledged stays so, ConflictError."""
        ...

    async def group_states(self, run_id: str) -> Mapping[int, str]:
        """Every group by its number: its state, a dropped one as `dropped:<reason>`."""
        ...

    async def group(self, run_id: str, number: int) -> Group:
        """A closed group with its rollouts and their trajectories."""
        ...

    async def group_heads(self, run_id: str, numbers: Sequence[int]) -> Sequence[GroupHead]:
        """Closed groups without their tokens, in this order; those that were kept are there ready-made."""
        ...

    async def columns(self, run_id: str, number: int) -> Sequence[Columns]:
        """The packed columns of all segments of a closed group, sample by sample."""
        ...

    async def closed_groups(self, run_id: str) -> Sequence[int]:
        """The numbers of all closed groups, whatever became of them."""
        ...

    async def exported_samples(self, run_id: str, number: int) -> Sequence[ExportedSample]:
        """The rollouts of a closed group with all that is known of them."""
        ...

    async def rollout_ids(self, run_id: str) -> Sequence[str]:
        """The rollouts of all closed groups, in the order of their tasks."""
        ...

    async def recorded_rollouts(self, rollout_ids: Sequence[str]) -> Sequence[RecordedRollout]:
        """Rollouts with all that is needed to evaluate them again, in this order; those that are gone are left out."""
        ...

    async def prune(self, run_id: str, *, seconds: float | None, max_bytes: int | None) -> int:
        """Delete the trajectories of settled groups beyond these limits; returns how many groups it were."""
        ...

    async def delete_expired(self, policy: RetentionPolicy) -> int:
        """Delete some of what is older; returns 0 when nothing is left to delete."""
        ...

    @property
    def deliveries(self) -> int:
        """Grows with whatever may change what `lease` returns, but for the time."""
        ...

    async def wait_for_delivery(self, after: int) -> int:
        """Wait until `deliveries` is above `after`, and return it."""
        ...

    async def wait_for_change(self, after: int) -> int:
        """Wait until a rollout ended or a run changed since the call that returned `after`; 0 at first."""
        ...
