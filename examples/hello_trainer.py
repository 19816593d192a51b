"""A minimal trainer in 40 lines: request groups of rollouts, compare each with its group, and get exact samples.

Start `rollout-service serve` first, then run: python examples/hello_trainer.py [URL]
"""

import sys
from collections import defaultdict
from statistics import mean

import anyio

from api_schemas.rollouts import Rollout, RolloutRequest
from api_schemas.tasks import Task
from rollout_client import RolloutClient

TASKS, GROUP_SIZE = 4, 8


def train_on(rollout: Rollout, advantage: float) -> None:
    """Print the samples; a real trainer would put them into its batch."""
    for segment in rollout.trajectory.segments:
        sampled = sum(segment.loss_mask)
        versions = {version for version in segment.versions if version >= 0}
        print(
            f"{rollout.rollout_id}: {len(segment.token_ids)} ids, {sampled} to train on, "
            f"weights {versions}, advantage {advantage:+.2f}"
        )


async def main(url: str) -> None:
    async with RolloutClient(url) as client:
        requests = [
            RolloutRequest(task=Task(environment="calc", instance=instance), metadata={"group": group})
            for group, instance in enumerate(await client.dataset("calc", limit=TASKS))
            for _ in range(GROUP_SIZE)
        ]
        groups = defaultdict(list)
        async for rollout in client.run_all(requests):
            groups[rollout.metadata["group"]].append(rollout)
    for group in groups.values():
        scored = [rollout for rollout in group if rollout.reward is not None]  # a failure is not a zero
        baseline = mean(rollout.reward for rollout in scored) if scored else 0.0
        for rollout in scored:
            train_on(rollout, rollout.reward - baseline)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080")
