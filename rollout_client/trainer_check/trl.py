"""TRL: its GRPOTrainer's own generation, scoring and loss, with the adapter as its `rollout_func`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from api_schemas.tasks import Task
from rollout_client.adapters.submit import RolloutSubmitter
from rollout_client.adapters.trl import RolloutHook, rows, service_reward
from rollout_client.trainer_check.check import Row, Trainer


class Trl(Trainer):
    package = "trl"
    std_epsilon = 1e-4
    drops_failures = True

    def __init__(self, submitter: RolloutSubmitter, policy: str, group: int) -> None:
        super().__init__(submitter, policy, group)
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        def trainer(folder: str) -> Any:
            return GRPOTrainer(
                model=AutoModelForCausalLM.from_pretrained(policy),
                processing_class=AutoTokenizer.from_pretrained(policy),
                args=GRPOConfig(
                    output_dir=folder,
                    per_device_train_batch_size=max(2, group),
                    num_generations=max(2, group),
                    num_generations_eval=1,
                    per_device_eval_batch_size=1,
                    max_completion_length=1024,
                    report_to=[],
                    use_cpu=True,
                    bf16=False,
                ),
                train_dataset=Dataset.from_list([{"prompt": "a task of the service"}]),
                reward_funcs=service_reward,
                rollout_func=RolloutHook(submitter, weights=None),
            )

        with tempfile.TemporaryDirectory() as folder:
            self.trainer = trainer(folder)

    def collect(self, tasks: Sequence[Task]) -> list[Row]:
        self.trainer.model.train()
        self.batch = self._score(tasks, self.group)
        every = [self._row(number) for number in range(len(self.batch["prompt_ids"]))]
        self.kept = [number for number, row in enumerate(every) if any(row.mask)]
        return [every[number] for number in self.kept]

    def _score(self, tasks: Sequence[Task], group: int) -> dict[str, Any]:
        inputs = [dict(row) for row in rows(tasks) for _ in range(group)]  # TRL writes into them
        return dict(self.trainer._generate_and_score_completions(inputs))

    def _row(self, number: int) -> Row:
        """Read a row of TRL's batch; prompts are padded on the left, completions on the right."""
        batch = {name: values[number] for name, values in self.batch.items() if name != "num_items_in_batch"}
        prompt = batch["prompt_ids"][batch["prompt_mask"].bool()].tolist()
        length = int(batch["completion_mask"].sum())
        mask = (batch["completion_mask"] * batch["tool_mask"])[:length].tolist()
        logprobs = batch["sampling_per_token_logps"][:length].tolist()
        return Row(
            token_ids=prompt + batch["completion_ids"][:length].tolist(),
            mask=[0] * len(prompt) + [int(one) for one in mask],
            logprobs=[0.0] * len(prompt) + logprobs,
            advantages=[float(batch["advantages"])] * (len(prompt) + length),
        )

    def loss(self, logprobs: Sequence[Any]) -> Any:
        import torch

        completion = torch.zeros_like(self.batch["completion_ids"], dtype=torch.float32)
        ours = list(completion)
        for number, each in zip(self.kept, logprobs, strict=True):
            sampled = each[int(self.batch["prompt_mask"][number].sum()) :]
            ours[number] = torch.cat([sampled, completion[number, len(sampled) :]])
        self.trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
            torch.stack(ours),
            torch.zeros_like(completion),
            None,
        )
        self.trainer.current_gradient_accumulation_steps = 1  # set by the loop that is left out
        return self.trainer._compute_loss(self.trainer.model, self.batch)

    def evaluate(self, tasks: Sequence[Task]) -> float:
        self.trainer.model.eval()
        self._score(tasks, 1)
        return float(self.trainer._metrics["eval"]["reward"][-1])


TRAINER = Trl
