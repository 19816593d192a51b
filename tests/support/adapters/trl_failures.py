"""Runs one GRPO step over handmade rollouts with TRL's own Python, and prints figures as JSON.

python trl_failures.py REWARD REWARD...      (null for a rollout that failed)
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from rollouts import TASK, rollout, segment  # of this folder: a trainer installs a package `tests`
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from api_schemas.rollouts import RolloutState
from rollout_client.adapters.submit import RolloutSubmitter
from rollout_client.adapters.trl import RolloutHook, rows, service_reward

POLICY = Path(__file__).parents[3] / "rollout_service" / "engines" / "checkpoints" / "calc-base"
REWARDS = json.loads(f"[{','.join(sys.argv[1:])}]")


class Answers(RolloutSubmitter):
    """A submitter that returns one group, with the rewards of the command line."""

    def run_all_blocking(self, requests):
        failed = {"reward": None, "state": RolloutState.FAILED}
        good = [segment([10, 11, 12 + number, 13, 2], [0, 0, 1, 0, 1]) for number in range(len(REWARDS))]
        return [
            rollout(one, **(failed if reward is None else {"reward": reward}))
            for one, reward in zip(good, REWARDS, strict=True)
        ]


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype="float32")
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=len(REWARDS),
            num_generations=len(REWARDS),
            max_steps=1,
            beta=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
        )
        trainer = GRPOTrainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(POLICY),
            args=args,
            train_dataset=Dataset.from_list(rows([TASK] * 4)),
            reward_funcs=service_reward,
            rollout_func=RolloutHook(Answers(), weights=None),
        )
        trainer.train()
    after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    log = trainer.state.log_history[0]
    figures = {"moved": float((after - before).abs().max()), "reward": log["reward"], "log": log}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
