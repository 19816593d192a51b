"""Train with AReaL's own PPO trainer, with a workflow that gets rollouts from the service at ROLLOUT_URL.

    python examples/adapters/areal_train.py --config grpo.yaml train_dataset.path=tasks.jsonl

Each row of the data set has `environment` and `instance`.
"""

import sys

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from datasets import load_dataset


def main(arguments: list[str]) -> None:
    config, _ = load_expr_config(arguments, GRPOConfig)
    tasks = load_dataset("json", data_files=config.train_dataset.path, split="train")
    with PPOTrainer(config, train_dataset=tasks) as trainer:
        trainer.train(
            workflow="rollout_client.adapters.areal.Workflow",
            workflow_kwargs={"gconfig": config.gconfig},
        )


if __name__ == "__main__":
    main(sys.argv[1:])
