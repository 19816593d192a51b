"""Scores the share of hidden cases: all must pass for 1, and some of them are in the parts."""

import json
import os
from pathlib import Path

instance = json.loads(Path(os.environ["ROLLOUT_INSTANCE"]).read_text())
runs = json.loads(Path(os.environ["ROLLOUT_RUNS"]).read_text())
passed = [
    run["exit_code"] == 0 and run["stdout"].strip() == expected
    for run, expected in zip(runs, instance["expected"], strict=False)
]
share = sum(passed) / len(instance["expected"])
result = {"reward": float(share == 1.0), "parts": {"passed": share}}
Path(os.environ["ROLLOUT_RESULT"]).write_text(json.dumps(result))
