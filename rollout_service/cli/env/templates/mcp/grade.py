"""Scores the answer: 1 for the right number."""

import json
import os
from pathlib import Path

instance = json.loads(Path(os.environ["ROLLOUT_INSTANCE"]).read_text())
answer = Path(os.environ["ROLLOUT_ANSWER"]).read_text(errors="replace")[:100].strip()
result = {"reward": float(answer == str(instance["answer"])), "parts": {"answered": float(bool(answer))}}
Path(os.environ["ROLLOUT_RESULT"]).write_text(json.dumps(result))
