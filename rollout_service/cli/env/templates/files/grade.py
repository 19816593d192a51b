"""Scores the outcome in a sandbox that the agent never used; trust nothing in the working folder."""

import json
import os
from contextlib import suppress
from pathlib import Path

LONGEST_ANSWER = 100

instance = json.loads(Path(os.environ["ROLLOUT_INSTANCE"]).read_text())
answer = Path(os.environ["ROLLOUT_WORKDIR"], "answer.txt")
given = ""
with suppress(OSError):
    if answer.is_file():
        with answer.open(errors="replace") as file:
            given = file.read(LONGEST_ANSWER).strip()
right = given == str(len(instance["text"].split()))
result = {"reward": float(right), "parts": {"answered": float(bool(given))}}
Path(os.environ["ROLLOUT_RESULT"]).write_text(json.dumps(result))
