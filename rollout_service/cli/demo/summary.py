"""The summary of a batch of rollouts: successes, turns, tokens, and where the time went."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table

from api_schemas.rollouts import Rollout, RolloutState, Span, Stage
from rollout_service.cli.console import table

PARTS: tuple[tuple[str, Stage, Callable[[Span], float]], ...] = (
    ("init", Stage.INIT, lambda span: span.seconds),
    ("  sandbox start", Stage.INIT, lambda span: span.sandbox_seconds),
    ("rollout", Stage.ROLLOUT, lambda span: span.seconds),
    ("  engine", Stage.ROLLOUT, lambda span: span.engine_seconds),
    ("  tools", Stage.ROLLOUT, lambda span: span.tool_seconds),
    ("evaluate", Stage.EVALUATE, lambda span: span.seconds),
    ("waiting for workers", Stage.ROLLOUT, lambda span: span.queued_seconds),
)


@dataclass(frozen=True, slots=True)
class Summary:
    """A batch of ended rollouts, and the time that it took in all."""

    rollouts: Sequence[Rollout]
    seconds: float

    @property
    def succeeded(self) -> int:
        """The number of rollouts with a reward of 1 or more."""
        return sum(1 for rollout in self.rollouts if rollout.reward is not None and rollout.reward >= 1.0)

    @property
    def failed(self) -> int:
        """The number of rollouts without a result; a wrong answer is a result."""
        return sum(1 for rollout in self.rollouts if rollout.state is not RolloutState.COMPLETED)

    @property
    def success_rate(self) -> float:
        """The share of rollouts that succeeded."""
        return self.succeeded / len(self.rollouts) if self.rollouts else 0.0

    def figures(self) -> dict[str, float | int | None]:
        """Return the figures by which demos are compared."""
        return {
            "rollouts": len(self.rollouts),
            "succeeded": self.succeeded,
            "failed": self.failed,
            "success_rate": round(self.success_rate, 4),
            "seconds": round(self.seconds, 3),
            "rollouts_per_second": round(len(self.rollouts) / self.seconds, 3),
        }

    def show(self) -> RenderableType:
        """Render the summary for a terminal."""
        return Group(self._outcome(), self._times())

    def _outcome(self) -> Table:
        usage = [rollout.usage for rollout in self.rollouts]
        prompt, cached = sum(u.prompt_tokens for u in usage), sum(u.cached_tokens for u in usage)
        rows = table("", "", header=False)
        rows.add_row("success", f"{self.succeeded}/{len(self.rollouts)} ({self.success_rate:.1%})")
        rows.add_row("no result", _failures(self.rollouts))
        rows.add_row(
            "turns", f"{sum(u.turns for u in usage)}, {_spread([u.turns for u in usage])} per rollout"
        )
        rows.add_row("tool calls", str(sum(u.tool_calls for u in usage)))
        rows.add_row("prompt tokens", f"{prompt:,}" + (f", {cached / prompt:.1%} cached" if prompt else ""))
        rows.add_row("sampled tokens", f"{sum(u.sampled_tokens for u in usage):,}")
        speed = len(self.rollouts) / self.seconds
        rows.add_row("time", f"{self.seconds:.1f} s, {speed:.2f} rollouts/s")
        return rows

    def _times(self) -> Table:
        rows = table("seconds per rollout", "median", "p95", title="Where the time went")
        for column in rows.columns[1:]:
            column.justify = "right"
        spans = [span for rollout in self.rollouts for span in rollout.spans]
        for name, stage, seconds in PARTS:
            values = [seconds(span) for span in spans if span.stage is stage]
            if values:
                rows.add_row(name, f"{statistics.median(values):.3f}", f"{percentile(values, 95):.3f}")
        return rows


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile, interpolated between neighbors; of a single value, the value itself."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _spread(values: Sequence[int]) -> str:
    return f"{statistics.mean(values):.1f} on average, {max(values)} at most" if values else "none"


def _failures(rollouts: Sequence[Rollout]) -> str:
    codes = Counter(rollout.error.code for rollout in rollouts if rollout.error is not None)
    cancelled = sum(1 for rollout in rollouts if rollout.state is RolloutState.CANCELLED)
    parts = [f"{count} {code}" for code, count in codes.most_common()]
    if cancelled:
        parts.append(f"{cancelled} cancelled")
    return ", ".join(parts) or "0"
