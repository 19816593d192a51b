"""Jobs of Slurm go on although their folder, their Redis, or an earlier job of the same folder is in trouble."""

import errno
import shutil
import socket
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest
from typer.testing import CliRunner

from rollout_service.base.errors import ConfigurationError
from rollout_service.cli import app
from rollout_service.cli.slurm import watch
from rollout_service.cluster.slurm import children, commands, relay, supervisor
from rollout_service.cluster.slurm import folder as folder_module
from rollout_service.cluster.slurm import node as node_module
from rollout_service.cluster.slurm.children import EndRequests
from rollout_service.cluster.slurm.commands import QueuedJob
from rollout_service.cluster.slurm.folder import JobFolder, Published, StartFailure, Submitted
from rollout_service.cluster.slurm.node import JobNode
from rollout_service.cluster.slurm.redis_server import redis_address, redis_child
from rollout_service.cluster.slurm.scaler import Scaler, spec_of_more
from rollout_service.cluster.slurm.scaling import ScaleOptions
from rollout_service.cluster.slurm.spec import JobSpec
from rollout_service.settings import Settings
from tests.support.browser import canned
from tests.support.waiting import until

SPEC = JobSpec(name="job", joinable=True)
LONG = "qwen3-8b-swe-rebench-grpo-lr1e-6-kl0-seed-42-run-3"


def submitted(path: Path) -> JobFolder:
    folder = JobFolder(path)
    folder.create()
    folder.save(Submitted(job="1", spec=JobSpec(name=path.name, joinable=True)))
    return folder


def answer_with(monkeypatch, states):
    """Let Slurm answer with these states of a job, one after another; None for no answer."""

    async def state_of(job):
        if (state := next(states)) is None:
            raise ConfigurationError("Unable to contact slurm controller")
        return commands.JobState(job, state)

    monkeypatch.setattr(commands, "job_state", state_of)


async def test_a_node_of_a_job_with_a_long_name_can_join_and_is_found(tmp_path, monkeypatch):
    home = submitted(tmp_path / LONG)
    spec = spec_of_more(home, {}, {})
    scaler, asked = Scaler(home, spec, ScaleOptions(), print), []
    added = scaler.folder(1)
    added.create()
    part = Published(name="gpu-a100-017", url="http://n:1")
    added.publish("nodes", part)
    own = spec.model_copy(update={"name": f"{spec.name}-1"})
    name = JobNode(added, own, tmp_path, part.name, 0, home, spec, EndRequests("node")).cluster_name
    assert Settings(cluster={"name": name}).node_name == name

    async def ask(parts, call):
        asked.extend(parts)

    monkeypatch.setattr(scaler, "_ask", ask)
    found = await scaler._added_node(
        QueuedJob("17_1", 1, "RUNNING"), [canned.node(name).model_copy(update={"rollouts": 0})]
    )
    assert (found.node, found.is_alive, asked) == (name, True, [part])


@pytest.mark.parametrize("most", ["1", "10"])
def test_a_job_whose_name_has_no_room_for_a_number_is_not_scaled(tmp_path, monkeypatch, most):
    name = "a" * 57
    submitted(tmp_path / name)

    async def nodes():
        return []

    monkeypatch.setattr(commands, "partition_nodes", nodes)
    said = CliRunner().invoke(app, ["slurm", "scale", name, "--max", most, "--folder", str(tmp_path)])
    assert ("error: name: " in said.output, said.exit_code) == (most == "10", 1), said.output


async def test_more_nodes_are_ended_once_the_folder_of_the_job_is_removed(tmp_path, monkeypatch):
    home, told, looks = submitted(tmp_path / "mine"), [], iter([OSError("stale"), ConfigurationError("busy")])
    scaler = Scaler(home, spec_of_more(home, {}, {}), ScaleOptions(), told.append, interval_seconds=0.0)

    async def state(job):
        for error in looks:
            raise error
        shutil.rmtree(home.path)
        raise ConfigurationError("busy")

    async def queued(script):
        return [QueuedJob("17_1", 1, "PENDING")]

    async def cancel(job):
        told.append(f"cancelled {job}")

    for name, answer in {"job_state": state, "queued_jobs": queued, "cancel": cancel}.items():
        monkeypatch.setattr(commands, name, answer)
    with anyio.fail_after(10):
        await scaler.run()
    assert told[3:] == ["job mine is over", "end mine-more-1 (job 17_1)", "cancelled 17_1"]


