"""An engine of a job of Slurm that cannot start says why, is tried less and less often, and is given up in the end."""

import errno
import os
import shlex
import sys
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner

from rollout_service.base.private_files import write_private
from rollout_service.cli import app
from rollout_service.cli.slurm.jobs import find
from rollout_service.cluster.slurm import children, commands
from rollout_service.cluster.slurm import engine as slurm_engine
from rollout_service.cluster.slurm import folder as folder_module
from rollout_service.cluster.slurm.children import ENGINE_GIVEN_UP, EndRequests
from rollout_service.cluster.slurm.engine import JobEngine
from rollout_service.cluster.slurm.folder import JobFolder, Published, StartFailure, Submitted
from rollout_service.cluster.slurm.spec import Engines, JobSpec
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
NAME = "node-0"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    async def nobody_asks(_):
        await anyio.sleep_forever()

    monkeypatch.setattr(EndRequests, "follow", nobody_asks)  # the tests' own input may have ended
    monkeypatch.setattr(children, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(slurm_engine, "MAX_FAILED_STARTS", 3)
    folder = JobFolder(tmp_path / "jobs" / "a-job")
    folder.create()
    return folder


def engine(folder, *words):
    return JobEngine(folder, Engines(command=f"{shlex.join(words)} {{port}}"), NAME, 0)


async def test_an_engine_that_cannot_start_is_given_up_with_its_reason(folder):
    script = "import sys; print(sys.argv[1:]); print('\\x1b[1mno GPU'); sys.exit(3)"
    with anyio.fail_after(30):
        code = await engine(folder, sys.executable, "-c", script, '{"a": {"b": 1}}').run()
    assert code == ENGINE_GIVEN_UP
    assert folder.failures() == [StartFailure(name=NAME, starts=3, exit_code=3, reason="\x1b[1mno GPU")]
    assert """'{"a": {"b": 1}}'""" in folder.log(f"engine-{NAME}").read_text()


async def test_a_program_that_is_missing_is_named(folder):
    with anyio.fail_after(30):
        assert await engine(folder, "no-such-program").run() == ENGINE_GIVEN_UP
    reason = "no-such-program cannot be started: No such file or directory"
    assert folder.failures() == [StartFailure(name=NAME, starts=3, exit_code=None, reason=reason)]


async def test_an_engine_that_answers_late_to_a_folder_that_fails_is_no_failure(folder, tmp_path, monkeypatch):
    refusals = iter([OSError(errno.ESTALE, "Stale file handle")] * 2)
    unlink = Path.unlink

    def write(path, data):
        if path.parent.name == "engines":
            for error in refusals:
                raise error
        write_private(path, data)

    def unlink_others(path, **options):
        if path.parent.name == "engines":  # the engine's record stays
            raise OSError(errno.ESTALE, "Stale file handle")
        unlink(path, **options)

    monkeypatch.setattr(folder_module, "write_private", write)
    monkeypatch.setattr(Path, "unlink", unlink_others)
    monkeypatch.setattr(slurm_engine, "LOOK_SECONDS", 0.01)
    script = """
import http.server, pathlib, sys
seen = pathlib.Path(sys.argv[1])
if not seen.exists():
    seen.touch()
    sys.exit("not yet")
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("", int(sys.argv[2])), Healthy).serve_forever()
"""
    running = engine(folder, sys.executable, "-c", script, str(tmp_path / "seen"))
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.run)
            await until(folder.failures)
            await until(lambda: folder.published("engines"))
            assert folder.failures() == []
            tasks.cancel_scope.cancel()


def submitted(folder, monkeypatch, state):
    async def state_of(job):
        return commands.JobState(job, state)

    monkeypatch.setattr(commands, "job_state", state_of)
    folder.save(Submitted(job="7", spec=JobSpec(name="a-job")))


def test_a_job_that_slurm_does_not_have_is_not_said_to_be_stopped(folder, monkeypatch):
    submitted(folder, monkeypatch, "UNKNOWN")
    stop = ["slurm", "stop", "--folder", str(folder.path.parent)]
    said = CliRunner().invoke(app, stop)
    assert (said.exit_code, folder.path.exists()) == (1, True)
    assert f"this Slurm has no job 7 of {folder.path}" in said.output.replace("\n", " ")
    said = CliRunner().invoke(app, [*stop, "--remove"])
    assert (said.exit_code, folder.path.exists()) == (0, False), said.output


def test_a_job_is_stopped_with_the_nodes_that_were_added_and_its_folder_is_removed_once_it_has_ended(
    folder, monkeypatch
):
    told, states = [], iter(["PENDING", "PENDING", "COMPLETING", "COMPLETING", "CANCELLED"])

    async def run(command):
        told.append(command)
        if command[0] == "scontrol":
            assert folder.path.exists()
            return f"JobId=7 JobState={next(states)}"
        tasks = [("17_1", 1, "RUNNING"), ("17_2", 2, "PENDING"), ("17_3", 3, "COMPLETING")]
        return "".join(f"{job}|{slot}|{state}|1:00|{folder.more_script}\n" for job, slot, state in tasks)

    monkeypatch.setattr(commands, "run", run)
    folder.save(Submitted(job="7", spec=JobSpec(name="a-job")))
    folder.more_script.touch()
    said = CliRunner().invoke(app, ["slurm", "stop", "--remove", "--folder", str(folder.path.parent)])
    assert (said.exit_code, folder.path.exists()) == (0, False), said.output
    ended = [command[1:] for command in told if command[0] == "scancel"]
    assert ended == [["--batch", "--signal=USR2", "17_1"], ["17_2"], ["7"]]


def test_the_end_of_a_log_that_is_larger_than_the_memory_is_shown(folder):
    folder.save(Submitted(job="7", spec=JobSpec(name="a-job")))
    with folder.log("redis").open("wb") as log:
        log.truncate(1 << 40)
        log.seek(0, os.SEEK_END)
        log.write(b"\n" + b"".join(b"line %d\n" % number for number in range(20_000)))
    logs = ["slurm", "logs", "a-job", "--folder", str(folder.path.parent), "--lines"]
    shown = CliRunner().invoke(app, [*logs, "10000"])
    assert (shown.exit_code, shown.output.splitlines()[1:]) == (0, [f"line {n}" for n in range(10_000, 20_000)])
    folder.log("redis").write_text("all\nof it")
    assert CliRunner().invoke(app, [*logs, "3"]).output.splitlines()[1:] == ["all", "of it"]


def test_a_folder_that_cannot_be_read_hides_no_other_job(folder):
    folder.save(Submitted(job="7", spec=JobSpec(name="a-job")))
    later = JobFolder(folder.path.parent / "later")
    later.create()
    (later.path / "job.json").write_text("{}")
    assert find("7", folder.path.parent) == folder


def test_the_status_names_an_engine_that_does_not_start(folder, monkeypatch):
    submitted(folder, monkeypatch, "RUNNING")
    folder.fail(StartFailure(name=NAME, starts=3, exit_code=1, reason="\x1b[1mno GPU"))
    folder.publish("nodes", Published(name="n1", url="http://127.0.0.1:9", job="7"))
    shown = CliRunner().invoke(app, ["slurm", "status", "a-job", "--folder", str(folder.path.parent)])
    assert f"folder {folder.path}" in shown.output
    assert "not ready: n1: " in shown.stderr
    assert f"engine {NAME} failed to start 3 times, exit code 1: \\x1b[1mno GPU" in shown.output, shown.output
    assert f"rollout-service slurm logs {folder.path} --part engine-{NAME}" in shown.output
