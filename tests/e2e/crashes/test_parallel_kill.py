"""kill -9 while sub-agents are at work loses nothing, and leaves nothing on the frozen pool and no sandbox."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "parallel_kill.py"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("sandbox", ["local", pytest.param("apptainer", marks=pytest.mark.apptainer)])
def test_a_kill_in_the_middle_of_a_wave_loses_nothing_and_leaves_nothing(
    tmp_path: Path, sandbox: str
) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--sandbox", sandbox, "--json", str(figures)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4_000:]
    found = json.loads(figures.read_text())["figures"]
    assert found["rounds"] >= 3
    assert found["in_wave_min"] > 0, "every kill found sub-agents at work"
    assert (found["lost"], found["failed"], found["torn"], found["duplicated"]) == (0, 0, 0, 0)
    assert (found["left_on_frozen"], found["sandboxes_left"]) == (0, 0), result.stderr[-4_000:]
    assert found["begun_again"] > 0
