"""When a job gets more nodes, and when it gives them back: pure decisions, from looks at Slurm and at the nodes.

Each node of more is a job of its own in a numbered slot, which joins the first.

- There are never more such jobs than `most`, those that wait in Slurm's queue or end included.
- A need, or an idle node, counts only once it has lasted, and what is already on its way counts as help.
- A node is drained first. Its job is ended once it holds nothing.
- Nodes that do not become ready are not replaced endlessly: after `attempts` in a row, `NodesDoNotStartError`.
- A restart of the process forgets only how long something has lasted, and failed starts, so it tries again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from api_schemas.nodes import NodeState
from api_schemas.views.overview import NextNode
from rollout_service.base.errors import ConfigurationError
from rollout_service.cluster.slurm.commands import QueuedJob


class NodesDoNotStartError(ConfigurationError):
    """Jobs that were to add nodes have ended, several in a row, before their nodes were ready."""

    code = "slurm_nodes_do_not_start"


@dataclass(frozen=True, slots=True)
class ScaleOptions:
    """The bounds of the number of nodes, and how long something must last before it counts, in seconds."""

    least: int = 0
    most: int = 1
    grow_after: float = 60.0
    shrink_after: float = 300.0
    start_seconds: float = 900.0
    """How long the node of a job that runs may take to be ready, or may be away."""
    ahead_seconds: float = 600.0
    """How long before its limit of time a job begins nothing new."""
    end_seconds: float = 180.0
    attempts: int = 3


@dataclass(frozen=True, slots=True)
class AddedNode:
    job: QueuedJob
    node: str = ""
    """The node's name in the cluster; empty if it is not a member."""
    state: NodeState = NodeState.DEAD
    holds: int = 0
    """The rollouts and live sessions of its node."""

    @property
    def slot(self) -> int:
        return self.job.index

    @property
    def is_alive(self) -> bool:
        return bool(self.node) and self.state is not NodeState.DEAD


@dataclass(frozen=True, slots=True)
class ScaleInput:
    now: float
    next_node: NextNode
    added: Sequence[AddedNode] = ()


class ActionKind(StrEnum):
    SUBMIT = "submit"
    DRAIN = "drain"
    END = "end"
    """Its job drains and ends in order."""
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class ScaleAction:
    kind: ActionKind
    slot: int
    why: str
    job: str = ""
    node: str = ""


