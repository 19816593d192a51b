"""The keys of one run in Redis.

A group's record moves from `open` to `closed`; its state is kept apart in `states`, so that settling a group rewrites
no record. What is asked for often is small and separate: the groups that wait for a batch, and the batches that are
out.
"""

from __future__ import annotations

from dataclasses import dataclass


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
