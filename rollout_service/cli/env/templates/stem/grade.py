"""Scores the answer: 1 if its last number is within the tolerance."""

import json
import os
import re
from pathlib import Path

LONGEST_ANSWER = 10_000

instance = json.loads(Path(os.environ["ROLLOUT_INSTANCE"]).read_text())
answer = Path(os.environ["ROLLOUT_ANSWER"]).read_text(errors="replace")[-LONGEST_ANSWER:]
numbers = re.findall(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", answer)
close = bool(numbers) and abs(float(numbers[-1]) - instance["answer"]) <= instance["tolerance"]
result = {"reward": float(close), "parts": {"answered": float(bool(numbers))}}
Path(os.environ["ROLLOUT_RESULT"]).write_text(json.dumps(result))