async def test_a_redis_that_somebody_ends_in_order_is_started_again(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(children, "FIRST_PAUSE_SECONDS", 0.001)
    program, runs = tmp_path / "redis-server", tmp_path / "runs"
    program.write_text(f"#!/bin/sh\necho run >>{runs}\n")
    program.chmod(0o700)
    redis = redis_child(folder, SPEC.model_copy(update={"redis_server": str(program)}))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(redis.keep_running)
        await until(lambda: runs.exists() and runs.read_text().count("run") >= 2)
        redis.stopping.set()


async def test_a_redis_whose_port_is_taken_moves_to_another_and_the_nodes_follow(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(node_module, "LOOK_SECONDS", 0.001)
    folder, program = JobFolder(tmp_path / "job"), tmp_path / "redis-server"
    folder.create()
    program.write_text('#!/bin/sh\ngrep ^port "$1" >>"$1.ports"\n')
    program.chmod(0o700)
    spec = SPEC.model_copy(update={"redis_server": str(program)})
    redis = redis_child(folder, spec)
    url = redis_address(folder, spec)
    first, ports = urlsplit(url), folder.path / "redis" / "redis.conf.ports"
    node = JobNode(folder, spec, tmp_path, "n1", 0, folder, spec, EndRequests("node"))
    service = node._child(first.hostname, url)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(node._end_child, service, url)
        tasks.start_soon(redis.keep_running)
        await until(lambda: ports.exists() and ports.read_text().count(str(first.port)) >= 2)
        assert not service.stopping.is_set()
        with socket.create_server((first.hostname, first.port)):
            await until(lambda: ports.read_text().splitlines()[-1] != f"port {first.port}")
            await service.stopping.wait()
        redis.stopping.set()
    assert urlsplit(redis_address(folder, spec)).port != first.port


async def test_a_job_lists_no_part_that_an_earlier_job_of_its_folder_has_left(folder, monkeypatch):
    listed = []
    folder.save(Submitted(job="", spec=JobSpec(name="job")))
    for number in ("6", "7"):  # the earlier job may have been this one, before it was requeued
        for kind in ("nodes", "engines"):
            folder.publish(kind, Published(name=f"n{number}", url="http://n:30000", job=number))
        folder.fail(StartFailure(name=f"n{number}-0", starts=3, exit_code=1, reason="no GPU"))

    async def run(self):
        listed.extend([*folder.published("nodes"), *folder.published("engines"), *folder.failures()])
        return 0

    monkeypatch.setattr(supervisor.Supervisor, "run", run)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n7")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert (await supervisor.run_job(folder), listed) == (0, [])
    assert folder.load().job == "7"


async def test_a_folder_that_fails_for_a_moment_ends_no_node(tmp_path, monkeypatch):
    folder, failures = JobFolder(tmp_path), iter([OSError(errno.ESTALE, "Stale file handle")] * 2)
    folder.create()
    node = JobNode(folder, SPEC, tmp_path, "n1", 0, folder, SPEC, EndRequests("node"))
    write = folder_module.write_private

    def fail_at_first(path, data):
        for error in failures:
            raise error
        write(path, data)

    async def answers(url):
        return True

    monkeypatch.setattr(folder_module, "write_private", fail_at_first)
    monkeypatch.setattr(node_module, "_answers", answers)
    monkeypatch.setattr(node_module, "LOOK_SECONDS", 0.0)
    (tmp_path / "address").write_text("http://n1:1")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(node._publish)
        await until(lambda: folder.published("nodes"))
        tasks.cancel_scope.cancel()
    (tmp_path / "redis" / "address").mkdir()  # another error than that there is no file
    assert redis_address(folder, SPEC) is None


@pytest.mark.parametrize(
    ("known", "state", "refused"),
    [("6", "RUNNING", True), ("6", "UNKNOWN", False), ("7", "RUNNING", False), ("5_2", "RUNNING", False)],
)
async def test_two_jobs_never_work_in_one_folder(folder, monkeypatch, known, state, refused):
    folder.save(Submitted(job=known, spec=JobSpec(name="job")))
    part = Published(name="n6", url="http://n6:1", job="6")
    folder.publish("nodes", part)

    async def run(self):
        return 0

    answer_with(monkeypatch, iter([state]))
    monkeypatch.setattr(supervisor.Supervisor, "run", run)
    variables = {"JOB_NODELIST": "n7", "JOB_ID": "7", "ARRAY_JOB_ID": "5", "ARRAY_TASK_ID": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    if refused:
        with pytest.raises(ConfigurationError, match="job 6 works in"):
            await supervisor.run_job(folder)
        assert folder.published("nodes") == [part]
    else:
        assert await supervisor.run_job(folder) == 0


async def test_a_folder_that_fails_for_a_moment_ends_no_job(folder, monkeypatch):
    readings = iter([OSError(errno.ESTALE, "Stale file handle")] * 2)
    registered, failed = anyio.Event(), anyio.Event()

    def records(self, kind):
        for error in readings:
            raise error
        return [{"name": "n1", "url": "http://n1", "starts": 1, "exit_code": 1, "reason": "no GPU"}]

    async def register(self, url):
        self.ours = {url}
        registered.set()

    monkeypatch.setattr(JobFolder, "_records", records)
    monkeypatch.setattr(supervisor.Registrar, "_register", register)
    monkeypatch.setattr(supervisor.log, "warning", lambda event, **_: event == "engine does not start" and failed.set())
    for name in ("REGISTER_SECONDS", "FAILURES_SECONDS"):
        monkeypatch.setattr(supervisor, name, 0.0)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.Registrar(folder).run)
            tasks.start_soon(supervisor.Supervisor(folder, JobSpec(name="job"))._log_failures)
            await registered.wait()
            await failed.wait()
            await until((folder.path / "engines.registered").exists)
            tasks.cancel_scope.cancel()


def test_a_job_is_not_submitted_from_a_folder_without_room(folder, tmp_path, monkeypatch):
    def write(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write)
    submit = ["slurm", "submit", "--write-only", "--name", "job", "--folder", str(tmp_path)]
    said = CliRunner().invoke(app, submit)
    assert (said.exit_code, isinstance(said.exception, SystemExit)) == (1, True), said.exception
    assert "cannot be written: No space left on device" in said.output


async def test_a_tunnel_goes_on_while_the_folder_cannot_be_read(tmp_path, monkeypatch):
    def fail(self, kind):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(JobFolder, "published", fail)
    assert await relay._connect(JobFolder(tmp_path)) is None


def test_waiting_for_a_job_goes_on_while_the_controller_starts_again(folder, tmp_path, monkeypatch):
    folder.save(Submitted(job="7", spec=SPEC))
    answer_with(monkeypatch, iter(["RUNNING", None, None, "COMPLETED"]))
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.0)
    said = CliRunner().invoke(app, ["slurm", "status", "job", "--folder", str(tmp_path), "--wait", "60"])
    assert ("job 7 COMPLETED" in said.output, said.exit_code) == (True, 1), said.output
