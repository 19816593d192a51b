"""Runs work over HTTP with a real server, a scripted engine, and both clients as a trainer uses them."""

import json
import threading
from collections.abc import Iterator
from contextlib import aclosing
from datetime import datetime

import anyio
import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from api_schemas.errors import Problem
from api_schemas.runs import (
    BINARY_MEDIA_TYPE,
    COMPRESSED_MEDIA_TYPE,
    Batch,
    DatasetTasks,
    FileTasks,
    FilterSpec,
    Group,
    InlineTasks,
    RunRequest,
    RunState,
)
from api_schemas.tasks import Task
from rollout_client.arrays import BatchArrays
from rollout_client.client import (
    ConflictError,
    GoneError,
    InvalidRequestError,
    LeasedBatch,
    NotFoundError,
    RolloutClient,
)
from rollout_client.run_export import RunExport
from rollout_client.sync import SyncRolloutClient
from rollout_service.cli import app
from rollout_service.store.codec.trajectories import COLUMNS
from tests.support.api.server import api_server
from tests.support.processes.service import scripted_engine
from tests.support.waiting import until

START_SECONDS = 120.0
SWE_INSTANCE = {
    "instance_id": "a-1",
    "problem_statement": "It is broken.",
    "FAIL_TO_PASS": ["test_it"],
    "log_parser": "parse_log_pytest",
    "eval_script": "true",
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a server whose policy gives up at once, which the math environment scores 0."""
    folder = tmp_path_factory.mktemp("runs")
    with (
        scripted_engine(folder, "No idea.<|im_end|>") as engine,
        api_server(folder, "--backend", engine.url) as server,
    ):
        yield server.url


def order(run_id: str, tasks: int = 4, **fields: object) -> RunRequest:
    source = InlineTasks(tasks=[problem(number) for number in range(tasks)])
    given = {"run_id": run_id, "source": source, "batch_size": 2, "group_size": 2, "filters": []}
    return RunRequest.model_validate(given | fields)


def problem(number: int) -> Task:
    return Task(environment="math", instance={"question": f"{number} + 1", "answer": str(number + 1)})


async def test_a_loop_over_batches_is_all_that_a_trainer_needs(url):
    async with RolloutClient(url) as client:
        run = await client.create_run(order("loop"))
        seen: list[int] = []
        async for batch in run.batches():
            seen += [group.number for group in batch.groups]
            for group in batch.groups:
                assert [sample.rollout.rollout_id for sample in group.samples] == [
                    f"loop.{group.number}.0",
                    f"loop.{group.number}.1",
                ]
                assert all(sample.rollout.trajectory for sample in group.samples)
        assert sorted(seen) == [0, 1, 2, 3]
        view = await run.view()
        assert (view.state, view.cursor, view.counts.acknowledged) == (RunState.FINISHED, 4, 4)
        assert [one.run_id for one in await client.runs() if one.run_id == "loop"] == ["loop"]
        again = await client.create_run(order("loop"))
        with pytest.raises(GoneError):
            await again.lease()
        with pytest.raises(ConflictError):
            await client.create_run(order("loop", tasks=5))


def test_the_blocking_client_does_the_same(url):
    with SyncRolloutClient(url) as client:
        run = client.create_run(order("blocking", source=InlineTasks(open=True)))
        run.append([problem(0), problem(1), problem(2)])
        lost = run.lease(timeout_seconds=30, lease_seconds=0.05)
        first = run.lease(timeout_seconds=30)
        with pytest.raises(ConflictError, match="leased by another"):
            lost.nack()
        first.nack()
        run.append([], offset=3, close=True)
        deliveries = [(batch.batch_id, batch.batch.delivery, len(batch.groups)) for batch in run.batches()]
        assert deliveries == [("blocking.b0", 3, 2), ("blocking.b1", 1, 1)]
        assert run.view().state is RunState.FINISHED


async def test_a_trainer_that_waits_in_vain_is_told_why_once(url, monkeypatch, caplog):
    monkeypatch.setattr("rollout_client.runs.LONG_POLL_SECONDS", 0.1)
    async with RolloutClient(url) as client:
        run = await client.create_run(order("versionless", tasks=8, max_staleness=0))
        await (await run.lease()).ack()
        assert await run.lease(timeout_seconds=0.5) is None
        await run.pause()
        assert await run.lease(timeout_seconds=0.5) is None
        await run.end()
    first, second = [record.message for record in caplog.records if "versionless" in record.message]
    assert first.startswith("run versionless has no batch yet: max_staleness: all groups that version 0 allows")
    assert second == "run versionless has no batch yet: it is paused, and begins no groups until it is resumed"


async def test_a_batch_is_kept_while_a_trainer_works_on_it(url, monkeypatch):
    renewed: list[datetime] = []
    renew = LeasedBatch.renew

    async def counting(batch: LeasedBatch, seconds: float) -> datetime:
        renewed.append(await renew(batch, seconds))
        return renewed[-1]

    monkeypatch.setattr(LeasedBatch, "renew", counting)
    async with RolloutClient(url) as client:
        run = await client.create_run(order("slow", tasks=2))
        async for batch in run.batches(lease_seconds=0.3):
            await until(lambda: len(renewed) >= 3)
            assert await batch.renew(60.0) > renewed[1] > renewed[0] > batch.batch.lease_until
        assert (await run.view()).counts.batches_acknowledged == 1
        count = len(renewed)
        with pytest.raises(ConflictError, match="acknowledged"):
            await batch.renew(1.0)
        assert len(renewed) == count


def test_the_blocking_client_keeps_its_batch_too(url, monkeypatch):
    renewed = threading.Event()

    async def note(batch: LeasedBatch, seconds: float) -> None:
        renewed.set()

    monkeypatch.setattr(LeasedBatch, "renew", note)
    with SyncRolloutClient(url) as client:
        run = client.create_run(order("slow-sync", tasks=2))
        for batch in run.batches(lease_seconds=0.3):
            assert renewed.wait(30)
            batch.renew()
        assert run.view().counts.batches_acknowledged == 1


def without_tokens(group: Group) -> Group:
    told = group.model_dump(mode="json")
    for sample in told["samples"]:
        for segment in sample["rollout"]["trajectory"]["segments"]:
            segment |= {name: [] for name in COLUMNS}
    return Group.model_validate(told)


@pytest.mark.parametrize("media_type", [BINARY_MEDIA_TYPE, COMPRESSED_MEDIA_TYPE])
async def test_a_batch_comes_as_arrays_when_asked(url, media_type, monkeypatch):
    monkeypatch.setattr("rollout_client._download.accepted", lambda _: media_type)
    async with RolloutClient(url) as client:
        run = await client.create_run(order(f"arrays-{len(media_type)}", tasks=2))
        as_arrays = await run.lease(arrays=True, lease_seconds=300)
        await as_arrays.nack()
        as_json = await run.lease()
        samples = [sample for group in as_json.groups for sample in group.samples]
        segments = [one for sample in samples for one in sample.rollout.trajectory.segments]
        for number, segment in enumerate(segments):
            columns = as_arrays.arrays.segment(number)
            assert columns["token_ids"].tolist() == segment.token_ids
            assert columns["logprobs"].tolist() == segment.logprobs
        assert as_arrays.batch.groups == [without_tokens(group) for group in as_json.groups]
        assert as_arrays.arrays.tensors["rewards"].tolist() == [sample.reward for sample in samples]
        await as_json.ack()


async def test_a_run_takes_its_tasks_from_a_split_of_the_environment(url):
    async with RolloutClient(url) as client:
        held_out = await client.dataset("math", split="held_out")
        assert {instance["split"] for instance in held_out} == {"held_out"}
        with pytest.raises(InvalidRequestError, match="has no split 'test'"):
            await client.dataset("math", split="test")
        run = await client.create_run(order("own", source=DatasetTasks(environment="math", split="held_out")))
        assert (await run.view()).tasks == len(held_out)
        leased = await run.lease(timeout_seconds=60)
        assert all(group.task.instance in held_out for group in leased.groups)
        await run.end()


async def test_mistakes_are_reported(url):
    async with RolloutClient(url) as client:
        for fields, path in (
            ({"source": InlineTasks()}, "body.source.tasks"),
            (
                {"source": InlineTasks(tasks=[Task(environment="math")])},
                "body.source.tasks.0.instance.question",
            ),
            ({"source": FileTasks(path="/none.jsonl", environment="math")}, "body.source.path"),
            ({"source": DatasetTasks(environment="math")}, "body.source.split"),
            ({"filters": [FilterSpec(name="variance")]}, "body.filters.0.name"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                await client.create_run(order("wrong", **fields))
            assert path in [error.path for error in caught.value.problem.errors]
        with pytest.raises(NotFoundError):
            await client.open_run("nothing").view()
        run = await client.create_run(order("right"))
        with pytest.raises(NotFoundError):
            await run.settle("right.b7", "ack")
        with pytest.raises(NotFoundError):
            await run.settle("other.b0", "ack")
        await run.end()
        with pytest.raises(ConflictError):
            await run.resume()


async def test_a_lease_that_finds_nothing_in_time(url):
    async with RolloutClient(url) as client:
        run = await client.create_run(order("empty", source=InlineTasks(open=True)))
        assert await run.lease(timeout_seconds=0.1) is None
    async with httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/runs/empty/lease")
        assert (answer.status_code, answer.content) == (204, b"")
        await http.delete("/v1/runs/empty")
        answer = await http.post("/v1/runs/empty/lease")
        assert Problem.model_validate_json(answer.content).code == "run_over"
        assert answer.status_code == 410


async def test_a_run_that_delivers_nothing_does_not_end_a_loop_over_batches_quietly(url):
    async with RolloutClient(url) as client:
        finished = await client.create_run(order("all-equal", filters=[FilterSpec(name="zero_variance")]))
        with pytest.raises(GoneError, match=r"no group was kept of 4 \(4 zero_variance\)") as over:
            [batch async for batch in finished.batches()]
        assert over.value.problem.code == "run_without_batches"
        source = InlineTasks(tasks=[problem(0)], epochs=None)
        limit = {"filters": [FilterSpec(name="zero_variance")], "max_dropped_in_a_row": 3}
        paused = await client.create_run(order("paused-for-it", source=source, **limit))
        while (view := await paused.view()).state is not RunState.PAUSED or view.counts.open:
            await anyio.sleep(0.02)
        with pytest.raises(ConflictError, match="the run paused-for-it is paused: no group was kept") as stopped:
            await paused.lease(timeout_seconds=0.1)
        assert stopped.value.problem.code == "run_stopped"
        while not (found := [one for one in (await client.hangs()).findings if one.kind == "run"]):
            await anyio.sleep(0.1)
        assert [(one.subject, one.verdict) for one in found] == [("paused-for-it", "stuck")]
        await paused.end()


async def test_progress_comes_as_events(url):
    async with RolloutClient(url) as client, aclosing(client.events(after=0)) as events:
        run = await client.create_run(order("told", tasks=2))
        async for _ in run.batches():
            pass
        kinds: list[str] = []
        with anyio.fail_after(30):
            async for event in events:
                if event.subject.startswith("told") and event.kind != "rollout.state":
                    kinds.append(event.kind)
                    if event.data.get("state") == "finished":
                        break
        assert kinds == [
            "run.state",
            "group.closed",
            "group.closed",
            "batch.leased",
            "batch.acknowledged",
            "run.state",
        ]


async def test_a_run_is_exported_and_evaluated_again(url, tmp_path):
    async with RolloutClient(url) as client:
        run = await client.create_run(order("kept", tasks=3))
        delivered = {
            sample.rollout.rollout_id: (batch.batch_id, sample)
            async for batch in run.batches()
            for group in batch.groups
            for sample in group.samples
        }
        plain, packed = tmp_path / "kept.jsonl", tmp_path / "kept.jsonl.gz"
        assert await run.export(plain) == plain.stat().st_size > await run.export(packed)
        exports = [RunExport(plain), RunExport(packed)]
        read = list(exports[0].samples())
        assert read == list(exports[1].samples())
        assert exports[0].run == await run.view()
        assert {one.sample.rollout.rollout_id: (one.batch_id, one.sample) for one in read} == delivered
        assert {(one.group_state, one.request.rollout_id) for one in read} == {
            ("acknowledged", rollout_id) for rollout_id in delivered
        }
        again = await run.rescore()
        assert [one.rollout_id for one in again] == [one.request.rollout_id for one in read]
        assert {(one.recorded_reward, one.reward, one.error) for one in again} == {(0.0, 0.0, None)}
        (chosen,) = await run.rescore(["kept.1.0"], replay="always")
        assert (chosen.reward, chosen.replayed, chosen.turns_replayed) == (0.0, True, 1)
        from_file = [one async for one in client.rescore(exports[0].samples())]
        assert from_file == again
        with pytest.raises(InvalidRequestError) as caught:
            await run.rescore(["kept.1.0", "loop.0.0"])
        assert [error.path for error in caught.value.problem.errors] == ["body.rollout_ids.1"]
        with pytest.raises(InvalidRequestError, match="maths") as caught:
            await run.rescore(environment="maths")
        assert [error.path for error in caught.value.problem.errors] == ["body.environment"]
        with pytest.raises(NotFoundError):
            await client.open_run("nothing").export(tmp_path / "nothing")
        with pytest.raises(NotFoundError):
            await client.open_run("nothing").rescore()
        assert not list(tmp_path.glob("*.partial"))


def test_the_images_of_a_runs_tasks_are_prepared_on_this_machine(url, tmp_path):
    rows = [{"environment": "swe", "instance": SWE_INSTANCE | {"image": name}} for name in ("here", "gone")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row["instance"]) + "\n" for row in rows))
    (tmp_path / "images").mkdir()
    (tmp_path / "images/here.sif").touch()
    with SyncRolloutClient(url) as client:
        file = FileTasks(path=str(tmp_path / "rows.jsonl"), environment="swe")
        split = DatasetTasks(environment="math", split="held_out")
        runs = [client.create_run(order(f"prepared-{one.kind}", source=one)) for one in (file, split)]
        runs.append(client.create_run(order("prepared-inline", tasks=2)))
        for run in runs:
            run.end()
        held_out = len(client.dataset("math", split="held_out"))

    def prepare(run_id: str) -> Result:
        arguments = ["env", "prepare", run_id, "--url", url, "--json"]
        return CliRunner().invoke(app, arguments, env={"ROLLOUT_IMAGES_DIR": str(tmp_path / "images")})

    of_file, of_split, inline = (prepare(run.run_id) for run in runs)
    said = json.loads(of_file.stdout)
    assert (of_file.exit_code, said["instances"], said["present"]) == (1, 2, 1)
    assert [failure["image"] for failure in said["failures"]] == ["gone"]
    said = {"instances": held_out, "images": 0, "present": 0, "made": 0, "failures": []}
    assert (of_split.exit_code, json.loads(of_split.stdout)) == (0, said)
    assert inline.exit_code == 1
    assert "part of its request" in inline.stderr
    assert prepare("never-created").exit_code == 1


def test_runs_from_the_command_line(url, tmp_path):
    def command(*arguments: str, exit_code: int = 0) -> Result:
        result = CliRunner().invoke(app, ["runs", *arguments, "--url", url], env={"COLUMNS": "200"})
        assert result.exit_code == exit_code, result.output
        return result

    file, batch, arrays = tmp_path / "run.json", tmp_path / "batch.json", tmp_path / "batch.safetensors"
    file.write_text(order("typed", tasks=4).model_dump_json())
    (created,) = json.loads(command("create", str(file), "--json").stdout)
    assert (created["run_id"], created["tasks"]) == ("typed", 4)
    leased = command("lease", "typed", "--output", str(batch), "--ack")
    assert leased.stdout == "typed.b0\n"
    assert Batch.model_validate_json(batch.read_bytes()).batch_id == "typed.b0"
    assert command("lease", "typed", "--output", str(arrays)).stdout == "typed.b1\n"
    assert BatchArrays.from_file(arrays).batch.batch_id == "typed.b1"
    command("lease", "typed", "--output", str(batch), "--timeout", "0", "--force", exit_code=1)
    assert "paused" in command("pause", "typed").stdout
    assert "running" in command("resume", "typed").stdout
    assert "ended" in command("end", "typed").stdout
    assert "typed" in command("list").stdout
    assert "there is no run nothing" in command("show", "nothing", exit_code=1).stderr
    export = tmp_path / "typed.jsonl.gz"
    assert "bytes" in command("export", "typed", "--output", str(export)).stdout
    assert "already exists" in command("export", "typed", "-o", str(export), exit_code=1).stderr
    assert "bytes" in command("export", "typed", "-o", str(export), "--force").stdout
    for what in ("typed", str(export)):
        results = [json.loads(line) for line in command("rescore", what).stdout.splitlines()]
        assert [result["reward"] for result in results] == [0.0] * 8
    file.write_text('{"batch_size": 0}')
    assert "source: Field required" in command("create", str(file), exit_code=1).stderr
