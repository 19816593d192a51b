"""The benchmark of environments gives all its figures, and rewards exactly the agents that repaired something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxes.images.store import ImageStore

pytestmark = [pytest.mark.apptainer, pytest.mark.swe, pytest.mark.slow(seconds=80)]
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "environments.py"
PROMISED = {
    "start_ms_p50",
    "evaluate_overhead_ms_p50",
    "image_mb_p50",
    "build_s_p50",
    "rollouts_per_minute",
    "limit_start_ms",
    "grader_ms_swe",
    "limit_images_mb",
}
TIMED_BY_THEIR_GRADERS = ("same", "fresh", "harbor_same", "harbor_fresh")


@pytest.mark.timeout(600)
def test_every_kind_is_measured_and_the_images_are_gone(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4_000:]
    figures = json.loads(file.read_text())["figures"]
    assert all(figures[name] > 0 for name in PROMISED)
    assert all(figures[f"evaluate_overhead_ms_p50_{kind}"] > 0 for kind in TIMED_BY_THEIR_GRADERS)
    assert "evaluate_overhead_ms_p50_swe" in figures
    assert (figures["rollouts_rewarded"], figures["rollouts_at_once"]) == (3, 4)
    # Each image file has all its layers; the cache of layers has each once.
    assert figures["images_mb"] > figures["limit_images_mb"]
    assert figures["layers"] == 1 + 2 + figures["images"] * 2
    assert not [image for image in ImageStore().list() if image.name.startswith("image-")]
