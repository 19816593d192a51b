"""Train with the Tinker cookbook on rollouts of the service at ROLLOUT_URL.

python tinker_train.py MODEL ROWS LOG_FOLDER      # rows are JSON Lines with `environment` and `instance`
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import chz
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder

from rollout_client.adapters.tinker import RolloutGroup, ServiceStrategy


class Groups(RLDataset):
    def __init__(self, groups: Sequence[EnvGroupBuilder], batch_size: int) -> None:
        self.groups, self.batch_size = groups, batch_size

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return self.groups[index * self.batch_size : (index + 1) * self.batch_size]

    def __len__(self) -> int:
        return len(self.groups) // self.batch_size


@chz.chz
class Rows(RLDatasetBuilder):
    """The tasks of a file, without a test set."""

    path: str
    group_size: int = 8
    batch_size: int = 16

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        return Groups(self.groups(), self.batch_size), None

    def groups(self) -> list[EnvGroupBuilder]:
        rows = [json.loads(line) for line in Path(self.path).read_text().splitlines()]
        return [RolloutGroup(row, self.group_size) for row in rows]


if __name__ == "__main__":
    model, rows, folder = sys.argv[1:]
    config = train.Config(
        model_name=model,
        recipe_name="rollout-service",
        log_path=folder,
        dataset_builder=Rows(path=rows),
        learning_rate=4e-5,
        max_tokens=512,
        rollout_error_tolerance=ServiceStrategy(),
    )
    asyncio.run(train.main(config))
