"""Scores the files that the agent left; trust nothing in the working folder."""

import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

instance = json.loads(Path(os.environ["ROLLOUT_INSTANCE"]).read_text())
given = ""
with suppress(OSError), Path(os.environ["ROLLOUT_WORKDIR"], "busiest.txt").open(errors="replace") as file:
    given = file.read(100).strip()
busiest = Counter(instance["clients"]).most_common(1)[0][0]
result = {"reward": float(given == busiest), "parts": {"answered": float(bool(given))}}
Path(os.environ["ROLLOUT_RESULT"]).write_text(json.dumps(result))
