"""Runs keep their promises with a real store and manager, and a worker whose rollouts end as the test says."""

import json
import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.from_thread
import pytest
from pydantic import JsonValue
from structlog.testing import capture_logs

from api_schemas.errors import ErrorInfo
from api_schemas.runs import (
    Advantages,
    DatasetTasks,
    FileTasks,
    FilterSpec,
    InlineTasks,
    RunRequest,
    RunState,
    Surplus,
)
from api_schemas.tasks import Task
from rollout_client.arrays import BatchArrays
from rollout_service.base.errors import InvalidFieldError, NotFoundError, RecordLostError, StoreError
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.episodes import Episode, Score
from rollout_service.runs import RunOverError
from rollout_service.runs.api import RunExporter
from rollout_service.runs.dataset import open_dataset
from rollout_service.runs.planning import RunStoppedError
from rollout_service.runs.task_files import open_file
from rollout_service.settings import RetentionSettings
from rollout_service.store import Lease
from rollout_service.store.runs_contract import BatchLeaseRequest, RunRecord
from rollout_service.store.sqlite import SqliteStore
from tests.support.run_bench import BROKEN, GONE, Bench, arrays_of, bench, place, run_manager
from tests.support.waiting import until


def by_sample(lease: Lease) -> float:
    """Return a reward by which every other sample of a group succeeds."""
    return float(place(lease)[1] % 2)


async def test_a_trainer_gets_informative_groups_only():
    async with bench() as it:
        await it.create(tasks=12)
        batches = await it.all()
        groups = [group for batch in batches for group in batch.groups]
        assert sorted(group.number for group in groups) == [1, 3, 5, 7, 9, 11]
        assert [len(batch.groups) for batch in batches] == [2, 2, 2]
        assert all(group.task.instance == {"n": group.number} for group in groups)
        assert all((group.reward_mean, group.reward_std) == (0.5, 0.5) for group in groups)
        run = await it.store.runs.get("a")
        assert (run.state, run.count("dropped:zero_variance")) == (RunState.FINISHED, 6)
        assert sum(n for batch in batches for n in batch.dropped.values()) <= 6


@pytest.mark.slow
async def test_no_more_groups_start_than_are_expected_to_be_needed():
    async with bench(lambda lease: float(place(lease)[1])) as it:
        await it.create(tasks=500, prefetch_batches=0)
        for _ in range(20):
            await it.next()
        run = await it.store.runs.get("a")
        assert run.cursor <= 20 * 2 + 12
        assert it.manager.acceptance_rate(run) > 0.8
        while 'rollout_run_groups{run="a",state="acknowledged"} 40.0' not in it.metrics.render().decode():
            await anyio.sleep(0.01)
        assert 'rollout_run_acceptance_rate{run="a"}' in it.metrics.render().decode()


async def test_a_failed_sample_is_retried_then_masked():
    def play(lease: Lease) -> float | ErrorInfo:
        number, sample, retry = place(lease)
        if sample == 0 and retry <= number:
            return GONE
        return BROKEN if sample == 1 else float(sample % 2)

    async with bench(play) as it:
        await it.create(tasks=2, infrastructure_retries=1, advantages=Advantages.LEAVE_ONE_OUT)
        (batch,) = await it.all()
        first, second = sorted(batch.groups, key=lambda group: group.number)
        assert first.samples[0].rollout.rollout_id == "a.0.0.1"
        assert [sample.masked_because for sample in first.samples] == [None, "environment_failed", None, None]
        assert second.samples[0].masked_because == "engine_gone"
        assert (first.usable, second.usable) == (3, 2)
        assert [sample.advantage for sample in second.samples] == [None, None, -1.0, 1.0]
        assert [sample.reward for sample in second.samples] == [None, None, 0.0, 1.0]
        assert "a.0.1.1" not in it.begun, "what the environment breaks is not tried again"
        run = await it.store.runs.get("a")
        assert (run.count("retried"), run.count("masked")) == (2, 3)


async def test_a_run_that_retention_deletes_meanwhile_stops_nothing(monkeypatch):
    async with await SqliteStore.open(":memory:") as store:
        for name in "ab":
            source = InlineTasks(tasks=[Task(environment="calc", instance={})])
            await store.runs.create(
                RunRequest(run_id=name, source=source, batch_size=1), tasks=1, digest=None, version=0
            )
        both = await store.runs.active()
        await store.runs.update("a", state=RunState.ENDED)
        while await store.runs.delete_expired(RetentionSettings(ended_run_seconds=0)):
            pass

        async def as_before() -> Sequence[RunRecord]:
            return both

        monkeypatch.setattr(store.runs, "active", as_before)
        await run_manager(store).step()
        assert len(await store.runs.open_groups("b")) == 1


