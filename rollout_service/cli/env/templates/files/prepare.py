"""Prepares the working folder of the agent's sandbox before the agent starts."""

import json
import os
from pathlib import Path

instance = json.loads(Path(os.environ["ROLLOUT_INSTANCE"]).read_text())
Path("text.txt").write_text(instance["text"])
