"""The figures of a run on sub-agents: what closing a group adds, and the last rollouts."""

from __future__ import annotations

from api_schemas.rollouts import Rollout, RolloutState
from api_schemas.runs import InlineTasks, RunRequest
from rollout_service.groups import FilterChain, parallel_figures, work_sums
from rollout_service.runs.closing import close_group
from rollout_service.runs.estimates import RECENT, RunEstimates
from rollout_service.store import rules
from rollout_service.store.runs_contract import GroupClosure, GroupMember
from tests.support.sub_agents import DIRECT, SERIAL, WIDE, rollout

REQUEST = RunRequest(source=InlineTasks(), batch_size=1)


def closed(*rollouts: Rollout, bound: int | None = None) -> GroupClosure:
    members = [
        GroupMember(
            number, one.rollout_id, RolloutState.COMPLETED, one.reward, None, 0, 0, is_straggler=False
        )
        for number, one in enumerate(rollouts)
    ]
    samples = list(zip(members, rollouts, strict=True))
    return close_group(REQUEST, FilterChain([], 1), 0, samples, weights=None, bound=bound)


def test_a_group_adds_what_its_scored_rollouts_did_even_if_it_is_dropped() -> None:
    rollouts = [rollout(WIDE), rollout(SERIAL, 0.5), rollout(DIRECT, None), rollout(None)]
    kept, dropped = closed(*rollouts), closed(*rollouts, bound=1)
    assert (kept.reason, dropped.reason) == (None, "stale")
    for closure in (kept, dropped):
        assert rules.work_counts(closure.counts) == work_sums([rollout(WIDE), rollout(SERIAL, 0.5)])


def test_a_group_without_sub_agents_adds_nothing() -> None:
    assert closed(rollout(None), rollout(None, 0.0)).counts == {}


def test_the_last_rollouts_are_those_that_ended_last() -> None:
    estimates = RunEstimates()
    assert estimates.recent_figures is None
    for works in ([WIDE] * RECENT, [SERIAL] * (RECENT - 1), [None, DIRECT]):
        rollouts = [rollout(work, -0.5) for work in works]
        estimates.record_closure(closed(*rollouts), rollouts, [False] * len(rollouts))
    expected = parallel_figures(work_sums([rollout(SERIAL, -0.5)] * (RECENT - 1) + [rollout(DIRECT, -0.5)]))
    assert estimates.recent_figures == expected
