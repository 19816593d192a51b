"""The groups of runs that have begun: failed samples are retried, stragglers cancelled, and ended groups closed.

A group closes once, with all its samples, or with the rest of one that was cancelled. The same samples and weights
always give the same closure. A sample that the run's trainer would refuse as too old trains nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

import anyio.to_thread

from api_schemas.errors import Boundary
from api_schemas.rollouts import Rollout, RolloutState, StopReason
from api_schemas.rollouts.figures import StepsSpread
from api_schemas.rollouts.trees import NodeDetail
from api_schemas.runs import Advantages, Branching, OverlongPenalty, RunRequest, RunState
from api_schemas.runs.auxiliary import Auxiliary, RewardPart, RewardWeights
from api_schemas.trajectories import Trajectory
from rollout_service.base.errors import RecordLostError
from rollout_service.base.ids import SampleId
from rollout_service.engines.serving.replay import was_edited
from rollout_service.groups.auxiliary import FINISH, MEASURES, NO_PARTS, reward_weights, weighted_parts, weighted_total
from rollout_service.groups.branching import branch_points
from rollout_service.groups.filters import (
    CANCELLED,
    DELETED,
    STALE,
    STRAGGLER,
    SURPLUS,
    FilterChain,
    GroupOutcome,
    SampleOutcome,
)
from rollout_service.groups.shares import Owner
from rollout_service.groups.statistics import (
    group_figures,
    group_normalized,
    leave_one_out,
    moments,
    parts_normalized,
    soft_overlong_penalty,
    work_sums,
)
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.runs.planning import ActiveRun, has_surplus, rollout_request
from rollout_service.store import rules
from rollout_service.store.codec.rollouts import RESTORE
from rollout_service.store.contract import Store
from rollout_service.store.runs_contract import ClosedSample, GroupClosure, GroupMember, OpenGroup, RunRecord, RunStore

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
    parts = {RewardPart.PERF: perf, RewardPart.PARALLEL: named[measure], RewardPart.FINISH: named[FINISH]}
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
    measured = (group if weights is None else scored).rewards
    mean, std = moments(measured) if measured else (None, None)
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
        reward_mean=mean,
        reward_std=std,
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
    """Return the code of a permanent error that ended every sample."""
    errors = [rollout.error for _, rollout in samples]
    codes = {error.code if error and error.boundary in PERMANENT else None for error in errors}
    return codes.pop() if len(codes) == 1 else None


def _owner(rollout: Rollout) -> Owner | None:
    session = rollout.session
    return None if session is None else Owner(session.session_id, session.user, session.tenant)


def _critical_steps(
    request: RunRequest, group: GroupOutcome, samples: Sequence[tuple[GroupMember, Rollout]]
) -> StepsSpread | None:
    """Look at usable samples; return None for a run that does not ask for sub-agents."""
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


def _advantages(group: GroupOutcome, request: RunRequest, weights: RewardWeights | None) -> list[float | None]:
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


class GroupsUnderWay:
    """Settles the open groups of runs. The store of runs is given to each call: it may be fenced by a lease."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._strict: set[str] = set()
        """Runs whose last lease refused stale tokens. Before the first lease, a trainer may still accept them."""

    def refuse_stale(self, run_id: str, strict: bool) -> None:
        if strict:
            self._strict.add(run_id)
        else:
            self._strict.discard(run_id)

    async def settle(self, runs: RunStore, active: ActiveRun) -> None:
        """Settle every open group of a run, and bring `active` up to date."""
        run = active.run
        for group in active.groups:
            cancel_reason = CANCELLED if run.state is RunState.ENDED else group.cancel_reason
            if cancel_reason is not None:
                await self._cancel(group.members)
            await self._settle_group(runs, active, group, cancel_reason)
        await self.mask_stale(runs, run, active.chain)
        active.run = await runs.get(run.run_id)
        if has_surplus(active.run):
            await runs.cancel_groups(run.run_id, SURPLUS)
        active.groups = await runs.open_groups(run.run_id)
        await self._cancel_stragglers(runs, active)

    async def mask_stale(self, runs: RunStore, run: RunRecord, chain: FilterChain) -> None:
        """Mask samples that have become too old for a run's trainer, if it refuses them."""
        bound = self.bound(run)
        if bound is None:
            return
        for group in await runs.stale_groups(run.run_id, bound):
            samples = await self._samples(group)
            weights = group.reward_weights or reward_weights(run.request, run.version)
            revised = close_group(run.request, chain, group.number, samples, weights=weights, bound=bound)
            await runs.reclose_group(run.run_id, revised)

    def bound(self, run: RunRecord) -> int | None:
        """Return the oldest version that a sample may have; None while stale samples are accepted."""
        return rules.oldest_allowed(run) if run.run_id in self._strict else None

    async def _settle_group(
        self, runs: RunStore, active: ActiveRun, group: OpenGroup, cancel_reason: str | None
    ) -> None:
        """Retry failed samples, and close the group once all its rollouts have ended."""
        retried = False
        if cancel_reason is None:
            _check_complete(group)
            for member in group.members:
                if member.state is RolloutState.FAILED:
                    retried |= await self._retry(runs, active.run, group.number, member)
        if retried or not all(member.state.terminal for member in group.members):
            return
        branching = active.run.request.branching
        if cancel_reason is None and branching is not None and len(group.members) == branching.roots:
            await self._branch(runs, active.run, group, branching)
            return
        samples = await self._samples(group, whole=cancel_reason is None)
        whole = len(samples) == active.run.request.group_size
        cancelled = any(member.state is RolloutState.CANCELLED for member in group.members)
        closure = close_group(
            active.run.request,
            active.chain,
            group.number,
            samples,
            weights=reward_weights(active.run.request, active.run.version),
            cancel_reason=cancel_reason if cancelled or not whole else None,
            bound=self.bound(active.run),
        )
        await runs.close_group(active.run.run_id, closure)
        rollouts = [rollout for _, rollout in samples]
        active.estimates.record_closure(closure, rollouts, [member.is_straggler for member, _ in samples])
        self._metrics.parallel.observe(active.run.run_id, rollouts)

    async def _branch(self, runs: RunStore, run: RunRecord, group: OpenGroup, branching: Branching) -> None:
        """Start the samples that branch off the roots, which have ended."""
        roots = [
            (member.rollout_id, await self._trajectory_of_root(member.rollout_id, branching))
            for member in group.members
            if member.reward is not None
        ]
        first, size = len(group.members), run.request.group_size
        choose = partial(branch_points, roots, size - first, branching.at, reuse_results=branching.reuse_results)
        points = await anyio.to_thread.run_sync(choose)
        task = (await self._rollout(group.members[0])).task
        requests = [
            rollout_request(run, group.number, sample, task, 0, point)
            for sample, point in zip(range(first, size), points, strict=True)
        ]
        await runs.extend_group(run.run_id, group.number, first, requests)

    async def _trajectory_of_root(self, rollout_id: str, branching: Branching) -> Trajectory | None:
        """Return the trajectory of a root; None if no branch can begin in it."""
        trajectory = await self._store.trajectory(rollout_id)
        if trajectory is not None and branching.reuse_results and was_edited(trajectory):
            return None  # the results of its tools are not known
        return trajectory

    async def _samples(self, group: OpenGroup, *, whole: bool = True) -> list[tuple[GroupMember, Rollout]]:
        """Return the rollouts of a group that has ended; without `whole`, omit those that are lost."""
        if whole:
            _check_complete(group)
        samples: list[tuple[GroupMember, Rollout]] = []
        for member in group.members:
            with nullcontext() if whole else suppress(RecordLostError):
                samples.append((member, await self._rollout(member)))
        return samples

    async def _rollout(self, member: GroupMember) -> Rollout:
        rollout = await self._store.get(member.rollout_id, whole_tree=True)
        if rollout is None:
            raise RecordLostError(f"the rollout {member.rollout_id} of a group is missing from the store", hint=RESTORE)
        return rollout

    async def _retry(self, runs: RunStore, run: RunRecord, number: int, member: GroupMember) -> bool:
        """Retry a failed sample if that may help and retries are left; return whether it is retried."""
        retry = SampleId.parse(member.rollout_id).retry + 1
        rollout = await self._rollout(member)
        is_permanent = rollout.error is not None and rollout.error.boundary in PERMANENT
        if is_permanent or retry > run.request.infrastructure_retries:
            return False
        request = rollout_request(run, number, member.sample, rollout.task, retry, rollout.branch_of)
        await runs.retry_sample(run.run_id, number, member.sample, request)
        return True

    async def _cancel(self, members: Sequence[GroupMember]) -> None:
        for member in members:
            if not member.state.terminal:
                await self._store.cancel(member.rollout_id)

    async def _cancel_stragglers(self, runs: RunStore, active: ActiveRun) -> None:
        asked = active.run.request.stragglers
        if asked is None:
            return
        limit = active.estimates.times.straggler_limit(asked)
        for group in active.groups:
            usable = sum(member.reward is not None for member in group.members)
            if limit is not None and usable >= asked.min_samples:
                slow = [member for member in group.members if (member.rolling_seconds or 0.0) > limit]
                stragglers = {member.sample for member in group.members if member.is_straggler}
                if not {member.sample for member in slow} <= stragglers:
                    stragglers |= {member.sample for member in slow}
                    await runs.mark_stragglers(active.run.run_id, group.number, sorted(stragglers))
                await self._cancel(slow)
            await self._cancel([member for member in group.members if member.is_straggler])


def _check_complete(group: OpenGroup) -> None:
    if group.lost:
        gone = ", ".join(group.lost)
        raise RecordLostError(f"rollouts of group {group.number} are missing from the store: {gone}", hint=RESTORE)
