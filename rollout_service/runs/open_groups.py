"""The groups of runs that have begun: failed samples are retried, stragglers cancelled, and ended groups closed.

Guarantees: a group closes once, with all its samples, or with the rest of one that was cancelled. A sample that the
run's trainer would refuse as too old trains nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress

from api_schemas.rollouts import Rollout, RolloutState
from api_schemas.runs import RunState
from rollout_service.base.errors import RecordLostError
from rollout_service.base.ids import SampleId
from rollout_service.groups import CANCELLED, SURPLUS, FilterChain, StragglerRule
from rollout_service.groups.auxiliary import reward_weights
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.runs.group_closing import PERMANENT, close_group
from rollout_service.runs.planning import ActiveRun, has_surplus, rollout_request
from rollout_service.store import rules
from rollout_service.store.codec.rollouts import RESTORE
from rollout_service.store.contract import Store
from rollout_service.store.runs_contract import GroupMember, OpenGroup, RunRecord, RunStore


class GroupsUnderWay:
    """Settles the open groups of runs, by whichever store of runs is given: it may be fenced by a lease."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._strict: set[str] = set()
        """Runs whose last lease refused stale tokens. Before the first lease, a trainer may still accept them."""

    def refuse_stale(self, run_id: str, strict: bool) -> None:
        """Note whether a run's trainer refuses stale samples."""
        if strict:
            self._strict.add(run_id)
        else:
            self._strict.discard(run_id)

    async def settle(self, runs: RunStore, active: ActiveRun) -> None:
        """Settle every open group of a run, and bring `active` up to date.

        Raises:
            StoreError: The store failed.
            RecordLostError: The store lost a rollout of a group.
        """
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
        """Mask the samples that have become too old for a run's trainer, if it refuses them."""
        bound = self._bound(run)
        if bound is None:
            return
        for group in await runs.stale_groups(run.run_id, bound):
            samples = await self._samples(group)
            weights = group.reward_weights or reward_weights(run.request, run.version)
            revised = close_group(run.request, chain, group.number, samples, weights=weights, bound=bound)
            await runs.reclose_group(run.run_id, revised)

    def _bound(self, run: RunRecord) -> int | None:
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
            bound=self._bound(active.run),
        )
        await runs.close_group(active.run.run_id, closure)
        rollouts = [rollout for _, rollout in samples]
        active.estimates.record_closure(closure, rollouts, [member.is_straggler for member, _ in samples])
        self._metrics.parallel.observe(active.run.run_id, rollouts)

    async def _samples(self, group: OpenGroup, *, whole: bool = True) -> list[tuple[GroupMember, Rollout]]:
        """Return the rollouts of a group that has ended; without `whole`, omit those that are lost.

        Raises:
            RecordLostError: With `whole`, the record of a rollout is missing or damaged.
        """
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
            raise RecordLostError(
                f"the rollout {member.rollout_id} of a group is missing from the store", hint=RESTORE
            )
        return rollout

    async def _retry(self, runs: RunStore, run: RunRecord, number: int, member: GroupMember) -> bool:
        """Retry a failed sample if that may help and retries are left; return whether it is retried."""
        retry = SampleId.parse(member.rollout_id).retry + 1
        rollout = await self._rollout(member)
        is_permanent = rollout.error is not None and rollout.error.boundary in PERMANENT
        if is_permanent or retry > run.request.infrastructure_retries:
            return False
        request = rollout_request(run, number, member.sample, rollout.task, retry)
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
        rule = StragglerRule(asked.quantile, asked.factor, asked.min_samples)
        limit = rule.limit(active.estimates.times)
        for group in active.groups:
            usable = sum(member.reward is not None for member in group.members)
            if limit is not None and usable >= rule.min_samples:
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
        raise RecordLostError(
            f"rollouts of group {group.number} are missing from the store: {gone}", hint=RESTORE
        )
