"""AReaL: its grouped workflow, its concatenation, its actor's advantages and its loss."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from api_schemas.tasks import Task
from rollout_client.adapters.areal import make_workflow_class
from rollout_client.adapters.submit import NoRewardError, RolloutSubmitter
from rollout_client.trainer_check.check import Row, Trainer, run_together


class Areal(Trainer):
    """AReaL with GRPO: rewards are normalized within their group."""

    package = "areal"
    std_ddof = 1
    std_epsilon = 1e-5
    drops_failures = True

    def __init__(self, submitter: RolloutSubmitter, policy: str, group: int) -> None:
        super().__init__(submitter, policy, group)
        from areal.api.cli_args import GenerationHyperparameters, NormConfig, PPOActorConfig
        from areal.trainer.ppo.actor import PPOActor

        self.workflow = make_workflow_class()(
            submitter, gconfig=GenerationHyperparameters(temperature=1.0, max_new_tokens=1024)
        )
        norm = NormConfig(mean_level="group", std_level="group", group_size=group)
        self.config = PPOActorConfig(
            experiment_name="check",
            trial_name="check",
            path=policy,
            reward_norm=norm,
            adv_norm=None,
            kl_ctl=0.0,
        )
        self.actor = PPOActor(self.config, engine=None)

    def collect(self, tasks: Sequence[Task]) -> list[Row]:
        from areal.infra.workflow_executor import check_trajectory_format

        groups = [one for one in self._episodes(tasks, self.group) if one is not None]
        for group in groups:
            check_trajectory_format(group)
        for group in groups:
            group["prox_logp"] = group["logprobs"].roll(-1, dims=-1)
        self.batches = self.actor.compute_advantages(groups)
        return [row for batch in self.batches for row in _rows(batch)]

    def _episodes(self, tasks: Sequence[Task], group: int) -> list[dict[str, Any] | None]:
        """Run the episodes of each task's group; None for a group that AReaL rejects, as its executor does."""
        from areal.infra.remote_inf_engine import GroupedRolloutWorkflow

        grouped = GroupedRolloutWorkflow(self.workflow, group, logging.getLogger(__name__))

        async def one(task: Task) -> dict[str, Any] | None:
            try:
                return dict(await grouped.arun_episode(None, task.model_dump(mode="json")))
            except NoRewardError:
                return None

        return run_together(self.submitter, [partial(one, task) for task in tasks])

    def loss(self, logprobs: Sequence[Any]) -> Any:
        import torch
        from areal.trainer.ppo.actor import grpo_loss_fn

        losses, start = [], 0
        loss_of = partial(grpo_loss_fn, eps_clip=0.2, eps_clip_higher=None, c_clip=None)
        for batch in self.batches:
            count, length = batch["input_ids"].shape
            ours = torch.nn.utils.rnn.pad_sequence(
                [*logprobs[start : start + count], torch.zeros(length)], batch_first=True
            )[:-1].roll(-1, dims=-1)
            losses.append(loss_of(ours, torch.zeros_like(ours), batch))
            start += count
        return torch.stack(losses).mean()

    def evaluate(self, tasks: Sequence[Task]) -> float:
        rewards = [float(one["rewards"].mean()) for one in self._episodes(tasks, 1) if one is not None]
        return sum(rewards) / len(rewards)


def _rows(batch: dict[str, Any]) -> list[Row]:
    """Return the rows of a batch; AReaL has moved mask, log-probabilities and advantages by one to the left."""
    rows = []
    for number in range(len(batch["input_ids"])):
        length = int(batch["attention_mask"][number].sum())
        moved = {
            name: batch[name][number].roll(1)[:length].tolist() for name in ("loss_mask", "logprobs", "advantages")
        }
        rows.append(
            Row(
                token_ids=batch["input_ids"][number][:length].tolist(),
                mask=[int(one) for one in moved["loss_mask"]],
                logprobs=moved["logprobs"],
                advantages=moved["advantages"],
            )
        )
    return rows


TRAINER = Areal
