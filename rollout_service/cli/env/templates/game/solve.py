"""Prints the actions of a perfect player, one a line, for `env audit`."""

import json
import os
import sys
from pathlib import Path

instance = json.loads(Path(os.environ["ROLLOUT_INSTANCE"]).read_text())
low, high = 1, instance["highest"]
while low <= high:
    guess = (low + high) // 2
    sys.stdout.write(f"[{guess}]\n")
    if guess == instance["number"]:
        break
    low, high = (guess + 1, high) if guess < instance["number"] else (low, guess - 1)
