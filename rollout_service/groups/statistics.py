"""Statistics of a group's rewards and work, advantages, and DAPO's length penalty.

Only samples with a reward enter a statistic. As an input None means missing, as a result undefined; nothing is filled
in. The advantages of a group sum to 0 up to rounding.

The formulas, over the m rewards present, with mean mu and standard deviation sigma (dividing by m):

- group-normalized, GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1): A_i = (r_i - mu) / sigma. Trainers that divide
  by m - 1 instead get values smaller by sqrt((m - 1) / m). No epsilon is added: if sigma is 0, all rewards equal mu and
  every advantage is 0.
- leave-one-out, RLOO (Kool et al. 2019; Ahmadian et al., arXiv 2402.14740, equation 6):
  A_i = r_i - mean of the others = m / (m - 1) * (r_i - mu).
- the parts of a reward, GDPO (arXiv 2601.05242): A_i = sum over parts k of w_k * A_ik, with A_ik group-normalized over
  part k alone. Normalizing the weighted sum instead would divide the weights out again: if only one part differs within
  a group, its weight cancels. GDPO's further normalization over the batch is left to the trainer.
- soft overlong punishment (DAPO, arXiv 2503.14476, equation 13).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from api_schemas.rollouts import Rollout, RolloutState, Span, Stage
from api_schemas.rollouts.figures import ParallelFigures
from api_schemas.rollouts.trees import AgentNode, Assigns, InvalidBecause, Work
from rollout_service.groups.auxiliary import PERF

_NO_SPREAD = 1e-12
"""A standard deviation up to this, relative to the largest reward, is treated as rounding."""


def group_normalized(rewards: Sequence[float | None]) -> list[float | None]:
    """Return GRPO's advantages, one per entry; None if the reward is missing, or is the only one."""
    present = [reward for reward in rewards if reward is not None]
    if len(present) < 2:
        return [None] * len(rewards)
    mean, std = moments(present)
    if std <= _NO_SPREAD * max(map(abs, present)):
        return [None if reward is None else 0.0 for reward in rewards]
    return [None if reward is None else (reward - mean) / std for reward in rewards]


def leave_one_out(rewards: Sequence[float | None]) -> list[float | None]:
    """Return RLOO's advantages, with None as in `group_normalized`."""
    present = [reward for reward in rewards if reward is not None]
    if len(present) < 2:
        return [None] * len(rewards)
    mean, _ = moments(present)
    scale = len(present) / (len(present) - 1)
    return [None if reward is None else scale * (reward - mean) for reward in rewards]


def parts_normalized(parts: Sequence[tuple[float, Sequence[float | None]]]) -> list[float | None]:
    """Return GDPO's advantages from weights and the rewards that they weigh, with None as in `group_normalized`."""
    weighted = [
        [None if advantage is None else weight * advantage for advantage in group_normalized(rewards)]
        for weight, rewards in parts
    ]
    return [_sum(of_sample) for of_sample in zip(*weighted, strict=True)]