async def test_filters_are_chosen_by_name():
    async with bench() as it:
        await it.create(filters=[FilterSpec(name="all_failed")], tasks=4)
        assert len((await it.all())[0].groups) == 2
        with pytest.raises(InvalidFieldError, match=r"body\.filters\.0\.name.*zero_variance"):
            it.manager.chain(
                RunRequest(source=InlineTasks(), batch_size=1, filters=[FilterSpec(name="zero_variances")])
            )


async def test_staleness_bounds_how_many_groups_start():
    async with bench(by_sample) as it:
        await it.create(tasks=100, max_staleness=1, prefetch_batches=8)
        for version in range(3):
            it.version = version
            batch = await it.next()
            assert batch.oldest_version is not None
            assert version - batch.oldest_version <= 1
            await anyio.sleep(0.2)
            run = await it.store.runs.get("a")
            assert run.cursor <= (1 + version + 1) * 2


async def test_only_the_stale_samples_of_a_group_are_masked():
    async with bench(lambda lease: float(place(lease)[1])) as it:
        it.sampled_by = lambda lease: 0 if place(lease)[1] == 3 else 2
        await it.create(tasks=2, max_staleness=1, advantages=Advantages.LEAVE_ONE_OUT, min_usable=3)
        await until_ready(it, 2)
        it.version = 2
        batch = await it.lease()
        assert batch.oldest_version == 2
        for group in batch.groups:
            assert [sample.masked_because for sample in group.samples] == [None, None, None, "stale"]
            assert [sample.reward for sample in group.samples] == [0.0, 1.0, 2.0, None]
            assert [sample.advantage for sample in group.samples] == [-1.5, 0.0, 1.5, None]
            assert (group.usable, group.reward_mean) == (3, 1.0)
            assert [sample.rollout.trajectory is None for sample in group.samples] == [False] * 3 + [True]
        run = await it.store.runs.get("a")
        assert (run.count("masked:stale"), run.count("dropped:stale")) == (2, 0)


AUXILIARY = {"lambda1": {"init": 0.4}, "lambda2": {"init": 0.2}, "length": 4}


def hand_on(lease: Lease) -> Score:
    """Return scores by which odd samples succeed, and later ones handed on more work."""
    _, sample, _ = place(lease)
    return Score(float(sample % 2), {"parallel": sample / 4, "width": 0.0, "finish": 1.0})


async def until_ready(it: Bench, count: int) -> None:
    while (await it.store.runs.get("a")).count("ready") < count:
        await anyio.sleep(0.01)


async def test_weights_stay_as_they_were_when_the_group_closed(tmp_path):
    """The batch is the same in every lease, and after a restart, whatever the trainer's version is by then."""
    batches = []
    for delivery, version in enumerate((1, 3)):
        async with bench(hand_on, path=tmp_path / "store") as it:
            if delivery == 0:
                it.version = 1
                await it.create(tasks=2, auxiliary=AUXILIARY)
                await until_ready(it, 2)
            it.version = version
            for _ in range(2):
                leased = await it.delivery.lease(
                    BatchLeaseRequest("a", f"k{delivery}", 60), version=version + 1, timeout=10
                )
                content = b"".join([part async for part in it.delivery.as_json(leased)])
                batches.append(content.partition(b',"batch_id"')[0])
                arrays = BatchArrays.from_bytes(await arrays_of(it.delivery, leased))
                samples = [sample for group in arrays.batch.groups for sample in group.samples]
                assert {one.reward_weights and one.reward_weights.at_version for one in samples} == {1}
                assert arrays.tensors["rewards"].tolist() == pytest.approx([0.15, 1.225, 0.3, 1.375] * 2)
                await it.delivery.give_back("a", leased.batch_id)
    assert b'"reward_weights":{"perf":1.0,"parallel":0.3' in batches[0]
    assert batches == [batches[0]] * 4


