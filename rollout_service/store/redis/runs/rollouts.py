"""The keys of runs, and reads of their rollouts, which the store keeps elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_service.store.redis.replies import FIELDS
from rollout_service.store.redis.runs.records import Command


class RunKeys:
    def __init__(self, root: str, run_id: str) -> None:
        self.run_id = run_id
        self.root = root
        self.run = f"{self.root}:run:{self.run_id}"
        """A hash: fields, and counters as `n:<name>`."""
        self.tasks = f"{self.run}:tasks"
        """A list: inline tasks of an epoch."""
        self.open = f"{self.run}:open"
        """A hash: open groups by number."""
        self.closed = f"{self.run}:closed"
        """A hash: closed groups by number, until retention deletes them."""
        self.states = f"{self.run}:states"
        """A hash: states of all groups by number, as `GroupStatus` writes them, so that settling a group rewrites no
        record."""
        self.ready = f"{self.run}:ready"
        """A hash: the facts that a lease needs about waiting groups, by number."""
        self.heads = f"{self.run}:heads"
        """A hash: heads of kept groups by number."""
        self.out = f"{self.run}:out"
        """A hash: leased and returned batches by number."""
        self.batches = f"{self.run}:batches"
        """A hash: states of acknowledged and dissolved batches by number."""
        self.settled = f"{self.run}:settled"
        """A sorted set: settled groups that are not deleted, by the time at which they were settled."""
        self.held = f"{self.run}:held"
        """A sorted set: settled groups that still have trajectories, by the same time."""
        self.history = f"{self.run}:history"
        """A text: records of closed groups in the order of their numbers, as `codec.runs` writes them."""

    @property
    def all(self) -> tuple[str, ...]:
        groups = (self.open, self.closed, self.states, self.ready, self.heads, self.settled, self.held)
        return (self.run, self.tasks, *groups, self.out, self.batches, self.history)


def all_runs(root: str) -> str:
    """Return the key of the sorted set of all runs, oldest first."""
    return f"{root}:runs"


def active_runs(root: str) -> str:
    """Return the key of the sorted set of the runs that still need work, oldest first."""
    return f"{root}:runs:active"


def fields_read(root: str, rollout_id: str, names: Iterable[str]) -> Command:
    """Return the command that reads these of `replies.FIELDS` of a rollout, for `replies.decode_fields`."""
    return ("HMGET", f"{root}:r:{rollout_id}", *(FIELDS[name][0] for name in names))


def erased_read(root: str, rollout_id: str) -> Command:
    """Return the command that reads whether a rollout was erased: `1`, or nothing."""
    return ("HGET", f"{root}:r:{rollout_id}", "Y")


def result_read(root: str, rollout_id: str) -> Command:
    return ("MGET", f"{root}:x:{rollout_id}", f"{root}:t:{rollout_id}")


def size_read(root: str, rollout_id: str) -> Command:
    """Return the command that reads a rollout's state, and the bytes of its encoded trajectory."""
    return ("HMGET", f"{root}:r:{rollout_id}", "s", "B")
