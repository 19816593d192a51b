"""How the rollouts of a group went, as sums: what the history of a run is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from api_schemas.rollouts import Rollout, RolloutState, Span, Stage

PHASES = ("queued", "init", "engine", "tool", "rollout", "evaluate")
"""What the time of a rollout is divided into; `rollout` is the rest of that stage."""


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """Sums over the rollouts of a group, one for each sample."""

    samples: int = 0
    failed: int = 0
    turns: int = 0
    tokens: int = 0
    """The sampled tokens."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The time over all attempts, by phase."""


def group_figures(rollouts: Iterable[Rollout]) -> GroupFigures:
    """Return the sums over rollouts that have ended."""
    ended = list(rollouts)
    seconds = dict.fromkeys(PHASES, 0.0)
    for rollout in ended:
        for span in rollout.spans:
            for phase, spent in _phases(span).items():
                seconds[phase] += spent
    return GroupFigures(
        samples=len(ended),
        failed=sum(rollout.state is RolloutState.FAILED for rollout in ended),
        turns=sum(rollout.usage.turns for rollout in ended),
        tokens=sum(rollout.usage.sampled_tokens for rollout in ended),
        seconds=seconds,
    )


def _phases(span: Span) -> dict[str, float]:
    if span.stage is not Stage.ROLLOUT:
        return {"queued": span.queued_seconds, span.stage.value: span.seconds}
    rest = max(0.0, span.seconds - span.engine_seconds - span.tool_seconds)
    engine, tool = span.engine_seconds, span.tool_seconds
    return {"queued": span.queued_seconds, "engine": engine, "tool": tool, "rollout": rest}