async def test_a_group_that_loses_stale_samples_keeps_its_weights():
    async with bench(hand_on) as it:
        it.sampled_by = lambda lease: 0 if place(lease)[1] == 3 else 2
        await it.create(tasks=2, max_staleness=1, auxiliary=AUXILIARY, advantages="leave_one_out")
        await until_ready(it, 2)
        it.version = 2
        batch = await it.lease()
        for group in batch.groups:
            assert [sample.masked_because for sample in group.samples] == [None, None, None, "stale"]
            assert [sample.reward for sample in group.samples] == pytest.approx([0.2, 1.3, 0.4, None])
            weights = [sample.reward_weights and sample.reward_weights.at_version for sample in group.samples]
            assert weights == [0, 0, 0, None]


async def test_groups_of_equal_outcomes_are_dropped_however_much_work_they_handed_on():
    def play(lease: Lease) -> Score:
        number, sample, _ = place(lease)
        return Score(float(number % 2 and sample % 2), {"parallel": sample / 4, "finish": 1.0})

    async with bench(play) as it:
        await it.create(tasks=4, auxiliary=AUXILIARY)
        batches = await it.all()
        assert sorted(group.number for batch in batches for group in batch.groups) == [1, 3]
        told = FilterSpec(name="zero_variance", options={"part": "reward"})
        await it.create("b", tasks=4, auxiliary=AUXILIARY, filters=[told])
        batches = await it.all("b")
        groups = [group for batch in batches for group in batch.groups]
        assert sorted(group.number for group in groups) == [0, 1, 2, 3]
        assert all(group.filtered_on == ["reward"] for group in groups)


@pytest.mark.parametrize("fields", [{"min_usable": 4}, {"filters": [FilterSpec(name="zero_variance")]}])
async def test_a_group_with_too_little_left_is_dropped_as_stale(fields):
    async with bench(lambda lease: float(place(lease)[1] == 3)) as it:
        it.sampled_by = lambda lease: 0 if place(lease) in ((0, 3, 0), (1, 3, 0)) else 2
        await it.create(tasks=4, max_staleness=1, **fields)
        await until_ready(it, 2)
        it.version = 2
        batches = await it.all()
        assert [group.number for batch in batches for group in batch.groups] == [2, 3]
        assert (await it.store.runs.get("a")).count("dropped:stale") == 2


async def test_groups_that_become_too_old_are_replaced_before_a_lease():
    async with bench(by_sample) as it:
        await it.create(tasks=100, max_staleness=0, prefetch_batches=1, source=InlineTasks(open=True))
        tasks = [Task(environment="calc", instance={"n": n}) for n in range(100)]
        await it.store.runs.append("a", tasks, offset=None, close=False)
        await it.next()
        it.version = 1
        await until_ready(it, 2)
        before = await it.store.runs.get("a")
        it.version = 3
        while (run := await it.store.runs.get("a")).count("dropped:stale") < before.count("ready"):
            await anyio.sleep(0.01)
        while (run := await it.store.runs.get("a")).count("ready") < 2:
            await anyio.sleep(0.01)
        assert run.cursor > before.cursor
        assert run.count("acknowledged") == 2


async def test_a_trainer_that_accepts_stale_samples_gets_all_of_them():
    async with bench(by_sample) as it:
        await it.create(tasks=4, max_staleness=0)
        await until_ready(it, 2)
        it.version = 5
        leased = await it.delivery.lease(BatchLeaseRequest("a", "k", 60, allow_stale=True), version=None, timeout=10)
        groups = [await it.store.runs.group("a", number) for number in leased.groups]
        assert [(group.usable, group.oldest_version) for group in groups] == [(4, 0), (4, 0)]
        assert all(sample.rollout.trajectory for group in groups for sample in group.samples)


async def test_pause_resume_and_end():
    async with bench() as it:
        await it.create(tasks=1_000, source=InlineTasks(open=True))
        await it.store.runs.update("a", state=RunState.PAUSED)
        tasks = [Task(environment="calc", instance={"n": n}) for n in range(50)]
        await it.store.runs.append("a", tasks, offset=None, close=False)
        assert await it.lease(timeout=0.2) is None
        assert it.begun == []
        await it.store.runs.update("a", state=RunState.RUNNING)
        assert len((await it.next()).groups) == 2
        await it.store.runs.update("a", state=RunState.ENDED)
        await it.all()
        run = await it.store.runs.get("a")
        assert (run.count("open"), run.count("ready"), run.state) == (0, 0, RunState.ENDED)


async def test_ending_a_run_cancels_its_open_groups():
    async with bench(lambda _: None) as it:
        await it.create()
        await until(lambda: len(it.begun) >= 8)
        await it.store.runs.update("a", state=RunState.ENDED)
        assert await it.all() == []
        assert (await it.store.runs.get("a")).count("dropped:cancelled") >= 2


