"""The tree of one rollout: its sub-agents as they begin and end, and their costs.

A sub-agent is in `Episode.nodes` from the moment it begins, whatever ends the rollout. The rollout fails if the
versions that serve its sub-agents change.
"""

from __future__ import annotations

import time
import unicodedata
from collections import Counter
from dataclasses import dataclass, field

from api_schemas.errors import Boundary
from api_schemas.rollouts.trees import AgentNode, Assigns, Work, WorkSeconds
from rollout_service.agents.parallel.ledger import Ledger, alone_seconds
from rollout_service.agents.parallel.settings import ParallelSettings
from rollout_service.base.errors import ServiceError
from rollout_service.episodes import Episode, SubagentHost


class FrozenPoolChangedError(ServiceError):
    """The weights of a frozen pool are not those that a rollout's sub-agents began with, or were to have."""

    code = "frozen_pool_changed"
    boundary = Boundary.INFERENCE
    retryable = True


@dataclass(slots=True)
class AgentTree:
    settings: ParallelSettings
    episode: Episode
    """The root's."""
    host: SubagentHost
    assigns: Counter[str] = field(default_factory=Counter)
    accepted: int = 0
    """Assigned tasks that may begin, or have begun."""
    version: int | None = None
    """The version that served the first sub-agent."""
    began: float = field(default_factory=time.perf_counter)
    _tasks: set[tuple[str, str]] = field(default_factory=set)

    @property
    def rollout_id(self) -> str:
        return self.episode.request.rollout_id or ""

    @property
    def task_prompt(self) -> str:
        return next((each.content for each in self.episode.policy.messages if each.role == "user"), "")

    def is_new(self, system: str, prompt: str) -> bool:
        """Note a task; return whether the like has not been assigned before.

        The name of an agent makes no difference, and neither do invisible characters: tasks that differ by nothing else
        would be paid as parallel work.
        """
        task = (_visible(system), _visible(prompt))
        known = task in self._tasks
        self._tasks.add(task)
        return not known

    def count_begun(self, *, duplicate: bool) -> None:
        self.assigns["executed"] += 1
        self.assigns["duplicate"] += duplicate

    def put(self, number: int, node: AgentNode) -> None:
        """Add or replace a node; numbers begin at 1."""
        self.episode.nodes[number - 1 : number] = [node]

    def check_versions(self, pool: str, versions: list[int]) -> None:
        for version in versions:
            wanted = self.settings.subagent.version
            if self.version is None:
                self.version = version if wanted is None else wanted
            if version != self.version:
                raise FrozenPoolChangedError(
                    f"the pool {pool!r} served version {version} to a sub-agent instead of {self.version}",
                    hint="Register engines of one version in a frozen pool, and load no weights into them.",
                )

    def work(self, root: Ledger) -> Work:
        """Return how the work is divided so far; `root` is the root's ledger."""
        turns = self.episode.policy.usage.turns
        steps, widths, balances = root.steps(turns), root.widths(), root.balances()
        own = time.perf_counter() - self.began - sum(wave.seconds for wave in root.waves)
        branches = [branch for wave in root.waves for branch in wave.branches]
        assigns = Assigns(**{name: self.assigns[name] for name in Assigns.model_fields})
        never_began = self.accepted - assigns.executed
        return Work(
            main_steps=root.main_steps(turns),
            critical_steps=steps.critical,
            scheduled_steps=steps.scheduled,
            total_steps=steps.total,
            waves=len(root.waves),
            width_max=max(widths, default=0),
            width_mean=sum(widths) / len(widths) if widths else 0.0,
            balance=sum(balances) / len(balances) if balances else None,
            created=root.created,
            direct_calls=root.direct_calls,
            assigns=assigns.model_copy(update={"abandoned": assigns.abandoned + never_began}),
            seconds=WorkSeconds(
                critical=max(0.0, own) + root.longest_of_waves(),
                queued=sum(max((one.queued for one in wave.branches), default=0.0) for wave in root.waves),
                straggler=sum(alone_seconds(wave.branches) for wave in root.waves),
                active=sum(branch.worked for branch in branches),
            ),
            subagent_tokens=sum(node.usage.sampled_tokens for node in self.episode.nodes),
            result_chars=root.result_chars,
        )


def _visible(text: str) -> str:
    """Reduce white space to single spaces, and drop characters such as a zero-width space."""
    shown = "".join(character for character in text if unicodedata.category(character) != "Cf")
    return " ".join(shown.split())
