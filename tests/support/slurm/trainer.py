"""A trainer on the login machine: it creates a run, leases its batches, and acknowledges each once it may.

    python trainer.py REQUEST.json RECORD.jsonl PERMITS

It creates the run once the file PERMITS holds 0 or more, and acknowledges the n-th batch once it holds n or more, so a
test decides how far the run goes; then it appends one line for each of the batch's samples.
"""

import json
import os
import sys
from pathlib import Path

import anyio

from api_schemas.runs import RunRequest
from rollout_client import RolloutClient
from rollout_client.runs import LeasedBatch

PATIENCE_SECONDS = 120.0


def record(batch: LeasedBatch, file: Path) -> None:
    """Write down the samples of a batch."""
    lines = [
        {
            "batch": batch.batch_id,
            "rollout_id": sample.rollout.rollout_id,
            "state": sample.rollout.state,
            "reward": sample.rollout.reward,
            "segments": len(sample.rollout.trajectory.segments) if sample.rollout.trajectory else 0,
            "usable": sample.usable,
        }
        for group in batch.groups
        for sample in group.samples
    ]
    with file.open("a") as output:
        output.writelines(json.dumps(line) + "\n" for line in lines)


async def wait_for_permit(permits: anyio.Path, number: int) -> None:
    """Wait until the trainer may go so far."""
    while int(await permits.read_text() or -1) < number:
        await anyio.sleep(0.1)


async def main(request: RunRequest, output: Path, permits: anyio.Path) -> None:
    """Train until the run has ended."""
    seen = 0
    url, key = os.environ["ROLLOUT_URL"], os.environ["ROLLOUT_KEY"]
    async with RolloutClient(url, key, patience_seconds=PATIENCE_SECONDS) as client:
        await wait_for_permit(permits, seen)
        run = await client.create_run(request)
        async for batch in run.batches():
            seen += 1
            await wait_for_permit(permits, seen)
            await batch.ack()
            record(batch, output)
    sys.stdout.write("trained\n")


if __name__ == "__main__":
    wanted = RunRequest.model_validate_json(Path(sys.argv[1]).read_bytes())
    anyio.run(main, wanted, Path(sys.argv[2]), anyio.Path(sys.argv[3]))