async def test_surplus_is_cancelled_when_asked():
    def play(lease: Lease) -> float | None:
        number, sample, _ = place(lease)
        return float(sample % 2) if number < 2 else None

    async with bench(play) as it:
        await it.create(tasks=3, surplus=Surplus.CANCEL, batch_size=2)
        batches = await it.all()
        assert [group.number for group in batches[0].groups] == [0, 1]
        run = await it.store.runs.get("a")
        assert (len(batches), run.count("dropped:surplus"), run.state) == (1, 1, RunState.FINISHED)


@pytest.mark.slow
async def test_runs_share_by_weight():
    async with bench(by_sample, places=8) as it:
        await it.create("a", tasks=300, weight=3.0, prefetch_batches=100)
        await it.create("b", tasks=300, weight=1.0, prefetch_batches=100)
        await until(lambda: len(it.begun) >= 320, 60)
        share = sum(rollout_id.startswith("a.") for rollout_id in it.begun) / len(it.begun)
        assert 0.65 < share < 0.85


@pytest.mark.slow
async def test_a_straggler_is_cut_off():
    def play(lease: Lease) -> float | None:
        number, sample, _ = place(lease)
        return None if number == 20 and sample == 0 else float(sample % 2)

    async with bench(play) as it:
        await it.create(tasks=21, stragglers={"quantile": 0.9, "factor": 2.0, "min_samples": 2})
        batches = await it.all()
        group = next(group for batch in batches for group in batch.groups if group.number == 20)
        assert [sample.masked_because for sample in group.samples] == ["straggler", None, None, None]


async def test_tasks_of_a_file_in_shuffled_epochs(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps({"n": n}) for n in range(4)) + "\n\n")
    source = FileTasks(path=str(path), environment="calc", epochs=3, shuffle=True, seed=7)
    async with bench(by_sample) as it:
        await it.create(source=source)
        groups = [group for batch in await it.all() for group in batch.groups]
        groups.sort(key=lambda group: group.number)
        epochs = [[g.task.instance["n"] for g in groups if g.epoch == epoch] for epoch in range(3)]
        assert [sorted(epoch) for epoch in epochs] == [[0, 1, 2, 3]] * 3
        assert len({tuple(epoch) for epoch in epochs}) > 1


class Numbers(AgentEnvironment):
    """An environment that ships numbers in two splits."""

    def __init__(self, first: int = 0) -> None:
        super().__init__(EnvironmentSpec(name="numbers", prompt="{{ instance.n }}"))
        self.first = first

    async def evaluate(self, episode: Episode) -> Score:
        raise NotImplementedError

    def dataset(self) -> list[dict[str, JsonValue]]:
        return [{"n": self.first + n, "split": "held_out" if n % 10 == 9 else "train"} for n in range(40)]


async def test_tasks_of_a_split_of_the_environments_own_data_set():
    source = DatasetTasks(environment="numbers", split="held_out", epochs=2, shuffle=True)
    async with bench(by_sample) as it:
        it.environments["numbers"] = Numbers()
        await it.create(source=source)
        groups = [group for batch in await it.all() for group in batch.groups]
        assert {group.task.environment for group in groups} == {"numbers"}
        assert sorted(group.task.instance["n"] for group in groups) == [9, 9, 19, 19, 29, 29, 39, 39]


async def test_a_run_that_ends_while_its_changed_source_is_read_stops_no_other():
    async with bench(by_sample) as it:

        class EndsItsRun(Numbers):
            def dataset(self) -> list[dict[str, JsonValue]]:
                anyio.from_thread.run(end)
                return []

        async def end() -> None:
            await it.store.runs.update("a", state=RunState.ENDED)

        it.environments["numbers"] = Numbers()
        source = DatasetTasks(environment="numbers", split="train")
        tasks = open_dataset(source, it.environments["numbers"])
        it.environments["numbers"] = EndsItsRun()
        request = RunRequest(run_id="a", source=source, batch_size=2)
        await it.store.runs.create(request, tasks=len(tasks), digest=tasks.digest, version=0)
        with pytest.raises(RunOverError):
            await it.lease()
        await it.create("b")
        assert await it.next("b")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "data set"])
