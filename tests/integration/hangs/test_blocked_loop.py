"""Code that blocks the event loop is named while it does: `doctor --live` reads it where the watchdog left it."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_service.server.hangs.heartbeat import FILE
from tests.support.hangs.service import NAMED_WITHIN
from tests.support.processes.service import Running, eventually, scripted_engine, service

pytestmark = pytest.mark.timeout(180)

BLOCKED_SECONDS = 25
PLUG_IN = f"""
import time

from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.episodes import Score, StopReason


class Blocking(AgentEnvironment):
    async def run(self, episode):
        episode.answer = "done"
        return StopReason.FINISHED

    async def evaluate(self, episode):
        time.sleep({BLOCKED_SECONDS})
        return Score(1.0)


environment = Blocking(EnvironmentSpec(name="blocking", prompt="Go.", tools=["finish"]))
"""


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install an environment whose grader sleeps on the event loop."""
    folder = tmp_path / "plug-in"
    about = folder / "blocking_grader-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "blocking_grader.py").write_text(PLUG_IN)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: blocking-grader\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[rollout_service.environments]\nblocking = blocking_grader:environment\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[3]}")
    return folder


def doctor(server: Running, state: Path, *flags: str) -> tuple[int, str]:
    """Run `doctor --live`; return its exit code and what it prints."""
    command = [sys.executable, "-m", "rollout_service.cli", "doctor", "--live", "--url", server.url]
    done = subprocess.run(
        [*command, "--state-dir", str(state), *flags], capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout or done.stderr


def events(server: Running, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the data of the stored events of a kind."""
    with httpx.stream("GET", f"{server.url}/v1/events?after=0&kind={kind}", timeout=30) as answer:
        assert answer.is_success, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


@pytest.mark.usefixtures("plug_in")
def test_a_grader_that_sleeps_on_the_loop(tmp_path):
    state = tmp_path / "state"
    with scripted_engine(tmp_path, delay=0.01) as engine, service(tmp_path, engine.url) as server:
        server.wait_until_ready()
        code, printed = doctor(server, state)
        assert (code, "Nothing is stuck, slow or held back." in printed) == (0, True), printed
        order = {"rollout_id": "r", "task": {"environment": "blocking", "instance": {}}}
        began = time.monotonic()
        with suppress(httpx.ReadTimeout):  # the loop may be blocked before it has answered
            httpx.post(f"{server.url}/v1/rollouts", json=order, timeout=3).raise_for_status()
        eventually(lambda: (state / FILE).exists(), server.log_file, NAMED_WITHIN)
        code, printed = doctor(server, state, "--json")
        assert time.monotonic() - began < NAMED_WITHIN
        report = json.loads(printed)
        assert (code, report["source"]) == (1, "state_folder")
        [finding] = [one for one in report["findings"] if one["kind"] == "event_loop"]
        assert (finding["verdict"], finding["responds"]) == ("stuck", False)
        assert finding["rollouts"] == ["r"]
        assert finding["subject"].startswith("Blocking.evaluate (")
        line = next(n for n, text in enumerate(PLUG_IN.splitlines(), 1) if "time.sleep" in text)
        assert finding["subject"].endswith(f"blocking_grader.py:{line})")
        done = httpx.get(f"{server.url}/v1/rollouts/r", params={"wait": 60}, timeout=90).json()
        assert (done["state"], done["reward"]) == ("completed", 1.0)
        ended = next(events(server, "hang.ended"))
        assert ended["data"]["finding_id"] == finding["finding_id"]
        assert ended["data"]["seconds"] >= BLOCKED_SECONDS - 1
        assert next(events(server, "hang.began"))["data"]["finding_id"] == finding["finding_id"]
        eventually(lambda: not (state / FILE).exists(), server.log_file)
        # It stays in the report for ten seconds, since nobody could ask before.
        eventually(lambda: doctor(server, state)[0] == 0, server.log_file)
        assert "the event loop is blocked" in server.log
        assert "the event loop runs again" in server.log


def test_without_a_service_and_without_a_report(tmp_path):
    command = [sys.executable, "-m", "rollout_service.cli", "doctor", "--live", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(
        [*command, "--state-dir", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "does not answer, and there is no report" in done.stderr
    assert "SIGUSR1" in done.stderr
