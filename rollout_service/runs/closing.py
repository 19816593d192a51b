"""Closes a group whose rollouts have ended: masked samples, penalties, the filters' verdict, advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from api_schemas.rollouts import Rollout, RolloutState, StopReason
from api_schemas.runs import Advantages, OverlongPenalty, RunRequest
from rollout_service.groups import (
    CANCELLED,
    STALE,
    STRAGGLER,
    FilterChain,
    GroupOutcome,
    SampleOutcome,
    group_normalized,
    group_statistics,
    leave_one_out,
    soft_overlong_penalty,
)
from rollout_service.store.runs_contract import ClosedSample, GroupClosure, GroupMember

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


def sample_outcome(member: GroupMember, rollout: Rollout) -> SampleOutcome:
    """Return the outcome of a sample whose rollout has ended, with the environment's own reward."""
    return SampleOutcome(
        sample=member.sample,
        reward=rollout.reward,
        masked=_masked_because(member, rollout),
        sampled_tokens=rollout.usage.sampled_tokens,
        truncated=rollout.stop_reason in _TRUNCATIONS,
        tool_calls=rollout.usage.tool_calls,
        malformed_calls=rollout.usage.malformed_calls,
        oldest_version=member.oldest_version,
        newest_version=member.newest_version,
    )


def _masked_because(member: GroupMember, rollout: Rollout) -> str | None:
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
    cancel_reason: str | None = None,
    bound: int | None = None,
) -> GroupClosure:
    """Return the closure of a group whose rollouts have all ended.

    Filters see the environment's rewards; advantages and statistics are computed from the rewards with penalties.
    Samples with a token older than version `bound` are masked, and the filters see the others. A group that would have
    been kept with its stale samples is dropped as stale. With `cancel_reason`, the group is dropped for that reason,
    whatever its rewards.
    """
    whole = GroupOutcome(number, tuple(sample_outcome(member, rollout) for member, rollout in samples))
    scored = whole.without_older_than(bound)
    reason = cancel_reason or _dropped_because(chain, scored, whole)
    group = GroupOutcome(number, tuple(_with_penalty(sample, request.overlong) for sample in scored.samples))
    statistics = group_statistics(group)
    advantages = _advantages(group, request.advantages)
    closed = [
        ClosedSample(
            sample=sample.sample,
            rollout_id=member.rollout_id,
            usable=sample.usable,
            masked_because=sample.masked,
            reward=sample.reward if sample.usable else None,
            advantage=advantage,
        )
        for sample, (member, _), advantage in zip(group.samples, samples, advantages, strict=True)
    ]
    return GroupClosure(
        number=number,
        reason=reason,
        samples=closed,
        reward_mean=statistics.mean,
        reward_std=statistics.std,
        oldest_version=group.oldest_version,
        newest_version=group.newest_version,
    )


def _dropped_because(chain: FilterChain, group: GroupOutcome, before: GroupOutcome) -> str | None:
    verdict = chain.judge(group)
    if verdict.keep:
        return None
    return STALE if group is not before and chain.judge(before).keep else verdict.reason


def _with_penalty(sample: SampleOutcome, overlong: OverlongPenalty | None) -> SampleOutcome:
    if overlong is None or sample.reward is None:
        return sample
    penalty = soft_overlong_penalty(
        sample.sampled_tokens,
        max_tokens=overlong.max_tokens,
        buffer_tokens=overlong.buffer_tokens,
        penalty=overlong.penalty,
    )
    return replace(sample, reward=sample.reward + penalty)


def _advantages(group: GroupOutcome, kind: Advantages) -> list[float | None]:
    if kind is Advantages.NONE:
        return [None] * len(group.samples)
    return _ADVANTAGES[kind]([sample.reward if sample.usable else None for sample in group.samples])
