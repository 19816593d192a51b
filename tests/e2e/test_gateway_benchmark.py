"""The benchmark of the gateway gives all its figures, and no token is lost on the way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gateway.py"
PROMISED = {
    "added_ms_p50_c64",
    "ttft_added_ms_p50",
    "calls_per_second",
    "long_call_ms",
    "memory_mb_per_conversation",
}


@pytest.mark.timeout(600)
def test_no_token_is_lost_and_recorded_agents_are_merged(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--peer", "none", "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4_000:]
    document = json.loads(file.read_text())
    figures, settings = document["figures"], document["settings"]
    assert figures.keys() >= PROMISED
    assert (figures["lost_tokens"], figures["invented_tokens"]) == (0, 0)
    assert figures["long_call_tokens"] > 90_000
    assert figures["bridged_share"] > 0.8
    assert figures["merge_factor"] > 2
    assert settings["replayed"]["codex"]["segments"] == 1
