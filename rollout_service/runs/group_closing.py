"""Closes a group whose rollouts have ended: masked samples, the filters' verdict, penalties, advantages.

Guarantee: the same samples and weights always give the same closure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from api_schemas.errors import Boundary
from api_schemas.rollouts import Rollout, RolloutState, StopReason
from api_schemas.rollouts.figures import StepsSpread
from api_schemas.rollouts.trees import NodeDetail
from api_schemas.runs import Advantages, OverlongPenalty, RunRequest
from api_schemas.runs.auxiliary import Auxiliary, RewardPart, RewardWeights
from rollout_service.groups import (
    CANCELLED,
    DELETED,
    STALE,
    STRAGGLER,
    FilterChain,
    GroupOutcome,
    SampleOutcome,
    group_normalized,
    group_statistics,
    leave_one_out,
    parts_normalized,
    soft_overlong_penalty,
    work_sums,
)
from rollout_service.groups.auxiliary import FINISH, MEASURES, NO_PARTS, weighted_parts, weighted_total
from rollout_service.groups.shares import Owner
from rollout_service.groups.statistics import group_figures
from rollout_service.store import rules
from rollout_service.store.runs_contract import ClosedSample, GroupClosure, GroupMember

PERMANENT = frozenset({Boundary.ENVIRONMENT, Boundary.REQUEST})
"""The boundaries whose failures recur whenever the rollout is retried."""
_TRUNCATIONS = frozenset(
    {
        StopReason.MAX_TURNS,
        StopReason.MAX_TOKENS,
        StopReason.CONTEXT_FULL,
        StopReason.TRUNCATED,
        StopReason.AGENT_TIMEOUT,
    }
)
_ADVANTAGES = {Advantages.GROUP_NORM: group_normalized, Advantages.LEAVE_ONE_OUT: leave_one_out}


def sample_outcome(
    member: GroupMember,
    rollout: Rollout,
    auxiliary: Auxiliary | None,
    weights: RewardWeights | None,
) -> SampleOutcome:
    """Return the outcome of a sample whose rollout has ended, with the environment's own reward.

    With `auxiliary` and its `weights`, the outcome has all parts of the reward, and a sample without them is masked.
    """
    masked, parts = _masked_because(member, rollout), {}
    if masked is None and rollout.reward is not None:
        parts = _parts(rollout.reward, rollout.reward_parts, auxiliary, weights)
        masked = None if parts else NO_PARTS
    return SampleOutcome(
        sample=member.sample,
        reward=rollout.reward,
        masked=masked,
        sampled_tokens=rollout.usage.sampled_tokens,
        truncated=rollout.stop_reason in _TRUNCATIONS,
        tool_calls=rollout.usage.tool_calls,
        malformed_calls=rollout.usage.malformed_calls,
        oldest_version=member.oldest_version,
        newest_version=member.newest_version,
        parts=parts,
    )


def _parts(
    perf: float, named: Mapping[str, float], auxiliary: Auxiliary | None, weights: RewardWeights | None
) -> dict[RewardPart, float]:
    """Return the parts of a reward and their total; none if those that the run weighs are missing."""
    if auxiliary is None or weights is None:
        return {RewardPart.PERF: perf, RewardPart.REWARD: perf}
    measure = MEASURES[auxiliary.parallel]
    if measure not in named or FINISH not in named:
        return {}
    parts = {
        RewardPart.PERF: perf,
        RewardPart.PARALLEL: named[measure],
        RewardPart.FINISH: named[FINISH],
    }
    return parts | {RewardPart.REWARD: weighted_total(weights, parts)}


def _masked_because(member: GroupMember, rollout: Rollout) -> str | None:
    if member.is_erased:
        return DELETED
    if rollout.state is RolloutState.COMPLETED and rollout.reward is not None:
        return None
    if rollout.error is not None:
        return rollout.error.code
    return STRAGGLER if member.is_straggler else CANCELLED


def close_group(
    request: RunRequest,
    chain: FilterChain,
    number: int,
    samples: Sequence[tuple[GroupMember, Rollout]],
    *,
    weights: RewardWeights | None,
    cancel_reason: str | None = None,
    bound: int | None = None,
) -> GroupClosure:
    """Return the closure of a group whose rollouts have all ended.

    Filters see rewards without penalties, and by default the environment's alone; advantages are computed from the
    rewards with penalties. `weights` are those of the parts of the reward if the run has an auxiliary reward. Samples
    with a token older than version `bound` are masked, and the filters see the others. A group that would have been
    kept with its stale samples is dropped as stale. With `cancel_reason`, the group is dropped for that reason,
    whatever its rewards.
    """
    outcomes = (sample_outcome(member, rollout, request.auxiliary, weights) for member, rollout in samples)
    whole = GroupOutcome(number, tuple(outcomes))
    scored = whole.without_older_than(bound)
    reason = cancel_reason or _dropped_because(chain, scored, whole)
    group = GroupOutcome(number, tuple(_with_total(sample, request.overlong) for sample in scored.samples))
    statistics = group_statistics(group if weights is None else scored)
    advantages = _advantages(group, request, weights)
    closed = [
        ClosedSample(
            sample=sample.sample,
            rollout_id=member.rollout_id,
            usable=sample.usable,
            masked_because=sample.masked,
            reward=sample.reward if sample.usable else None,
            advantage=advantage,
            owner=_owner(rollout),
        )
        for sample, (member, rollout), advantage in zip(group.samples, samples, advantages, strict=True)
    ]
    return GroupClosure(
        number=number,
        reason=reason,
        samples=closed,
        reward_mean=statistics.mean,
        reward_std=statistics.std,
        oldest_version=group.oldest_version,
        newest_version=group.newest_version,
        reward_weights=weights,
        measured_on=None if weights is None else RewardPart.PERF,
        filtered_on=[] if weights is None else chain.parts,
        critical_steps=_critical_steps(request, group, samples),
        failure=_failure(samples),
        figures=group_figures(rollout for _, rollout in samples),
        counts={rules.WORK + name: n for name, n in work_sums(rollout for _, rollout in samples).items()},
    )


def _failure(samples: Sequence[tuple[GroupMember, Rollout]]) -> str | None:
    """Return the code of the permanent error that ended every sample, if there is one such error."""
    errors = [rollout.error for _, rollout in samples]
    codes = {error.code if error and error.boundary in PERMANENT else None for error in errors}
    return codes.pop() if len(codes) == 1 else None


def _owner(rollout: Rollout) -> Owner | None:
    session = rollout.session
    return None if session is None else Owner(session.session_id, session.user, session.tenant)


def _critical_steps(
    request: RunRequest, group: GroupOutcome, samples: Sequence[tuple[GroupMember, Rollout]]
) -> StepsSpread | None:
    """Return the critical steps of the usable samples, if the run asks for sub-agents and there may be any."""
    pairs = zip(group.samples, samples, strict=True)
    steps = [one.work.critical_steps for sample, (_, one) in pairs if sample.usable and one.work is not None]
    if request.nodes is NodeDetail.NONE or not steps:
        return None
    return StepsSpread(min=min(steps), mean=sum(steps) / len(steps), max=max(steps))


def _dropped_because(chain: FilterChain, group: GroupOutcome, before: GroupOutcome) -> str | None:
    verdict = chain.judge(group)
    if verdict.keep:
        return None
    return STALE if group is not before and chain.judge(before).keep else verdict.reason


def _with_total(sample: SampleOutcome, overlong: OverlongPenalty | None) -> SampleOutcome:
    """Return a sample with its total and its penalty as its reward."""
    if not sample.usable:
        return sample
    return replace(sample, reward=_penalized(sample.parts[RewardPart.REWARD], sample, overlong))


def _penalized(reward: float, sample: SampleOutcome, overlong: OverlongPenalty | None) -> float:
    if overlong is None:
        return reward
    return reward + soft_overlong_penalty(
        sample.sampled_tokens,
        max_tokens=overlong.max_tokens,
        buffer_tokens=overlong.buffer_tokens,
        penalty=overlong.penalty,
    )


def _advantages(
    group: GroupOutcome, request: RunRequest, weights: RewardWeights | None
) -> list[float | None]:
    match request.advantages:
        case Advantages.NONE:
            return [None] * len(group.samples)
        case Advantages.PARTS_NORM:
            if weights is None:
                raise ValueError("advantages of each part need the weights of the parts")
            return _advantages_by_part(group, request.overlong, weights)
        case kind:
            return _ADVANTAGES[kind]([sample.reward if sample.usable else None for sample in group.samples])


def _advantages_by_part(
    group: GroupOutcome, overlong: OverlongPenalty | None, weights: RewardWeights
) -> list[float | None]:
    """Return the advantages of each part alone, weighted; penalties belong to the outcome's part."""

    def value(sample: SampleOutcome, part: RewardPart) -> float | None:
        if not sample.usable:
            return None
        raw = sample.parts[part]
        return _penalized(raw, sample, overlong) if part is RewardPart.PERF else raw

    weighted = weighted_parts(weights)
    return parts_normalized(
        [(weight, [value(sample, part) for sample in group.samples]) for part, weight in weighted.items()]
    )
