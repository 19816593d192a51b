"""SkyRL: its trainer's own generation, conversion, advantages and evaluation, and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import MagicMock

from api_schemas.tasks import Task
from rollout_client.adapters.skyrl import generator
from rollout_client.adapters.submit import RolloutSubmitter
from rollout_client.trainer_check.check import Row, Trainer, run_together


class Skyrl(Trainer):
    """SkyRL with GRPO and a row for each segment."""

    package = "skyrl"
    drops_failures = False

    def __init__(self, submitter: RolloutSubmitter, policy: str, group: int) -> None:
        super().__init__(submitter, policy, group)
        from skyrl.train.config import SkyRLTrainConfig
        from transformers import AutoTokenizer

        self.config = SkyRLTrainConfig()
        self.config.generator.n_samples_per_prompt = group
        self.config.generator.step_wise_trajectories = True
        self.config.generator.sampling_params.max_generate_length = 1024
        self.config.generator.sampling_params.logprobs = 1
        self.config.generator.inference_engine.enable_ray_prometheus_stats = False
        self.config.trainer.algorithm.advantage_estimator = "grpo"
        self.config.trainer.algorithm.max_seq_len = 2048
        self.generator = generator(submitter=submitter, step_wise=True)
        self.tokenizer = AutoTokenizer.from_pretrained(policy)

    def collect(self, tasks: Sequence[Task]) -> list[Row]:
        from skyrl.train.trainer import RayPPOTrainer

        self.config.trainer.train_batch_size = self.config.trainer.policy_mini_batch_size = len(tasks)
        trainer = RayPPOTrainer(
            cfg=self.config,
            tracker=None,
            tokenizer=self.tokenizer,
            train_dataset=_Rows(tasks),
            eval_dataset=None,
            inference_engine_client=None,
            generator=self.generator,
        )
        trainer.dispatch = MagicMock()  # it would be SkyRL's workers on GPUs
        trainer.dispatch.get_lcm_dp_size.return_value = 1
        output, _ = self._generate(trainer.generate, tasks, self.group)
        uids = [one.instance_id for one in output["trajectory_ids"]]
        output, uids = trainer.postprocess_generator_output(output, uids)
        batch = trainer.convert_to_training_input(output, uids)
        batch["values"], batch["action_log_probs"] = None, batch["rollout_logprobs"]
        batch.metadata["avg_response_length"] = 1.0
        batch.metadata.setdefault("metrics", {})
        self.batch = trainer.compute_advantages_and_returns(batch)
        return [self._row(number) for number in range(len(self.batch["sequences"]))]

    def _generate(self, generate: Any, tasks: Sequence[Task], group: int) -> Any:
        from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
        from skyrl.train.generators.utils import prepare_generator_input

        params = get_sampling_params_for_backend("vllm", self.config.generator.sampling_params)
        rows = [_Rows(tasks)[number] for number in range(len(tasks))]
        batch, uids = prepare_generator_input(rows, group, params, "service", "train", self.step)

        (output,) = run_together(self.submitter, [partial(generate, batch)])
        return output, uids

    def _row(self, number: int) -> Row:
        """Read a row of SkyRL's batch, which is padded on the left."""
        length = int(self.batch["attention_mask"][number].sum())
        ids = self.batch["sequences"][number]
        start = int(self.batch["attention_mask"][number].argmax())
        response = self.batch["response_mask"].shape[1]

        def whole(name: str) -> list[float]:
            prompt = [0.0] * (len(ids) - response)
            return [float(one) for one in (prompt + self.batch[name][number].tolist())[start : start + length]]

        return Row(
            token_ids=ids[start : start + length].tolist(),
            mask=[int(one) for one in whole("loss_mask")],
            logprobs=whole("rollout_logprobs"),
            advantages=whole("advantages"),
        )

    def loss(self, logprobs: Sequence[Any]) -> Any:
        import torch
        from skyrl.backends.skyrl_train.utils import ppo_utils

        response = self.batch["response_mask"].shape[1]
        width = self.batch["sequences"].shape[1]
        ours = torch.zeros(len(logprobs), width)
        rows = []
        for number, each in enumerate(logprobs):
            start = int(self.batch["attention_mask"][number].argmax())
            rows.append(torch.cat([ours[number, :start], each, ours[number, start + len(each) :]]))
        mask = self.batch["loss_mask"]
        loss, _ = ppo_utils.ppo_policy_loss(
            torch.stack(rows)[:, -response:],
            self.batch["rollout_logprobs"],
            self.batch["advantages"] / mask.sum(),
            self.config.trainer.algorithm,
            loss_mask=mask,
            rollout_logprobs=self.batch["rollout_logprobs"],
        )
        return loss

    def evaluate(self, tasks: Sequence[Task]) -> float:
        from skyrl.train.generators.utils import get_metrics_from_generator_output

        output, uids = self._generate(self.generator.generate, tasks, 1)
        last = [number for number, is_last in enumerate(output["is_last_step"]) if is_last]
        chosen = {name: [values[one] for one in last] for name, values in output.items() if isinstance(values, list)}
        return float(get_metrics_from_generator_output(dict(output) | chosen, uids)["avg_score"])


class _Rows:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.tasks[number].model_dump(mode="json")
        prompt = [{"role": "user", "content": "a task of the service"}]
        return {"prompt": prompt, "env_class": None, "env_extras": row, "uid": f"task-{number}"}

    def collate_fn(self, batch: Any) -> Any:
        return batch


TRAINER = Skyrl
