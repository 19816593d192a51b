"""Writes the log before the agent starts."""

import json
import os
from pathlib import Path

instance = json.loads(Path(os.environ["ROLLOUT_INSTANCE"]).read_text())
lines = [f"{client} GET /{number}" for number, client in enumerate(instance["clients"])]
Path("access.log").write_text("\n".join(lines) + "\n")
