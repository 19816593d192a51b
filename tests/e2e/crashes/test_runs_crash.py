"""After kill -9 of trainer, service, Redis or all, acknowledged groups never come again, and nothing else is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow(seconds=85)

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "crash.py"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("store", ["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def test_all_sides_agree_after_every_kind_of_kill(store: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--store", store, "--quick", "--json", str(figures)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4_000:]
    found = json.loads(figures.read_text())["figures"]
    assert (found["lost"], found["duplicated"]) == (0, 0)
    assert found["rounds"] >= 3
    assert found["groups_acknowledged"] > 0