@dataclass(slots=True)
class Scaling:
    options: ScaleOptions
    failed: int = 0
    """Failed starts in a row."""
    _slots: dict[str, int] = field(default_factory=dict)
    """The slots of the jobs at the last look."""
    _was_alive: set[str] = field(default_factory=set)
    """Jobs whose nodes have been members."""
    _told: dict[str, float] = field(default_factory=dict)
    """Keyed by job: when it was told to end."""
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    """Keyed by condition and job: when it began."""
    _least_need: int = 0
    _retry_at: float = 0.0

    def decide(self, seen: ScaleInput) -> list[ScaleAction]:
        """
        Raises:
            NodesDoNotStartError: Starts have failed too often in a row.
        """
        self._note_ends(seen)
        actions = [*self._end(seen), *self._renew(seen)]
        leaving = {action.slot for action in actions}
        staying = [each for each in seen.added if self._stays(each) and each.slot not in leaving]
        actions += self._shrink(seen, staying)
        actions += self._grow(seen, staying)
        for action in actions:
            if action.kind in (ActionKind.END, ActionKind.CANCEL):
                self._told[action.job] = seen.now
        return actions

    def submitted(self, jobs: Mapping[str, int]) -> None:
        """Note the slots of new jobs, which may end before the next look."""
        self._slots |= jobs

    def start_failed(self, now: float, what: str) -> None:
        """
        Raises:
            NodesDoNotStartError: It was the last attempt.
        """
        self.failed += 1
        self._retry_at = now + self.options.grow_after
        self._since.pop(_NEED, None)
        if self.failed >= self.options.attempts:
            raise NodesDoNotStartError(
                f"{self.failed} starts of more nodes in a row have failed; of the last one, {what}",
                hint="`rollout-service slurm logs` of that job may say why. Start this command again to go on.",
            )

    def _stays(self, each: AddedNode) -> bool:
        is_leaving = each.job.is_ending or each.job.job in self._told
        return not is_leaving and not (each.is_alive and each.state is NodeState.DRAINING)

    def _note_ends(self, seen: ScaleInput) -> None:
        """Learn whose nodes have become members, and which jobs have ended before that."""
        alive = {each.job.job for each in seen.added if each.is_alive}
        if alive - self._was_alive:
            self.failed = 0
        self._was_alive |= alive
        there = {each.job.job: each.slot for each in seen.added}
        gone = {job: slot for job, slot in self._slots.items() if job not in there}
        early = {job: slot for job, slot in gone.items() if job not in self._was_alive and job not in self._told}
        self._slots = there
        self._was_alive &= there.keys()
        self._told = {job: when for job, when in self._told.items() if job in there}
        self._since = {key: when for key, when in self._since.items() if key == _NEED or key[1] in there}
        for job, slot in early.items():
            self.start_failed(seen.now, f"job {job} of slot {slot} ended before its node was ready")

    def _end(self, seen: ScaleInput) -> Iterator[ScaleAction]:
        """End what drains and holds nothing, and what does not become ready or does not end."""
        for each in seen.added:
            job, told = each.job.job, self._told.get(each.job.job)
            away = self._lasts("away", job, each.job.is_running and not each.is_alive, seen.now)
            if each.job.is_ending:
                continue
            if told is not None:
                if seen.now - told >= self.options.end_seconds:
                    yield ScaleAction(ActionKind.CANCEL, each.slot, "it has not ended in order", job)
            elif each.is_alive and each.state is NodeState.DRAINING and not each.holds:
                yield ScaleAction(ActionKind.END, each.slot, "it drains and holds nothing", job)
            elif away >= self.options.start_seconds:
                yield ScaleAction(ActionKind.CANCEL, each.slot, f"its node is not there after {away:.0f} s", job)
                if job not in self._was_alive:
                    self.start_failed(seen.now, f"the node of job {job} was not ready after {away:.0f} s")

    def _renew(self, seen: ScaleInput) -> Iterator[ScaleAction]:
        """Let nodes whose jobs are near their limit of time begin nothing new."""
        for each in seen.added:
            left = each.job.seconds_left
            is_late = left is not None and left < self.options.ahead_seconds
            if is_late and each.is_alive and self._stays(each):
                yield ScaleAction(ActionKind.DRAIN, each.slot, f"its job ends in {left:.0f} s", each.job.job, each.node)

    def _shrink(self, seen: ScaleInput, staying: list[AddedNode]) -> Iterator[ScaleAction]:
        """Give back waiting jobs first, then idle nodes, the last slots first."""
        for each in sorted(staying, key=lambda one: (one.is_alive, -one.slot)):
            is_starting = each.job.is_running and not each.is_alive
            is_idle = not seen.next_node.rollouts and not each.holds and not is_starting
            lasts = self._lasts("idle", each.job.job, is_idle, seen.now)
            if not is_idle or lasts < self.options.shrink_after or len(staying) <= self.options.least:
                continue
            staying.remove(each)
            if each.is_alive:
                yield ScaleAction(ActionKind.DRAIN, each.slot, f"idle for {lasts:.0f} s", each.job.job, each.node)
            else:
                yield ScaleAction(ActionKind.CANCEL, each.slot, f"not needed for {lasts:.0f} s", each.job.job)

    def _grow(self, seen: ScaleInput, staying: Sequence[AddedNode]) -> Iterator[ScaleAction]:
        """Add what has been needed for long beyond what is on its way; reach the least number at once."""
        need = seen.next_node.nodes - sum(not each.is_alive for each in staying)
        lasts = self._lasts(*_NEED, need > 0, seen.now)
        self._least_need = min(self._least_need, need) if lasts else need
        wanted, why = 0, seen.next_node.message
        if need > 0 and lasts >= self.options.grow_after:
            wanted = self._least_need
        lacking = self.options.least - len(staying)
        if lacking > wanted and seen.now >= self._retry_at:
            wanted, why = lacking, f"there are to be at least {self.options.least}"
        taken = {each.slot for each in seen.added}
        free = [slot for slot in range(1, self.options.most + 1) if slot not in taken]
        room = max(0, self.options.most - len(seen.added))
        for slot in free[: min(wanted, room)]:
            yield ScaleAction(ActionKind.SUBMIT, slot, why)

    def _lasts(self, what: str, job: str, is_so: bool, now: float) -> float:
        if not is_so:
            self._since.pop((what, job), None)
            return 0.0
        return now - self._since.setdefault((what, job), now)


_NEED = ("need", "")
