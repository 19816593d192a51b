"""The live demo goes through the whole service: users are served, judged, trained on, and served by new weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_service.engines.kinds.embedded.weights import read_tensors
from rollout_service.engines.shipped import policy_folder

pytestmark = [
    pytest.mark.extended("training/", "examples/", "rollout_service/live/"),
    pytest.mark.slow(seconds=110),
]

EXAMPLE = Path(__file__).parents[3] / "examples" / "live_demo.py"
PATIENCE_SECONDS = 280


@pytest.mark.timeout(PATIENCE_SECONDS + 30)
@pytest.mark.parametrize(("arm", "flags"), [("binary", []), ("hints", []), ("hints", ["--served-teacher"])])
def test_served_turns_become_updates_of_the_weights(tmp_path, arm, flags):
    figures = tmp_path / "figures.json"
    flags = [*flags, "--quick", "--arms", arm, "--out", str(tmp_path), "--json", str(figures)]
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), *flags],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(figures.read_text())
    assert found["updates"] == 2
    assert 0 <= found["start_satisfied"] < 0.7
    assert found["minutes"] > 0

    trained = found["arms"][arm]
    assert trained["start_right"] > 0.9
    turns = trained["turns"]
    assert turns["served"] == turns["delivered"] + sum(turns["dropped"].values()) + turns["waiting"]
    assert turns["dropped"]["opted_out"] == 2 * 4 * 5  # the guests', before and after
    assert turns["recorded"] == turns["served"] - turns["dropped"]["opted_out"]
    assert turns["delivered"] >= 2 * 4 * 5
    assert (tmp_path / "live_demo.png").stat().st_size > 1_000

    folders = [policy_folder("live-base"), tmp_path / arm / "step-1", tmp_path / arm / "step-2"]
    before, first, second = map(read_tensors, folders)
    assert any((before[name] != first[name]).any() for name in before)
    assert any((first[name] != second[name]).any() for name in before)
