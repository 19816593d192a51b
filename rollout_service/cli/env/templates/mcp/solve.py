"""Prints the reference answer, for `env audit`."""

import json
import os
import sys
from pathlib import Path

sys.stdout.write(str(json.loads(Path(os.environ["ROLLOUT_INSTANCE"]).read_text())["answer"]))
