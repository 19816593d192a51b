"""verl's older trainer (`trainer.use_v1=False`): its worker of agent loops, and its advantages on padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from api_schemas.tasks import Task
from rollout_client.adapters.submit import RolloutSubmitter
from rollout_client.trainer_check.check import Row, run_together
from rollout_client.trainer_check.verl import Verl, row_of


class VerlV0(Verl):
    """verl's older trainer with GRPO: one row for a rollout."""

    drops_failures = False

    def __init__(self, submitter: RolloutSubmitter, policy: str, group: int) -> None:
        super().__init__(submitter, policy, group)
        self.config.trainer.use_v1 = False

    def collect(self, tasks: Sequence[Task]) -> list[Row]:
        from verl.trainer.ppo.core_algos import AdvantageEstimator
        from verl.trainer.ppo.ray_trainer import compute_advantage

        batch = self._sequences([task for task in tasks for _ in range(self.group)], validate=False)
        batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
        batch = compute_advantage(batch, AdvantageEstimator.GRPO, config=self.config.algorithm)
        self.rows = [_unpadded(batch.batch, number) for number in range(len(batch))]
        return [row_of(one) for one in self.rows]

    def evaluate(self, tasks: Sequence[Task]) -> float:
        return float(self._sequences(tasks, validate=True).batch["rm_scores"].sum(-1).mean())

    def _sequences(self, tasks: Sequence[Task], *, validate: bool) -> Any:
        """Return verl's batch with a rollout for each of these; equal tasks that follow each other are a group."""
        import numpy as np
        import torch
        from verl import DataProto
        from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

        def column(values: Sequence[object]) -> Any:
            found = np.empty(len(values), dtype=object)
            found[:] = values
            return found

        groups = {id(task): uuid4().hex for task in tasks}
        columns: dict[str, Sequence[object]] = {
            "uid": [groups[id(task)] for task in tasks],
            "environment": [task.environment for task in tasks],
            "instance": [task.instance for task in tasks],
            "raw_prompt": [[{"role": "user", "content": "a task of the service"}] for _ in tasks],
            "index": list(range(len(tasks))),
        }
        given = DataProto.from_dict(
            tensors={"empty": torch.zeros(len(tasks), 1)},
            non_tensors={name: column(values) for name, values in columns.items()},
            meta_info={"global_steps": self.step, "validate": validate},
        )
        self._hand_over()
        worker = AgentLoopWorker(self.config, None)
        [batch] = run_together(self.submitter, [partial(worker.generate_sequences, given)])
        batch.non_tensor_batch["uid"] = column(columns["uid"])
        return batch


def _unpadded(batch: Any, number: int) -> dict[str, Any]:
    """Read a row, whose prompt verl pads at the left and whose response at the right."""
    prompts = batch["prompts"].shape[1]
    real = batch["attention_mask"][number].bool()
    names = ("responses", "response_mask", "rollout_log_probs", "advantages", "rm_scores")
    return {"prompts": batch["prompts"][number][real[:prompts]]} | {
        name: batch[name][number][real[prompts:]] for name in names
    }


TRAINER = VerlV0
