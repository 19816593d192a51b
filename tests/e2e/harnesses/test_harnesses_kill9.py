"""After kill -9 of the service, programs that were at work are ended, and their rollouts begin anew."""

import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from anyio.from_thread import start_blocking_portal

from api_schemas.trajectories import Trajectory
from rollout_service.agents.harnesses.registry import get_harness
from rollout_service.testing import ScriptedEngine
from rollout_service.tokens import ChatRenderer, check_invariants
from tests.support.gateway.jobs import (
    CONTEXT,
    IMAGE,
    VOCABULARY,
    Job,
    JobsScript,
    write_environment,
    write_model,
)
from tests.support.processes.service import Running, eventually, service
from tests.support.samples import sampled_by_turn

pytestmark = [
    pytest.mark.apptainer,
    pytest.mark.harnesses,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("harnesses"),
]

JOBS = [Job(harness, "killed", steps=2, held=1) for harness in ("codex", "claude_code")]
AGENT_SECONDS = 300.0
END_SECONDS = 240.0
CONFIG = "[sandboxes.pressure]\nenabled = false\n"


def test_kill_9_ends_programs_and_their_rollouts_begin_anew(tmp_path):
    model = write_model(tmp_path / "model")
    script = JobsScript(ChatRenderer.load(model), JOBS)
    engine = ScriptedEngine(script, model_path=model, vocab_size=VOCABULARY, context_length=CONTEXT)
    flags = ["--sandbox", "apptainer"]
    for job in JOBS:
        folder = write_environment(tmp_path / job.harness, job.harness, IMAGE, AGENT_SECONDS)
        flags += ["--environment", str(folder)]
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(engine):
        with service(tmp_path, engine.url, CONFIG, *flags) as running:
            submit(running)
            eventually(lambda: len(script.held) == len(JOBS), running.log_file, END_SECONDS)
            begun = running.process.children(recursive=True)
            assert all(runs(begun, get_harness(job.harness).command[0]) for job in JOBS)
            running.stop(signal.SIGKILL)
            running.ended(30)
        eventually(lambda: not any(process.is_running() for process in begun), running.log_file)
        script.released = True
        with service(tmp_path, engine.url, CONFIG, *flags) as running:
            for job in JOBS:
                check(job, finished(running, job), script)


def submit(running: Running) -> None:
    for job in JOBS:
        task = {"environment": job.harness, "instance": {"job": job.name, "steps": job.steps}}
        order = {"rollout_id": job.name, "task": task}
        httpx.post(f"{running.url}/v1/rollouts", json=order, timeout=30).raise_for_status()


def runs(processes: list[psutil.Process], program: str) -> bool:
    """Return whether one of these processes runs a program."""
    return any(program in Path(word).name for process in processes for word in process.cmdline()[:2])


def finished(running: Running, job: Job) -> dict[str, Any]:
    """Wait for the end of a job's rollout; return it with its trajectory."""
    url = f"{running.url}/v1/rollouts/{job.name}"
    ends = ("completed", "failed", "cancelled")
    eventually(lambda: httpx.get(url, timeout=30).json()["state"] in ends, running.log_file, END_SECONDS)
    return httpx.get(url, params={"trajectory": "true"}, timeout=30).raise_for_status().json()


def check(job: Job, rollout: dict[str, Any], script: JobsScript) -> None:
    """Check that a job was done in a second attempt, of which all is recorded, and nothing of the first."""
    assert (rollout["attempt"], rollout["reward"]) == (2, 1.0), rollout["error"]
    trajectory = Trajectory.model_validate(rollout["trajectory"])
    check_invariants(trajectory)
    assert len(trajectory.segments) == 1
    assert trajectory.untrained == []
    assert sampled_by_turn(trajectory) == dict(enumerate(script.answers(job)))
