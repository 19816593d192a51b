"""Runs in the agent's sandbox before the agent comes, in its working folder."""

import json
import os
from pathlib import Path

instance = json.loads(Path(os.environ["ROLLOUT_INSTANCE"]).read_text())
Path("text.txt").write_text(instance["text"])
