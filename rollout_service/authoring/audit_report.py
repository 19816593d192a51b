"""The report of an audit: the measurements of each instance, and the findings on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from pydantic import JsonValue


@dataclass(slots=True)
class TrialRecord:
    """One run of an idle agent, or of the environment's own solution."""

    reward: float | None = None
    """None if the run failed."""
    error: str = ""
    init_seconds: float = 0.0
    solve_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    memory_bytes: int = 0
    """The most resident memory of its sandboxes, sampled."""


@dataclass(slots=True)
class InstanceAudit:
    index: int
    """In the data set, from 0."""
    idle: list[TrialRecord] = field(default_factory=list)
    solved: list[TrialRecord] = field(default_factory=list)
    """Empty if the environment has no solution."""
    leaks: list[str] = field(default_factory=list)
    """Places where the agent can read something that only the grader should know."""
    policy_rewards: list[float | None] = field(default_factory=list)
    """None for a rollout that failed."""

    def findings(self) -> Iterator[str]:
        where = f"instance {self.index}"
        for kind, trials in (("an idle agent", self.idle), ("the solution", self.solved)):
            errors = [trial.error for trial in trials if trial.error]
            if errors:
                yield f"{where}: {kind} got no reward in {len(errors)} of {len(trials)} runs: {errors[0]}"
            rewards = sorted({trial.reward for trial in trials if trial.reward is not None})
            if len(rewards) > 1:
                shown = ", ".join(f"{reward:g}" for reward in rewards)
                yield f"{where}: flaky: {kind} got the rewards {shown}"
        best = _best(self.solved)
        idle = _best(self.idle)
        if best is not None and idle is not None and best <= idle:
            yield f"{where}: the solution gets {best:g}, and an idle agent {idle:g}"
        if best is None and idle is not None and idle >= 1:
            yield f"{where}: an idle agent gets {idle:g}"
        yield from (f"{where}: leak: {leak}" for leak in self.leaks)

    def warnings(self) -> Iterator[str]:
        rewards = {trial.reward for trial in (*self.idle, *self.solved) if trial.reward is not None}
        if odd := sorted(reward for reward in rewards if not -1 <= reward <= 1):
            shown = ", ".join(f"{reward:g}" for reward in odd)
            yield f"rewards beyond -1 and 1: {shown}; in a run with other environments they outweigh all others"

    @property
    def pass_rate(self) -> float | None:
        """The share of a policy's rollouts with the reward of the solution, or 1; None if none was scored."""
        best = _best(self.solved)
        rewards = [reward for reward in self.policy_rewards if reward is not None]
        return sum(reward >= (1.0 if best is None else best) for reward in rewards) / len(rewards) if rewards else None


@dataclass(frozen=True, slots=True)
class AuditReport:
    environment: str
    has_solution: bool
    network: str
    connections: int
    """Connections through the list of hosts; those of `full` are not seen."""
    refused: int
    instances: tuple[InstanceAudit, ...]

    @property
    def findings(self) -> list[str]:
        found = [finding for one in self.instances for finding in one.findings()]
        if self.refused:
            found.append(f"{self.refused} connections were refused by the list of hosts")
        return found

    @property
    def warnings(self) -> list[str]:
        """Findings that may be intended, but seldom are."""
        found = [f"instance {one.index}: {text}" for one in self.instances for text in one.warnings()]
        if not self.has_solution:
            found.append(
                "without a solution nothing shows that a task can be solved; add [solution], or in Python `solve`"
            )
        return found

    @property
    def good(self) -> list[int]:
        """Indices of instances without findings."""
        return [one.index for one in self.instances if not any(one.findings())]

    def as_dict(self) -> dict[str, JsonValue]:
        rates: list[JsonValue] = [one.pass_rate for one in self.instances]
        return {
            **asdict(self),
            "findings": [*self.findings],
            "warnings": [*self.warnings],
            "good": [*self.good],
            "pass_rates": rates,
        }


def _best(trials: list[TrialRecord]) -> float | None:
    return max((trial.reward for trial in trials if trial.reward is not None), default=None)
