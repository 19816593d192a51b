"""Nodes that are added to a cluster share its work, and the benchmark that measures them gives all its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.redis, pytest.mark.slow(seconds=65)]

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "scaling.py"
PROMISED = (
    "efficiency_2",
    "efficiency_4",
    "efficiency_8",
    "redis_ops_per_rollout",
    "redis_bytes_per_rollout",
)


@pytest.mark.timeout(600)
def test_eight_nodes_complete_rollouts_and_the_model_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4_000:]
    document = json.loads(file.read_text())
    figures, settings = document["figures"], document["settings"]
    assert all(figures[name] > 0 for name in PROMISED)
    assert figures["model_error"] == max(map(abs, settings["model_errors"].values()))
    assert figures["redis_commands_per_rollout"] > figures["redis_ops_per_rollout"]
    assert [row["nodes"] for row in settings["model"]] == [16, 32, 64, 128, 256, 512, 1_000]
    assert settings["limits"][settings["first_bottleneck"]] == figures["limit_nodes"]
