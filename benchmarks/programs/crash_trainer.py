"""A trainer that may be killed at any moment: it records its batches and acknowledgments in a ledger.

Run: python benchmarks/programs/crash_trainer.py URL RUN_ID LEDGER
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import TextIO

from rollout_client.sync import SyncRolloutClient

PATIENCE_SECONDS = 300.0
LEASE_SECONDS = 2.0
STEP_SECONDS = 0.1


def main(url: str, run_id: str, ledger: Path) -> None:
    """Train until the run is over."""
    with ledger.open("a") as file, SyncRolloutClient(url, patience_seconds=PATIENCE_SECONDS) as client:
        for batch in client.open_run(run_id).batches(lease_seconds=LEASE_SECONDS):
            groups = [group.number for group in batch.groups]
            write(file, {"got": batch.batch_id, "groups": groups, "delivery": batch.batch.delivery})
            time.sleep(random.uniform(0, STEP_SECONDS))
            batch.ack()
            masked = sum(not sample.usable for group in batch.groups for sample in group.samples)
            write(file, {"acknowledged": batch.batch_id, "groups": groups, "masked": masked})


def write(file: TextIO, entry: dict[str, object]) -> None:
    """Append a line and flush it to disk; if a kill cut the line before short, this one ends it."""
    file.write("\n" + json.dumps(entry))
    file.flush()
    os.fsync(file.fileno())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
