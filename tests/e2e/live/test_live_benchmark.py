"""The benchmark of live sessions gives all its figures; nothing is lost, doubled or left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "live.py"
PROMISED = {"lost", "duplicated", "overhead_ms_p50", "ttft_added_ms_p50", "leftovers"}


@pytest.mark.timeout(400)
def test_nothing_is_lost_doubled_or_left_behind(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4_000:]
    figures = json.loads(file.read_text())["figures"]
    assert figures.keys() >= PROMISED
    assert {name: figures[name] for name in ("lost", "duplicated", "inexact", "leftovers")} == {
        "lost": 0,
        "duplicated": 0,
        "inexact": 0,
        "leftovers": 0,
    }, result.stdout[-4_000:]
    assert figures["delivered"] > 0
    assert figures["updates"] > 1
