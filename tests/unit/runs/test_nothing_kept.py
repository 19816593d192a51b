"""A run that delivers nothing says why, and stops where its limits say so; a person can resume it."""

import re
from dataclasses import replace

import anyio
import pytest
from structlog.testing import capture_logs

from api_schemas.errors import ErrorInfo
from api_schemas.runs import InlineTasks, RunPatch, RunState
from api_schemas.tasks import Task
from rollout_service.runs import RunOverError
from rollout_service.runs.delivery import RunWithoutBatchesError
from rollout_service.runs.planning import REFUSE_AFTER, REPORT_AFTER, RunStoppedError, reason_to_refuse
from rollout_service.store.contract import Lease
from rollout_service.store.rules import DROPPED_IN_A_ROW
from rollout_service.store.runs_contract import RunRecord
from tests.support.run_bench import BROKEN, GONE, Bench, alternate, bench, place
from tests.support.waiting import until

ENDLESS = InlineTasks(tasks=[Task(environment="calc", instance={"n": n}) for n in range(8)], epochs=None)


class Grader:
    """Gives every sample the same outcome."""

    def __init__(self, outcome: float | ErrorInfo) -> None:
        self.outcome = outcome

    def __call__(self, lease: Lease) -> float | ErrorInfo:
        return self.outcome


def differing(lease: Lease) -> float:
    """Return a reward of its own for each sample, so that every group is kept."""
    return float(place(lease)[1])


async def with_problem(it: Bench) -> RunRecord:
    """Wait until the run has a problem, and return it."""
    while (run := await it.store.runs.get("a")).problem is None:
        await anyio.sleep(0.01)
    return run


async def test_a_broken_grader_pauses_its_run_until_a_person_resumes_it():
    async with bench(Grader(BROKEN)) as it:
        with capture_logs() as logs:
            await it.create(source=ENDLESS, max_failed_in_a_row=8, max_concurrent=4)
            run = await with_problem(it)
        assert (run.state, run.problem.code, run.problem.boundary) == (
            RunState.PAUSED,
            "groups_failed",
            "environment",
        )
        said = r"every sample of (\d+) groups in a row ended in environment_failed: broken"
        found = re.fullmatch(said, run.problem.message)
        assert 8 <= int(found[1]) <= 8 + 4
        assert "resume the run" in run.problem.hint
        assert [line["run"] for line in logs if line["event"] == "a run cannot go on"] == ["a"]
        while run.count("open"):
            run = await it.store.runs.get("a")
        assert 8 <= run.cursor <= 8 + 4, "no more groups began"
        assert 'rollout_run_problems_total{code="groups_failed"} 1.0' in it.metrics.render().decode()
        with pytest.raises(RunStoppedError, match="the run a is paused: every sample of") as refused:
            await it.lease(timeout=0)
        assert refused.value.context["problem"]["code"] == "groups_failed"

        it.play = alternate
        resumed = await it.service.patch("a", RunPatch(state=RunState.RUNNING))
        assert resumed.problem is None
        assert len((await it.next()).groups) == 2


@pytest.mark.slow
async def test_a_run_with_the_default_limit_is_paused():
    async with bench(Grader(BROKEN)) as it:
        await it.create(source=ENDLESS, group_size=1)
        while (run := await with_problem(it)).state is RunState.RUNNING:
            await anyio.sleep(0.01)
        assert run.problem.code == "groups_failed"


@pytest.mark.slow
async def test_equal_rewards_are_a_problem_that_does_not_stop_the_run():
    grader = Grader(1.0)
    async with bench(grader) as it:
        with capture_logs() as logs:
            await it.create(source=ENDLESS)
            run = await with_problem(it)
            await until(lambda: any(line["event"] == "a run keeps no group" for line in logs))
        assert (run.state, run.problem.code) == (RunState.RUNNING, "groups_dropped")
        found = re.fullmatch(r"no group was kept of the last (\d+) \(\1 zero_variance\)", run.problem.message)
        assert int(found[1]) >= REPORT_AFTER
        assert "same reward" in run.problem.hint
        assert [line["run"] for line in logs if line["event"] == "a run keeps no group"] == ["a"]
        await until(lambda: it.manager.troubled)
        assert "rollout_run_dropped_in_a_row" in it.metrics.render().decode()
        changed = [
            event.subject for event in await it.store.events(after=0, limit=10_000) if event.kind == "run.changed"
        ]
        assert changed == ["a"]

        it.play = alternate
        await it.next()
        run = await it.store.runs.get("a")
        assert (run.problem, run.state) == (None, RunState.RUNNING)