async def test_a_source_that_changed_stops_its_run_after_a_restart(tmp_path, kind):
    file, database = tmp_path / "tasks.jsonl", tmp_path / "store.sqlite3"
    source = FileTasks(path=str(file), environment="calc")
    if kind == "data set":
        source = DatasetTasks(environment="numbers", split="train")

    def offer(it: Bench, first: int) -> None:
        it.environments["numbers"] = Numbers(first)
        file.write_text("".join(json.dumps({"n": first + n}) + "\n" for n in range(36)))

    async with bench(by_sample, path=database) as it:
        offer(it, first=0)
        await it.create(source=source)
        await it.next()
    async with bench(by_sample, path=database) as it:
        offer(it, first=1)
        while (run := await it.store.runs.get("a")).problem is None:
            with suppress(RunStoppedError):
                if (batch := await it.lease(timeout=0.05)) is not None:
                    await it.delivery.acknowledge("a", batch.batch_id)
        assert (run.state, run.problem.code) == (RunState.PAUSED, "source_changed")
        offer(it, first=0)
        await it.store.runs.update("a", state=RunState.RUNNING)
        await it.all()
        assert (await it.store.runs.get("a")).cursor == 36


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (None, r"body.source.split: the data set has splits, and none is named"),
        ("trian", r"body.source.split: the data set has no split 'trian'; did you mean train\?"),
    ],
)
def test_the_split_of_a_data_set_must_be_one_of_its_own(split, said):
    with pytest.raises(InvalidFieldError, match=said) as caught:
        open_dataset(DatasetTasks(environment="numbers", split=split), Numbers())
    assert caught.value.hint == "Its splits: train (36), held_out (4)."


async def set_pages(store: SqliteStore, pages: str) -> None:
    """Limit the file to this many pages (`page_count`: as many as it has), retrying if the transaction fails."""

    def limit(db: sqlite3.Connection) -> None:
        count = db.execute("PRAGMA page_count").fetchone()[0] if pages == "page_count" else pages
        db.execute(f"PRAGMA max_page_count = {count}").fetchone()

    while True:
        try:
            return await store._thread.read(limit)
        except StoreError:
            await anyio.sleep(0.01)


@pytest.mark.slow
async def test_a_full_disk_loses_nothing(tmp_path):
    async with bench(by_sample, path=tmp_path / "store.sqlite3") as it:
        await it.create(tasks=30)
        await it.next()
        await set_pages(it.store, "page_count")
        while it.store.problem is None:
            with suppress(StoreError):
                if (batch := await it.lease(timeout=0.02)) is not None:
                    await it.delivery.acknowledge("a", batch.batch_id)
        assert "free space" in it.store.problem.hint
        await set_pages(it.store, "1000000")
        await it.all()
        while it.store.problem is not None:
            await anyio.sleep(0.1)
        assert (await it.store.runs.get("a")).count("acknowledged") == 30


ROW = "SELECT seq, request FROM rollouts JOIN requests USING (seq) WHERE rollout_id = 'a.0.1'"


@asynccontextmanager
async def two_runs(tmp_path: Path, **fields: object) -> AsyncIterator[tuple[Bench, anyio.Event]]:
    """Yield a bench with runs `a` and `b`, all of whose rollouts have begun, and the event that lets them end."""
    may_end = anyio.Event()

    def play(lease: Lease) -> float | None:
        return float(place(lease)[1] % 2) if may_end.is_set() else None

    async with bench(play, path=tmp_path / "store.sqlite3") as it:
        await it.create("a", tasks=2, **fields)
        await it.create("b", tasks=8)
        await until(lambda: len(it.begun) >= (2 + 8) * 4)
        yield it, may_end


