"""The figures that show how well rollouts use sub-agents, and their failures.

`work_sums` adds up the work of rollouts, in whole numbers, so that sums can be added and stored; `parallel_figures`
turns sums into ratios.

Guarantees: the sums of two lists of rollouts add up to those of both. A ratio without data is None, never 0, and a
share lies between 0 and 1. Rollouts without a score, and those of agents without sub-agents, do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from api_schemas.rollouts import Rollout
from api_schemas.rollouts.figures import ParallelFigures
from api_schemas.rollouts.trees import AgentNode, Assigns, InvalidBecause, Work
from rollout_service.groups.auxiliary import PERF

SOLVED = 1.0
"""The lowest score that counts as solved."""
MILLION = 1_000_000
"""Fractions are summed in millionths, rounded for each rollout."""
_INVALID = "invalid:"
_SECONDS = ("critical", "queued", "straggler", "active")


def work_sums(rollouts: Iterable[Rollout]) -> Counter[str]:
    """Return the sums over the scored rollouts of agents with sub-agents; empty if there are none."""
    sums: Counter[str] = Counter()
    for rollout in rollouts:
        if rollout.work is not None and rollout.reward is not None:
            sums.update(_of_score(rollout.reward_parts.get(PERF, rollout.reward)))
            sums.update(_of_work(rollout.work))
            sums.update(_of_nodes(rollout.nodes))
    return sums


def parallel_figures(sums: Mapping[str, int]) -> ParallelFigures | None:
    """Return the figures that follow from sums, such as `work_sums` returns; None if they are over no rollouts."""
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
    begun = [
        node for node in nodes if node.invalid_because is not InvalidBecause.CANCELLED or node.seconds.worked
    ]
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