async def test_a_limit_stops_a_run_whatever_the_reason():
    async with bench(Grader(1.0)) as it:
        await it.create(source=ENDLESS, max_dropped_in_a_row=6, max_concurrent=4)
        run = await with_problem(it)
        assert (run.state, run.problem.code) == (RunState.PAUSED, "groups_dropped")
        assert "zero_variance" in run.problem.message
        assert run.cursor < REPORT_AFTER


@pytest.mark.slow
async def test_failures_that_may_pass_pause_no_run_by_default():
    async with bench(Grader(GONE)) as it:
        await it.create(source=ENDLESS, group_size=1, infrastructure_retries=0)
        while (run := await with_problem(it)).count("dropped:too_few_usable") < 40:
            await anyio.sleep(0.01)
        assert (run.state, run.problem.code) == (RunState.RUNNING, "groups_dropped")
        assert run.problem.message.endswith("the newest error is engine_gone: gone")


async def test_a_run_that_took_all_tasks_and_delivered_nothing_does_not_end_as_if_it_had():
    async with bench(Grader(1.0)) as it:
        await it.create(tasks=3)
        with pytest.raises(RunWithoutBatchesError, match=r"no group was kept of 3 \(3 zero_variance\)") as over:
            await it.lease()
        assert over.value.code == "run_without_batches"
        view = await it.service.get("a")
        assert (view.state, view.problem.code) == (RunState.FINISHED, "groups_dropped")


@pytest.mark.slow
async def test_the_end_of_a_run_that_delivered_is_no_problem():
    async with bench(lambda lease: float(lease.rollout_id.endswith("0.1"))) as it:
        await it.create(tasks=30)
        assert len(await it.all()) > 0
        assert (await it.service.get("a")).problem is None
        with pytest.raises(RunOverError, match="all its batches are acknowledged"):
            await it.lease()


async def test_a_run_that_was_ended_without_a_batch_says_only_that():
    async with bench(Grader(1.0)) as it:
        await it.create(source=ENDLESS)
        await it.store.runs.update("a", state=RunState.ENDED)
        with pytest.raises(RunOverError, match="it delivered no batch") as over:
            await it.lease()
        assert over.value.code == "run_over"


@pytest.mark.slow
async def test_waiting_is_refused_only_where_no_batch_will_come_by_itself():
    async with bench(Grader(1.0)) as it:
        await it.create(source=ENDLESS)
        run = await with_problem(it)
        long = replace(run, counters={DROPPED_IN_A_ROW + "zero_variance": REFUSE_AFTER})
        assert reason_to_refuse(replace(run, counters=long.counters | {"batched": 1})) is None
        refusal = reason_to_refuse(long)
        assert (refusal.code, refusal.status) == ("run_stopped", 409)
        short = {DROPPED_IN_A_ROW + "zero_variance": REFUSE_AFTER - 1}
        assert reason_to_refuse(replace(run, counters=short)) is None
        paused = replace(run, state=RunState.PAUSED, counters={})
        assert reason_to_refuse(paused) is not None
        assert reason_to_refuse(replace(paused, counters={"open": 1})) is None
        assert reason_to_refuse(replace(paused, problem=None)) is None, "a person paused it"


async def test_a_run_that_waits_for_a_newer_version_says_so():
    async with bench(alternate) as it:
        await it.create(source=ENDLESS, max_staleness=0)
        assert (await it.service.get("a")).warnings == []
        await it.next()
        [warning] = (await it.service.get("a")).warnings
        assert warning.startswith("max_staleness: all groups that version 0 allows are acknowledged")
        it.version = 1
        await it.next()


async def test_a_run_whose_engines_are_too_old_tries_a_single_group_and_says_so():
    async with bench(differing) as it:
        await it.create(source=InlineTasks(open=True), tasks=0, max_staleness=1, version=5)
        assert await it.lease(timeout=0) is None
        await it.store.runs.append("a", ENDLESS.tasks * 20, offset=None, close=False)
        while not (run := await it.store.runs.get("a")).count("dropped:stale"):
            await anyio.sleep(0.01)
        for _ in range(3):
            await it.manager.step()
        run = await it.store.runs.get("a")
        assert (run.cursor, run.count("open")) == (1, 0)
        [warning] = (await it.service.get("a")).warnings
        assert "serves version 0, the trainer has reported version 5, and tokens older than 4 are refused" in warning
        it.version = 4
        assert len((await it.next()).groups) == 2
        assert (await it.service.get("a")).warnings == []


async def test_engines_with_newer_weights_than_they_were_given_are_not_too_old():
    async with bench(differing) as it:
        it.sampled_by = lambda _: 5
        await it.create(source=InlineTasks(open=True), tasks=0, max_staleness=0, version=5)
        assert await it.lease(timeout=0) is None
        await it.store.runs.append("a", ENDLESS.tasks * 20, offset=None, close=False)
        await it.next()
        assert it.manager.is_behind(await it.store.runs.get("a")) is False
