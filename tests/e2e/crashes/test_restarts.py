"""`submit` and a trainer continue through planned restarts: everything comes once, and the service ends in time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow(seconds=62)

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "restarts.py"
DRAIN_AND_CLOSE_SECONDS = 1.0 + 3.0
SLACK_SECONDS = 1.0
"""Slack for a busy machine between a process's end and its parent's notice of it."""


@pytest.mark.timeout(400)
def test_clients_continue_through_planned_restarts(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(figures)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4_000:]
    found = json.loads(figures.read_text())["figures"]
    assert found["restarts"] >= 3
    assert (found["lost"], found["duplicated"], found["client_failures"], found["tracebacks"]) == (0, 0, 0, 0)
    assert found["shutdown_seconds_max"] < DRAIN_AND_CLOSE_SECONDS + SLACK_SECONDS
    assert found["groups_acknowledged"] > 0
