"""The keys of runs, and reads of their rollouts, which the store keeps elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from api_schemas.rollouts import RolloutState
from rollout_service.store.redis.runs.records import Command
from rollout_service.store.runs_contract import GroupMember

# The keys of one run in Redis.
#
# A group's record moves from `open` to `closed`; its state is kept apart in `states`, so that settling a group rewrites
# no record. What is asked for often is small and separate: the groups that wait for a batch, and the batches that are
# out.


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The names of a run's keys."""

    root: str
    run_id: str

    @property
    def run(self) -> str:
        """A hash: the run's fields, and its counters as `n:<name>`."""
        return f"{self.root}:run:{self.run_id}"

    @property
    def tasks(self) -> str:
        """A list: the inline tasks of an epoch."""
        return f"{self.run}:tasks"

    @property
    def open(self) -> str:
        """A hash: the records of open groups by number."""
        return f"{self.run}:open"

    @property
    def closed(self) -> str:
        """A hash: the records of closed groups by number, until they are deleted by retention."""
        return f"{self.run}:closed"

    @property
    def states(self) -> str:
        """A hash: the state of every group by number, as `GroupStatus` writes it."""
        return f"{self.run}:states"

    @property
    def ready(self) -> str:
        """A hash: the facts that a lease needs about the groups that wait for a batch, by number."""
        return f"{self.run}:ready"

    @property
    def heads(self) -> str:
        """A hash: the stored heads of kept groups by number."""
        return f"{self.run}:heads"

    @property
    def out(self) -> str:
        """A hash: the records of leased and returned batches by number."""
        return f"{self.run}:out"

    @property
    def batches(self) -> str:
        """A hash: the states of acknowledged and dissolved batches by number."""
        return f"{self.run}:batches"

    @property
    def settled(self) -> str:
        """A sorted set: the settled groups that are not deleted, by the time at which they were settled."""
        return f"{self.run}:settled"

    @property
    def held(self) -> str:
        """A sorted set: the settled groups that still have trajectories, by the same time."""
        return f"{self.run}:held"

    @property
    def history(self) -> str:
        """A text: the records of closed groups in the order of their numbers, as `codec.history` writes them."""
        return f"{self.run}:history"

    @property
    def all(self) -> tuple[str, ...]:
        """Every key of the run."""
        groups = (self.open, self.closed, self.states, self.ready, self.heads, self.settled, self.held)
        return (self.run, self.tasks, *groups, self.out, self.batches, self.history)


def all_runs(root: str) -> str:
    """Return the key of the sorted set of all runs, oldest first."""
    return f"{root}:runs"


def active_runs(root: str) -> str:
    """Return the key of the sorted set of the runs that still need work, oldest first."""
    return f"{root}:runs:active"


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A rollout without its request, result and trajectory."""

    state: RolloutState
    reward: float | None
    changed_seconds: float
    """How long ago it changed its state, by Redis's clock."""
    oldest_version: int | None
    newest_version: int | None
    trajectory_bytes: int
    """The size of the encoded trajectory; 0 without one."""
    is_erased: bool

    def member(self, sample: int, rollout_id: str, *, is_straggler: bool) -> GroupMember:
        return GroupMember(
            sample=sample,
            rollout_id=rollout_id,
            state=self.state,
            reward=self.reward,
            rolling_seconds=self.changed_seconds if self.state is RolloutState.ROLLOUT else None,
            oldest_version=self.oldest_version,
            newest_version=self.newest_version,
            is_straggler=is_straggler,
            is_erased=self.is_erased,
        )


_FIELDS = ("s", "w", "H", "v", "V", "B", "Y")
"""The fields of a rollout's hash that a member has, as `rollouts.lua` names them."""


def member_read(root: str, rollout_id: str) -> Command:
    return ("HMGET", f"{root}:r:{rollout_id}", *_FIELDS)


def erased_read(root: str, rollout_id: str) -> Command:
    """Return the command that reads whether a rollout was erased: `1`, or nothing."""
    return ("HGET", f"{root}:r:{rollout_id}", "Y")


def result_read(root: str, rollout_id: str) -> Command:
    """Return the command that reads a rollout's stored result and the record of its trajectory."""
    return ("MGET", f"{root}:x:{rollout_id}", f"{root}:t:{rollout_id}")


def decode_member(reply: Sequence[bytes | None], now: float) -> MemberRecord | None:
    """Return a member from the reply to that command at this time of Redis's; None if the rollout is gone."""
    state, reward, changed_at, oldest, newest, size, erased = reply
    if state is None or changed_at is None:
        return None
    return MemberRecord(
        state=RolloutState(state.decode()),
        reward=None if reward is None else float(reward),
        changed_seconds=now - float(changed_at),
        oldest_version=None if oldest is None else int(oldest),
        newest_version=None if newest is None else int(newest),
        trajectory_bytes=int(size or 0),
        is_erased=erased is not None,
    )