def _sum(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return math.fsum(present) if len(present) == len(values) else None


def soft_overlong_penalty(sampled_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> float:
    """Return what a sample's length adds to its reward, from 0 down to `-penalty`.

    This is `penalty` times DAPO's equation 13 with L_max = `max_tokens` and L_cache = `buffer_tokens`: 0 up to L_max -
    L_cache, then a straight line to -1 at L_max, and -1 beyond.
    """
    over = sampled_tokens - (max_tokens - buffer_tokens)
    if over <= 0:
        return 0.0
    return -penalty * min(1.0, over / buffer_tokens)


def moments(rewards: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation (dividing by the count) of at least one reward, from exact sums."""
    mean = math.fsum(rewards) / len(rewards)
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))


PHASES = ("queued", "init", "engine", "tool", "rollout", "evaluate")
"""The phases into which a rollout's time is divided; `rollout` is the rest of that stage."""


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """Sums over one rollout for each sample."""

    samples: int = 0
    failed: int = 0
    turns: int = 0
    tokens: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The time by phase, over all attempts."""


def group_figures(rollouts: Iterable[Rollout]) -> GroupFigures:
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


SOLVED = 1.0
"""The lowest score that counts as solved."""
MILLION = 1_000_000
"""Fractions are summed in millionths, rounded for each rollout."""
_INVALID = "invalid:"
_SECONDS = ("critical", "queued", "straggler", "active")


def work_sums(rollouts: Iterable[Rollout]) -> Counter[str]:
    """Return whole numbers that can be added and stored: the sums of two lists add up to those of both.

    Rollouts without a score, and those of agents without sub-agents, do not count.
    """
    sums: Counter[str] = Counter()
    for rollout in rollouts:
        if rollout.work is not None and rollout.reward is not None:
            sums.update(_of_score(rollout.reward_parts.get(PERF, rollout.reward)))
            sums.update(_of_work(rollout.work))
            sums.update(_of_nodes(rollout.nodes))
    return sums


def parallel_figures(sums: Mapping[str, int]) -> ParallelFigures | None:
    """Return the ratios of sums from `work_sums`; None if they are over no rollouts.

    A ratio without data is None, never 0, and a share lies between 0 and 1.
    """
    n = Counter(sums)
    rollouts, executed, attempted = n["rollouts"], n["executed"], n["attempted"]
    if not rollouts:
        return None
    return ParallelFigures(
        rollouts=rollouts,
        perf=_ratio(n["perf"], rollouts * MILLION),
        solved=n["solved"],
        assign_rate=_ratio(n["assigning"], rollouts),
        delegate_ratio=_ratio(executed, executed + n["direct_calls"]),
        assigns_per_rollout=_ratio(executed, rollouts),
        assigns_per_turn=_ratio(executed, n["turns"]),
        width_mean=_ratio(n["width_mean"], n["assigning"] * MILLION),
        width_max=_ratio(n["width_max"], n["assigning"]),
        critical_steps=_ratio(n["critical_steps"], rollouts),
        scheduled_steps=_ratio(n["scheduled_steps"], rollouts),
        total_steps=_ratio(n["total_steps"], rollouts),
        speedup=_ratio(n["total_steps"], n["critical_steps"]),
        balance=_ratio(n["balance"], n["balanced"] * MILLION),
        finish_rate=_ratio(n["valid"], executed),
        invalid=_invalid(n),
        duplicate_share=_ratio(n["duplicate"], executed),
        over_cap_share=_ratio(n["over_cap"], attempted),
        refused_share=_ratio(n["refused"], attempted),
        abandoned_share=_ratio(n["abandoned"], attempted),
        subagent_tokens=_ratio(n["subagent_tokens"], rollouts),
        tokens_per_solved=_ratio(n["subagent_tokens"], n["solved"]),
        result_chars_per_assign=_ratio(n["result_chars"], executed),
        critical_seconds=_ratio(n["critical_seconds"], rollouts * MILLION),
        queued_seconds=_ratio(n["queued_seconds"], rollouts * MILLION),
        straggler_seconds=_ratio(n["straggler_seconds"], rollouts * MILLION),
        eta=_ratio(n["active_seconds"], n["critical_seconds"]),
    )


def _of_score(perf: float) -> dict[str, int]:
    return {"rollouts": 1, "perf": _millionths(perf), "solved": int(perf >= SOLVED)}


def _of_work(work: Work) -> dict[str, int]:
    sums: dict[str, int] = {name: getattr(work.assigns, name) for name in Assigns.model_fields}
    for name in ("critical_steps", "scheduled_steps", "total_steps", "direct_calls", "created"):
        sums[name] = getattr(work, name)
    for name in _SECONDS:
        sums[f"{name}_seconds"] = _millionths(getattr(work.seconds, name))
    if work.assigns.executed:
        sums |= {"assigning": 1, "width_max": work.width_max, "width_mean": _millionths(work.width_mean)}
    if work.balance is not None:
        sums |= {"balanced": 1, "balance": _millionths(work.balance)}
    return sums | {
        "turns": len(work.main_steps),
        "subagent_tokens": work.subagent_tokens,
        "result_chars": work.result_chars,
    }


def _of_nodes(nodes: Sequence[AgentNode]) -> Counter[str]:
    begun = [node for node in nodes if node.invalid_because is not InvalidBecause.CANCELLED or node.seconds.worked]
    reasons = (node.invalid_because for node in begun)
    sums = Counter(f"{_INVALID}{reason}" for reason in reasons if reason is not None)
    return sums + Counter(nodes=len(begun))


def _invalid(n: Counter[str]) -> dict[InvalidBecause, float] | None:
    """Return the shares of the reasons that occurred; None if that is not known of every assigned task."""
    executed = n["executed"]
    if not executed or n["nodes"] != executed:
        return None
    counts = {reason: n[f"{_INVALID}{reason}"] for reason in InvalidBecause}
    return {reason: count / executed for reason, count in counts.items() if count}


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _millionths(value: float) -> int:
    return round(value * MILLION)
