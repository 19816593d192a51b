"""Scores the outcome where the agent never was; whatever is in the working folder is the agent's and not trusted."""

import json
import os
from pathlib import Path

LONGEST_ANSWER = 100

instance = json.loads(Path(os.environ["ROLLOUT_INSTANCE"]).read_text())
answer = Path(os.environ["ROLLOUT_WORKDIR"], "answer.txt")
given = answer.read_text(errors="replace")[:LONGEST_ANSWER].strip() if answer.is_file() else ""
right = given == str(len(instance["text"].split()))
result = {"reward": float(right), "parts": {"answered": float(bool(given))}}
Path(os.environ["ROLLOUT_RESULT"]).write_text(json.dumps(result))
