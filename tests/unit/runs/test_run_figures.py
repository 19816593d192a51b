"""The figures of a run on sub-agents: what closing a group adds, the last rollouts, and what a restart leaves."""

import json
from collections.abc import Sequence

import anyio

from api_schemas.rollouts import Rollout, RolloutState
from api_schemas.rollouts.figures import RunParallel, StepsSpread
from api_schemas.rollouts.trees import NodeDetail, Work
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.tasks import Task
from rollout_service.groups.filters import FilterChain
from rollout_service.groups.statistics import parallel_figures, work_sums
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.runs.open_groups import close_group
from rollout_service.runs.planning import RECENT, RunEstimates
from rollout_service.store import rules
from rollout_service.store.codec.runs import encode_summary
from rollout_service.store.runs_contract import GroupClosure, GroupMember
from rollout_service.store.sqlite import SqliteStore
from tests.support.run_bench import run_manager, run_service
from tests.support.sub_agents import DIRECT, SERIAL, WIDE, rollout

REQUEST = RunRequest(source=InlineTasks(), batch_size=1)


def closed(*rollouts: Rollout, bound: int | None = None, request: RunRequest = REQUEST) -> GroupClosure:
    members = [
        GroupMember(number, one.rollout_id, RolloutState.COMPLETED, one.reward, None, 0, 0, is_straggler=False)
        for number, one in enumerate(rollouts)
    ]
    samples = list(zip(members, rollouts, strict=True))
    return close_group(request, FilterChain([], 1), 0, samples, weights=None, bound=bound)


def test_a_group_adds_what_its_scored_rollouts_did_even_if_it_is_dropped():
    rollouts = [rollout(WIDE), rollout(SERIAL, 0.5), rollout(DIRECT, None), rollout(None)]
    kept, dropped = closed(*rollouts), closed(*rollouts, bound=1)
    assert (kept.reason, dropped.reason) == (None, "stale")
    for closure in (kept, dropped):
        assert rules.work_counts(closure.counts) == work_sums([rollout(WIDE), rollout(SERIAL, 0.5)])


def test_a_group_without_sub_agents_adds_nothing():
    assert closed(rollout(None), rollout(None, 0.0)).counts == {}


def test_a_group_tells_its_critical_steps_if_the_run_asks_for_sub_agents():
    rollouts = [rollout(WIDE), rollout(SERIAL), rollout(DIRECT, None)]
    asking = REQUEST.model_copy(update={"nodes": NodeDetail.SUMMARY})
    assert closed(*rollouts).critical_steps is None
    assert closed(rollout(None), request=asking).critical_steps is None
    closure = closed(*rollouts, request=asking)
    assert closure.critical_steps == StepsSpread(min=5, mean=7.0, max=9)
    assert json.loads(encode_summary(closure))["critical_steps"] == {"min": 5, "mean": 7.0, "max": 9}
    assert "critical_steps" not in json.loads(encode_summary(closed(*rollouts)))


def test_the_last_rollouts_are_those_that_ended_last():
    estimates = RunEstimates()
    assert estimates.recent_figures is None
    for works in ([WIDE] * RECENT, [SERIAL] * (RECENT - 1), [None, DIRECT]):
        rollouts = [rollout(work, -0.5) for work in works]
        estimates.record_closure(closed(*rollouts), rollouts, [False] * len(rollouts))
    expected = parallel_figures(work_sums([rollout(SERIAL, -0.5)] * (RECENT - 1) + [rollout(DIRECT, -0.5)]))
    assert estimates.recent_figures == expected


class Played:
    """A run with a store, whose manager is asked for each step."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.metrics = Metrics()
        self.manager = run_manager(store, self.metrics)

    async def play(self, works: Sequence[Work | None]) -> None:
        """Let the rollouts that are queued end with this work, in order, and close their group."""
        await self.manager.step()
        leases = await self.store.claim("w", limit=len(works), lease_seconds=1e6)
        for lease, work in zip(leases, works, strict=True):
            await self.store.finish(lease, "w", rollout(work, 0.0, rollout_id=lease.rollout_id))
        await self.manager.step()

    async def figures(self) -> RunParallel | None:
        return self.manager.parallel(await self.store.runs.get("a"))


async def test_a_restart_loses_nothing_of_the_whole_run_and_begins_the_recent_figures_anew(tmp_path):
    with anyio.fail_after(60):
        async with await SqliteStore.open(tmp_path / "s.db") as store:
            tasks = [Task(environment="pointers", instance={"n": n}) for n in range(8)]
            request = RunRequest(
                run_id="a", source=InlineTasks(tasks=tasks), batch_size=4, group_size=2, max_concurrent=1
            )
            await store.runs.create(request, tasks=8, digest=None, version=0)
            first = Played(store)
            await first.play([WIDE, SERIAL])
            before = await first.figures()
            assert before.total.rollouts == 2
            assert (
                before.total == before.recent == parallel_figures(work_sums([rollout(WIDE, 0.0), rollout(SERIAL, 0.0)]))
            )
            assert (await store.runs.get("a")).count("dropped:zero_variance") == 1
            service = run_service(store, first.manager)
            assert (await service.get("a", parallel=True)).parallel == before
            assert "parallel" not in (await service.get("a")).model_dump(), "clients refuse unknown fields"
            assert 'rollout_parallel_width_count{run="a"} 2.0' in first.metrics.render().decode()
            assert 'state="work:' not in first.metrics.render().decode()
        async with await SqliteStore.open(tmp_path / "s.db") as store:
            again = Played(store)
            assert await again.figures() == RunParallel(total=before.total)
            await again.play([DIRECT, DIRECT])
            after = await again.figures()
            assert (after.total.rollouts, after.total.assign_rate) == (4, 0.5)
            assert (after.recent.rollouts, after.recent.assign_rate) == (2, 0.0)
