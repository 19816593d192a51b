"""OpenRLHF: its samples' generator, its concatenation, its experience maker's advantages and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from api_schemas.tasks import Task
from rollout_client.adapters.openrlhf import agent_executor
from rollout_client.adapters.submit import RolloutSubmitter, task_text
from rollout_client.trainer_check.check import Row, Trainer, run_together

MAX_LENGTH = 2048


class Openrlhf(Trainer):
    package = "openrlhf"
    std_epsilon = 1e-9
    drops_failures = False

    def __init__(self, submitter: RolloutSubmitter, policy: str, group: int) -> None:
        super().__init__(submitter, policy, group)
        self.executor = agent_executor(submitter)()

    def collect(self, tasks: Sequence[Task]) -> list[Row]:
        from openrlhf.trainer.ppo_utils.experience import Experience
        from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
        from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

        make = SamplesGenerator._process_response_into_experience
        samples = [make(None, one, max_len=MAX_LENGTH) for one in self._execute(tasks, self.group)]
        batch = Experience.concat_experiences(samples, 0)
        batch.index = list(range(len(samples)))
        batch.kl = batch.rollout_log_probs * 0
        maker: Any = SimpleNamespace(
            strategy=SimpleNamespace(args=_arguments(self.group)),
            advantage_estimator="group_norm",
            kl_ctl=SimpleNamespace(value=0.0),
            get_cumulative_returns=lambda *given: RemoteExperienceMaker.get_cumulative_returns(maker, *given),
        )
        (self.batch,) = RemoteExperienceMaker.compute_advantages_and_returns(maker, [batch])
        return [self._row(number) for number in range(len(samples))]

    def _execute(self, tasks: Sequence[Task], group: int) -> list[dict[str, Any]]:
        params = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=1024)

        prompts = [task_text(task) for task in tasks for _ in range(group)]
        execute = self.executor.execute
        return run_together(
            self.submitter, [partial(execute, one, None, params, MAX_LENGTH, None, None) for one in prompts]
        )

    def _row(self, number: int) -> Row:
        """Return a row of OpenRLHF's batch, which has an entry for the first token only in the ids."""
        length = int(self.batch.attention_mask[number].sum())

        def whole(values: Any) -> list[float]:
            return [0.0, *values[number][: length - 1].tolist()]

        return Row(
            token_ids=self.batch.sequences[number][:length].tolist(),
            mask=[int(one) for one in whole(self.batch.action_mask)],
            logprobs=whole(self.batch.rollout_log_probs),
            advantages=whole(self.batch.advantages),
        )

    def loss(self, logprobs: Sequence[Any]) -> Any:
        import torch
        from openrlhf.models import PolicyLoss

        ours = torch.nn.utils.rnn.pad_sequence([one[1:] for one in logprobs], batch_first=True)
        batch = self.batch
        return PolicyLoss()(ours, batch.rollout_log_probs, batch.advantages, action_mask=batch.action_mask)[0]

    def evaluate(self, tasks: Sequence[Task]) -> float:
        rewards = [float(one["reward"]) for one in self._execute(tasks, 1)]
        return sum(rewards) / len(rewards)


def _arguments(group: int) -> Any:
    return SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=group, max_new_tokens=1024),
        reward=SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(estimator="group_norm", gamma=1.0, lambd=1.0, no_std_norm=False)
        ),
    )


TRAINER = Openrlhf
