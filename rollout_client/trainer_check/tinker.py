"""The Tinker cookbook's own code, but for the loss, which is written out, since it runs at Tinker's service."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from api_schemas.tasks import Task
from rollout_client.adapters import tinker as adapter
from rollout_client.adapters.submit import RolloutSubmitter
from rollout_client.trainer_check.check import Row, Trainer, run_together


class Tinker(Trainer):
    """Subtracts the mean reward of a group and does not divide."""

    package = "tinker-cookbook"
    divides_by_std = False
    drops_failures = True

    def __init__(self, submitter: RolloutSubmitter, policy: str, group: int) -> None:
        super().__init__(submitter, policy, group)
        from tinker_cookbook.rl.rollout_strategy import rollout_strategy_from_config

        self.strategy = rollout_strategy_from_config(adapter.ServiceStrategy())

    def collect(self, tasks: Sequence[Task]) -> list[Row]:
        from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
        from tinker_cookbook.rl.rollouts import do_group_rollout_and_filter_constant_reward

        collect = partial(
            do_group_rollout_and_filter_constant_reward,
            None,  # the service samples
            max_tokens=1024,
            temperature=1.0,
            do_remove_constant_reward_groups=False,
            enable_logging=False,
            strategy=self.strategy,
        )
        groups = [adapter.RolloutGroup(task, self.group, self.submitter) for task in tasks]
        results = run_together(self.submitter, [partial(collect, group) for group in groups])
        kept = [result for result in results if result is not None]
        data, _ = assemble_training_data(kept, compute_advantages(kept))
        self.fields = [{name: values.to_torch() for name, values in one.loss_fn_inputs.items()} for one in data]
        return [_row(one.model_input.to_ints(), fields) for one, fields in zip(data, self.fields, strict=True)]

    def loss(self, logprobs: Sequence[Any]) -> Any:
        losses = []
        for ours, fields in zip(logprobs, self.fields, strict=True):
            ratio = (ours[1:] - fields["logprobs"]).exp()
            losses.append((ratio * fields["advantages"])[fields["mask"].bool()].sum())
        return -sum(losses)

    def evaluate(self, tasks: Sequence[Task]) -> float:
        from tinker_cookbook.completers import TokenCompleter
        from tinker_cookbook.rl.metric_util import RLTestSetEvaluator

        groups = _Groups([adapter.RolloutGroup(task, 1, self.submitter) for task in tasks])
        evaluator = RLTestSetEvaluator(groups, max_tokens=1024, strategy=self.strategy)
        (metrics,) = run_together(self.submitter, [partial(evaluator.eval_token_completer, TokenCompleter())])
        return float(metrics["test/env/all/reward/total"])


class _Groups:
    def __init__(self, groups: list[Any]) -> None:
        self.groups = groups

    def get_batch(self, index: int) -> list[Any]:
        del index
        return self.groups

    def __len__(self) -> int:
        return 1


def _row(ids: list[int], fields: dict[str, Any]) -> Row:
    """Return a datum, whose targets are one token ahead of its input, as a row."""

    def whole(name: str) -> list[float]:
        return [0.0, *fields[name].tolist()]

    return Row(
        token_ids=[ids[0], *[int(one) for one in fields["target_tokens"].tolist()]],
        mask=[int(one) for one in whole("mask")],
        logprobs=whole("logprobs"),
        advantages=whole("advantages"),
    )


TRAINER = Tinker
