"""Runs groups through the Tinker cookbook's own code with its own Python, and prints figures as JSON.

ROLLOUT_URL=... python tinker_groups.py
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import sys
from typing import Any

import torch
from real_rollouts import POLICY, PlannedSubmitter, centered, policy, rows, sampled_tokens
from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator
from tinker_cookbook.rl.rollout_logging import serialize_rollout_summaries
from tinker_cookbook.rl.rollout_strategy import rollout_strategy_from_config
from tinker_cookbook.rl.rollouts import (
    RolloutErrorCounter,
    do_group_rollout_and_filter_constant_reward,
    set_rollout_executor,
)
from tinker_cookbook.rl.train import prepare_minibatch
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset
from transformers import AutoTokenizer

from rollout_client.adapters.tinker import RolloutGroup, ServiceStrategy

GROUP_SIZE = 4


class Groups(RLDataset):
    """One batch of groups."""

    def __init__(self, groups: list[Any]) -> None:
        self.groups = groups

    def get_batch(self, index: int) -> list[Any]:
        """Return all groups."""
        return self.groups

    def __len__(self) -> int:
        """Return the number of batches."""
        return 1


async def collect(groups: list[Any], strategy: Any) -> list[Any]:
    """Return the groups' trajectories as the cookbook's training loop collects them; None for a dropped group."""
    return await asyncio.gather(
        *(
            do_group_rollout_and_filter_constant_reward(
                None,  # the service samples
                group,
                max_tokens=200,
                temperature=1.0,
                do_remove_constant_reward_groups=False,
                enable_logging=False,
                strategy=strategy,
            )
            for group in groups
        )
    )


def loss_of(data: list[Any], model: Any) -> tuple[float, torch.Tensor]:
    """Return the largest difference between log-probabilities of engine and torch, and Tinker's loss on the data."""
    largest, loss = 0.0, torch.zeros(())
    for datum in data:
        ids = torch.tensor([datum.model_input.to_ints()])
        fields = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
        logits = model(ids).logits[0].float().log_softmax(-1)
        logprobs = logits.gather(-1, fields["target_tokens"].long()[:, None])[:, 0]
        mask = fields["mask"].bool()
        largest = max(largest, float((logprobs - fields["logprobs"])[mask].abs().max().detach()))
        loss = loss - (torch.exp(logprobs - fields["logprobs"]) * fields["advantages"])[mask].sum()
    return largest, loss


def trained_tokens(datum: Any) -> list[tuple[tuple[int, ...], int, float]]:
    """Return each token of a datum with mask 1, in the form of `sampled_tokens`."""
    fields = {name: value.to_torch().tolist() for name, value in datum.loss_fn_inputs.items()}
    ids = datum.model_input.to_ints()
    return [
        (tuple(ids[: at + 1]), fields["target_tokens"][at], fields["logprobs"][at])
        for at, trained in enumerate(fields["mask"])
        if trained
    ]


def wrong_tokens(data: list[Any], places: list[Any], submitter: PlannedSubmitter, groups: list[Any]) -> int:
    """Return how many tokens of the service and of the cookbook differ in id, context, mask or log-probability."""
    wrong = 0
    for number, group in enumerate(groups):
        kept = [one for one in submitter.seen[group.task.instance["question"]] if one.reward is not None]
        ours = [token for one in kept for token in sampled_tokens(one)]
        theirs = [
            token
            for datum, place in zip(data, places, strict=True)
            if place["group_idx"] == number
            for token in trained_tokens(datum)
        ]
        wrong += abs(len(ours) - len(theirs))
        pairs = zip(sorted(ours), sorted(theirs), strict=False)
        wrong += sum(one[:2] != other[:2] or abs(one[2] - other[2]) > 1e-6 for one, other in pairs)
    return wrong