async def stopped(it: Bench, code: str) -> None:
    """Wait until run `a` is paused, and check that `b` still finishes and that the problem occurred only once."""
    while (run := await it.store.runs.get("a")).problem is None:
        await anyio.sleep(0.01)
    assert (run.state, run.problem.code) == (RunState.PAUSED, code)
    assert "restore a backup" in run.problem.hint.lower()
    assert sum(len(batch.groups) for batch in await it.all("b")) == 8
    assert f'rollout_run_problems_total{{code="{code}"}} 1.0' in it.metrics.render().decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "mend"),
    [
        (
            "DELETE FROM requests WHERE seq = :seq",
            "INSERT INTO requests (seq, request) VALUES (:seq, :request)",
        ),
        (
            "UPDATE requests SET request = '{' WHERE seq = :seq",
            "UPDATE requests SET request = :request WHERE seq = :seq",
        ),
    ],
    ids=["gone", "damaged"],
)
async def test_a_lost_record_pauses_only_its_own_run_until_it_is_restored(tmp_path, harm, mend):
    async with two_runs(tmp_path) as (it, may_end):
        row = dict(await it.store._thread.read(lambda db: db.execute(ROW).fetchone()))
        await it.store._thread.write(lambda db: db.execute(harm, row).rowcount)
        may_end.set()
        with capture_logs() as logs:
            await stopped(it, "record_lost")
        assert [line["run"] for line in logs if line["event"] == "a run cannot go on"] == ["a"]
        await it.store._thread.write(lambda db: db.execute(mend, row).rowcount)
        await it.store.runs.update("a", state=RunState.RUNNING)
        assert sum(len(batch.groups) for batch in await it.all("a")) == 2
        assert (await it.store.runs.get("a")).state is RunState.FINISHED


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["= 'a.0.1'", "LIKE 'a.0.%'"], ids=["one", "all of a group"])
async def test_a_run_that_lost_rollouts_can_be_ended(tmp_path, lost):
    async with two_runs(tmp_path) as (it, may_end):
        await it.store._thread.write(lambda db: db.execute(f"DELETE FROM rollouts WHERE rollout_id {lost}").rowcount)
        may_end.set()
        await stopped(it, "record_lost")
        await it.store.runs.update("a", state=RunState.ENDED)
        groups = [group.number for batch in await it.all("a") for group in batch.groups]
        assert groups in ([], [1]), "what is whole may have been finished"
        run = await it.store.runs.get("a")
        assert (run.count("open"), run.count("dropped:cancelled")) == (0, 2 - len(groups))
        for number in await it.store.runs.closed_groups("a"):
            left = {sample.sample.rollout.rollout_id for sample in await it.store.runs.exported_samples("a", number)}
            assert "a.0.1" not in left


def damage_padding(path: Path) -> int:
    """Break the chain of the pages that hold only padding, and return how many there were."""
    found = 0
    with path.open("r+b") as file:
        for page, content in enumerate(iter(lambda: file.read(4_096), b"")):
            if not content[4:].strip(b"x"):
                found += 1
                os.pwrite(file.fileno(), b"\xff" * 4, page * 4_096)
    return found


@pytest.mark.slow
async def test_a_damaged_part_of_the_file_stops_only_runs_that_need_it(tmp_path):
    tasks = [Task(environment="calc", instance={"n": n, "pad": "x" * 20_000}) for n in range(2)]
    async with two_runs(tmp_path, source=InlineTasks(tasks=tasks)) as (it, may_end):
        while not damage_padding(tmp_path / "store.sqlite3"):
            with suppress(StoreError):  # a write in the same transaction may fail
                await it.store._thread.read(lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
        await it.store._thread.read(lambda db: db.execute("PRAGMA shrink_memory").fetchall())
        may_end.set()
        while it.store.problem is None:
            await anyio.sleep(0.01)
        assert sum(len(batch.groups) for batch in await it.all("b")) == 8
        run = await it.store.runs.get("a")
        assert (run.state, run.count("ready")) == (RunState.RUNNING, 0), "it waits for a copy to be put back"


async def test_a_batch_with_a_lost_rollout_says_so(tmp_path):
    async with bench(by_sample, path=tmp_path / "store.sqlite3") as it:
        await it.create(tasks=2)
        await until_ready(it, 2)
        await it.store._thread.write(lambda db: db.execute("DELETE FROM rollouts WHERE rollout_id = 'a.0.1'").rowcount)
        with pytest.raises(RecordLostError, match=r"a\.0\.1") as caught:
            await it.lease()
        assert "Restore a backup" in caught.value.hint


def test_parquet_needs_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "tasks.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(InvalidFieldError, match="pyarrow is not installed") as caught:
        open_file(FileTasks(path=str(path), environment="calc"), lambda _: None)
    assert "pip install 'pyarrow>=" in caught.value.hint


async def test_an_export_goes_on_without_what_retention_deletes_meanwhile():
    async with bench() as it:
        await it.create(tasks=4)
        await it.all()
        pieces = await RunExporter(it.store.runs, it.service).start("a", compressed=False)
        await anext(pieces)
        await it.store.runs.delete_expired(RetentionSettings(settled_group_seconds=0))
        assert [json.loads(piece)["kind"] async for piece in pieces] == ["end"]


async def test_a_batch_that_no_run_can_have_is_unknown():
    async with bench() as it:
        await it.create()
        with pytest.raises(NotFoundError, match="no batch"):
            await it.delivery.acknowledge("a", f"a.b{10**30}")
