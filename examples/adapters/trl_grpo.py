"""Train with TRL's own GRPOTrainer on rollouts from the service, through TRL's rollout hook and without changes to TRL.

    scripts/install-trainers                                    # TRL and others on a CPU, in .venv-trainers
    .venv/bin/rollout-service serve --model calc-base      # a policy that solves half of its tasks
    .venv-trainers/bin/python examples/adapters/trl_grpo.py     # trains it, and prints the reward before and after

Both rewards are measured on held-out tasks. `--json FILE` writes the figures.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import mean

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from api_schemas.tasks import Task
from rollout_client.adapters.samples import samples_of
from rollout_client.adapters.submit import RolloutSubmitter
from rollout_client.adapters.trl import RolloutHook, rows, service_reward

DATASET_LIMIT = 10_000
"""The most instances that the service returns at once."""
POLICY = Path(__file__).parents[2] / "rollout_service" / "engines" / "checkpoints" / "calc-base"


def tasks_of(submitter: RolloutSubmitter, split: str, limit: int) -> list[Task]:
    """Return tasks that ship with the environment `calc`."""
    instances = submitter.blocking(lambda client: client.dataset("calc", limit=DATASET_LIMIT))
    chosen = [one for one in instances if one["split"] == split][:limit]
    return [Task(environment="calc", instance=one) for one in chosen]


def reward_of(submitter: RolloutSubmitter, tasks: list[Task]) -> float:
    """Return the mean reward of the policy that the engines serve now."""
    rollouts = submitter.run_all_blocking([submitter.request(task) for task in tasks])
    return mean(rollout.reward for rollout in rollouts if rollout.reward is not None)


def logprob_gap(submitter: RolloutSubmitter, trainer: GRPOTrainer, tasks: list[Task]) -> float:
    """Return the largest difference between the engine's logprobs of sampled tokens and the trainer's own."""
    rollouts = submitter.run_all_blocking([submitter.request(task) for task in tasks])
    gaps = [0.0]
    for sample in [sample for rollout in rollouts for sample in samples_of(rollout)]:
        ids = torch.tensor([sample.token_ids])
        with torch.no_grad():
            scores = trainer.model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        computed = scores[len(sample.prompt_ids) - 1 :].tolist()
        both = zip(sample.response_mask, sample.logprobs, computed, strict=True)
        gaps += [abs(served - ours) for mask, served, ours in both if mask]
    return max(gaps)


def trainer_of(arguments: argparse.Namespace, hook: RolloutHook, tasks: list[Task], folder: str) -> GRPOTrainer:
    """Return TRL's trainer. All settings are TRL's own; only the last two arguments concern the service."""
    args = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=arguments.groups * arguments.group_size,
        num_generations=arguments.group_size,
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        adam_beta2=0.98,
        max_completion_length=512,
        temperature=1.0,
        beta=0.0,
        scale_rewards="none",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        seed=arguments.seed,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        args=args,
        train_dataset=Dataset.from_list(rows(tasks)),
        reward_funcs=service_reward,
        rollout_func=hook,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="the service; default ROLLOUT_URL, or port 8080 of this machine")
    parser.add_argument("--model", default=POLICY, help="the folder of the policy that the service serves")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=512, help="tasks to learn from")
    parser.add_argument("--groups", type=int, default=8, help="tasks in a batch")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--held-out", type=int, default=64, help="tasks before and after")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()

    submitter = RolloutSubmitter.from_environment(**({"url": arguments.url} if arguments.url else {}))
    held_out = tasks_of(submitter, "held_out", arguments.held_out)
    with tempfile.TemporaryDirectory() as folder:
        hook = RolloutHook(submitter, weights=Path(folder) / "weights")
        trainer = trainer_of(arguments, hook, tasks_of(submitter, "train", arguments.tasks), folder)
        hook.weights.push(0, trainer.save_model)  # the hook does this too, but after `before` is measured
        before, wall, cpu = reward_of(submitter, held_out), time.monotonic(), time.process_time()
        trainer.train()
        seconds, cpu_seconds = time.monotonic() - wall, time.process_time() - cpu
        hook.weights.push(trainer.state.global_step, trainer.save_model)  # the weights after the last step
        after = reward_of(submitter, held_out)
        gap = logprob_gap(submitter, trainer, held_out[:8])
    steps = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    failed = [entry["rollouts/failed"] for entry in trainer.state.log_history if "rollouts/failed" in entry]
    figures = {
        "held_out_before": before,
        "held_out_after": after,
        "training_rewards": steps,
        "logprob_gap": gap,
        "failed": max(failed),
        "weight_version": hook.weights.version,
        "rollouts": len(steps) * arguments.groups * arguments.group_size,
        "seconds": round(seconds, 1),
        "trainer_cpu_seconds": round(cpu_seconds, 1),
    }
    print(f"held-out reward: {before:.3f} -> {after:.3f} in {arguments.steps} steps and {seconds:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