def main() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    warnings: list[str] = []
    logging.getLogger().addHandler(Recorder(warnings))
    tasks = rows(5)
    names = [str(task["instance"]["question"]) for task in tasks]
    plan = {names[0]: ["join"], names[1]: ["fail"], names[2]: ["fail"] * (GROUP_SIZE + 1)}
    submitter = PlannedSubmitter.from_environment(retries=1).planned(plan)
    strategy = rollout_strategy_from_config(ServiceStrategy())
    groups = [RolloutGroup(task, GROUP_SIZE, submitter) for task in tasks[:4]]
    assert all(isinstance(group, EnvGroupBuilder) for group in groups)
    assert pickle.loads(pickle.dumps((RolloutGroup(tasks[0], 2), strategy)))[0].task == groups[0].task
    set_rollout_executor(None)

    results = asyncio.run(collect(groups, strategy))
    counter = RolloutErrorCounter()
    for result in results:
        counter.ingest(result)
    kept = [(group, result) for group, result in zip(groups, results, strict=True) if result is not None]
    trajectories = [result for _, result in kept]
    advantages = compute_advantages(trajectories)
    _, places = assemble_training_data(trajectories, advantages)
    tags = [group.logging_tags() for group, _ in kept]
    data, metrics, _ = asyncio.run(
        prepare_minibatch(
            [group for group, _ in kept],
            trajectories,
            AutoTokenizer.from_pretrained(POLICY),
            kl_reference_client=None,
            kl_penalty_coef=0.0,
            kl_discount_factor=0.0,
        )
    )
    summaries = {"split": "train", "iteration": 0, "trajectory_groups_P": trajectories, "taglist_P": tags}
    json.dumps(serialize_rollout_summaries(**summaries))
    model = policy()
    gap, loss = loss_of(data, model)
    loss.backward()
    rewards = [[trajectory.transitions[-1].reward for trajectory in one.trajectories_G] for one in trajectories]
    for (group, _), got in zip(kept, rewards, strict=True):
        ours = [one.reward for one in submitter.seen[group.task.instance["question"]] if one.reward is not None]
        assert sorted(got) == sorted(ours)
    expected = [centered(one) for one in rewards]
    figures = {
        "groups": [result is not None for result in results],
        "datums": len(data),
        "rollouts": sum(len(one.trajectories_G) for one in trajectories),
        "segments": metrics["env/all/rollouts/segments"],
        "reward": metrics["env/all/reward/total"],
        "wrong_advantages": sum(
            abs(got - want) > 1e-6
            for one, other in zip(advantages, expected, strict=True)
            for got, want in zip(one.tolist(), other, strict=True)
        ),
        "wrong_tokens": wrong_tokens(data, places, submitter, [group for group, _ in kept]),
        "logprob_gap": gap,
        "loss": float(loss.detach()),
        "differs": any(len(set(one)) > 1 for one in rewards),
        "gradient": float(torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])),
        "errors": counter.get_metrics(),
        "warnings": [one for one in warnings if "no reward" in one],
        "evaluation": evaluate(tasks, strategy),
    }
    sys.stdout.write(json.dumps(figures) + "\n")


def evaluate(tasks: list[Any], strategy: Any) -> dict[str, Any]:
    """Return the figures of the cookbook's evaluator: two groups, of which one fails."""
    plan = {str(tasks[0]["instance"]["question"]): ["fail"] * 2}
    submitter = PlannedSubmitter.from_environment(retries=0).planned(plan)
    groups = [RolloutGroup(task, 1, submitter) for task in (tasks[0], tasks[4])]
    evaluator = RLTestSetEvaluator(Groups(groups), max_tokens=200, strategy=strategy)
    metrics = asyncio.run(evaluator.eval_token_completer(TokenCompleter()))
    (scored,) = submitter.seen[str(tasks[4]["instance"]["question"])]
    return {
        "reward": metrics["test/env/all/reward/total"],
        "expected": scored.reward,
        "episodes": metrics["test/env/all/total_episodes"],
        "skipped": metrics["test/rollout_errors/groups_skipped"],
        "errors": evaluator.last_result.num_errors,
    }


class Recorder(logging.Handler):
    """Keeps the messages of log lines."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.lines.append(record.getMessage())


if __name__ == "__main__":
    main()
