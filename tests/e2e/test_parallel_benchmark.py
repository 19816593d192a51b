"""The benchmark of sub-agents gives all its figures; they run at the same time and share their slots fairly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "parallel_agents.py"
MEASURED = ("cpu_ms_per_branch", "engine_ms_per_branch", "memory_kb_per_branch", "slots_busy_share")


@pytest.mark.timeout(300)
def test_sub_agents_run_at_the_same_time_and_in_turn(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4_000:]
    figures = json.loads(file.read_text())["figures"]
    assert figures["branches_100_ok"] == 1
    assert figures["fairness_max_min"] < 3
    assert figures["width8_ratio"] < 2, "one after the other, 8 tasks take 8 times as long"
    assert all(figures[name] > 0 for name in MEASURED)
