"""A cluster whose nodes, engines and Redis are killed, stopped and cut off delivers all once, and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow(seconds=70)

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "chaos.py"
LOST_SHARE, LOST_TURNS = 0.1, 2
"""The turns that may be sampled again: short turns are often answered while the one before is being saved."""


@pytest.mark.redis
@pytest.mark.timeout(600)
def test_a_cluster_loses_nothing_repeats_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(figures)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4_000:]
    found = json.loads(figures.read_text())["figures"]
    assert found["rounds"] >= 7
    assert (found["lost"], found["failed"], found["duplicated"], found["leftovers"]) == (0, 0, 0, 0)
    at_stake = found["turns_kept_of"]
    assert at_stake * (1 - (found["turns_kept"] or 0)) <= LOST_SHARE * at_stake + LOST_TURNS
    assert min(found["rollouts"], found["groups_acknowledged"], found["stored_before_retention"]) > 0
