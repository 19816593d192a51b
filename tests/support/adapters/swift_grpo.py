"""Trains one step with ms-swift's own GRPO trainer over the adapter's routes, and prints figures as JSON.

ROLLOUT_URL=... python swift_grpo.py
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import uvicorn
from real_rollouts import POLICY, PlannedSubmitter, rows, sampled_tokens
from swift.infer_engine.protocol import RolloutInferRequest
from swift.pipelines import rlhf_main
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
from swift.rlhf_trainers.vllm_client import VLLMClient

from api_schemas.rollouts import Rollout
from rollout_client import SyncRolloutClient
from rollout_client.adapters import swift
from rollout_client.adapters.submit import parse_task

GROUP_SIZE = 4
GROUPS = 2


def served(submitter: PlannedSubmitter) -> int:
    """Serve the adapter's routes from a thread, and return their port."""
    config = uvicorn.Config(swift.make_app(submitter), host="127.0.0.1", port=0, log_level="warning")
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    return int(server.servers[0].sockets[0].getsockname()[1])


class Recorder:
    """Keeps what the trainer computes, by wrapping methods of swift's that return it."""

    def __init__(self, submitter: PlannedSubmitter) -> None:
        self.rollouts: list[list[list[Rollout]]] = []
        """The rollouts that each batch got, of which some have no reward, by group."""
        self.batches: list[dict[str, Any]] = []
        self.samples: list[Any] = []
        self.modes: list[str] = []
        score, prepare = GRPOTrainer._score_completions, GRPOTrainer._prepare_inputs

        def scored(trainer: Any, samples: list[Any]) -> list[Any]:
            self.samples.append(score(trainer, samples))
            self.rollouts.append([list(group) for group in submitter.seen.values()])
            submitter.seen.clear()
            return self.samples[-1]

        def prepared(trainer: Any, inputs: Any) -> Any:
            self.batches.append(prepare(trainer, inputs))
            self.modes.append("train" if trainer.model.training else "eval")
            return self.batches[-1]

        GRPOTrainer._score_completions = scored
        GRPOTrainer._prepare_inputs = prepared


def expected_advantages(groups: list[list[Rollout]]) -> dict[str, float]:
    """Return the advantage of each rollout, computed apart from swift: each rollout counts once."""
    expected = {}
    for rollouts in groups:
        kept = [one for one in rollouts if one.reward is not None]
        rewards = torch.tensor([one.reward for one in kept])
        scaled = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        expected |= {one.rollout_id: float(value) for one, value in zip(kept, scaled, strict=True)}
    return expected


def compare(recorder: Recorder) -> dict[str, Any]:
    """Return how swift's first batch compares with the rollouts that the service returned."""
    batch, samples, groups = recorder.batches[0], recorder.samples[0], recorder.rollouts[0]
    ids, grpo = batch["model_inputs"]["input_ids"], batch["grpo_batch"]
    width = grpo.completion_mask.shape[1]
    expected = expected_advantages(groups)
    theirs, wrong = [], 0
    for row, sample in enumerate(samples):
        mask = grpo.completion_mask[row]
        for place in mask.nonzero()[:, 0].tolist():
            at = ids.shape[1] - width + place
            context = tuple(ids[row, :at].tolist())
            theirs.append((context, int(ids[row, at]), float(grpo.rollout_per_token_logps[row, place])))
        advantage = grpo.advantages[row]
        wrong += bool(((advantage - expected[sample.rollout_infos["rollout_id"]]).abs() > 1e-3).any())
    ours = [token for each in groups for one in each if one.reward is not None for token in sampled_tokens(one)]
    gaps = (grpo.old_per_token_logps - grpo.rollout_per_token_logps)[grpo.completion_mask.bool()]
    pairs = zip(sorted(ours), sorted(theirs), strict=False)
    return {
        "samples": len(samples),
        "wrong_advantages": wrong,
        "wrong_tokens": abs(len(ours) - len(theirs))
        + sum(one[:2] != other[:2] or abs(one[2] - other[2]) > 1e-5 for one, other in pairs),
        "logprob_gap": float(gaps.abs().max()),
    }


def train(port: int, tasks: list[dict[str, Any]], folder: Path, *extra: str) -> Any:
    """Run swift's own command with one step."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in swift.rows(parse_task(task) for task in tasks)))
    count = str(GROUP_SIZE * GROUPS)
    flags = {
        "rlhf_type": "grpo",
        "model": str(POLICY),
        "model_type": "qwen3",
        "torch_dtype": "float32",
        "dataset": str(data),
        "val_dataset": str(data),
        "template": swift.TEMPLATE,
        "tuner_type": "full",
        "use_vllm": "true",
        "vllm_mode": "server",
        "vllm_server_host": "127.0.0.1",
        "vllm_server_port": str(port),
        "use_gym_env": "true",
        "num_generations": str(GROUP_SIZE),
        "per_device_train_batch_size": count,
        "per_device_eval_batch_size": count,
        "gradient_accumulation_steps": "1",
        "max_completion_length": "200",
        "max_steps": "1",
        "eval_strategy": "steps",
        "eval_steps": "1",
        "save_strategy": "no",
        "logging_steps": "1",
        "beta": "0",
        "learning_rate": "1e-4",
        "lr_scheduler_type": "constant",
        "warmup_ratio": "0",
        "report_to": "none",
        "output_dir": str(folder / "output"),
        "dataset_shuffle": "false",
        "load_from_cache_file": "false",
        "rollout_importance_sampling_mode": "token_truncate",
    }
    argv = [part for name, value in flags.items() for part in (f"--{name}", value)]
    return rlhf_main([*argv, *extra])


def refused(port: int, submitter: PlannedSubmitter, tasks: list[dict[str, Any]]) -> str:
    """Return what swift's own client says of a batch with a rollout that has no reward after all attempts."""
    question = str(tasks[0]["instance"]["question"])
    submitter.planned({question: ["fail"] * 2})
    client = VLLMClient(base_urls=[f"http://127.0.0.1:{port}"])
    (row,) = swift.rows([parse_task(tasks[0])])
    try:
        client.infer([RolloutInferRequest(messages=row["messages"], uuid="one")])
    except RuntimeError as error:
        return str(error)
    raise AssertionError("swift was given a rollout without a reward")


def main() -> None:
    folder = Path.cwd()
    tasks = rows(GROUPS)
    names = [str(task["instance"]["question"]) for task in tasks]
    submitter = PlannedSubmitter.from_environment(retries=1).planned({names[0]: ["join"], names[1]: ["fail"]})
    swift.install(weights=folder / "weights", submitter=submitter)
    recorder = Recorder(submitter)
    result = train(served(submitter), tasks, folder)
    history = {name: value for row in result["log_history"] for name, value in row.items()}
    evaluated = [one.reward for group in recorder.rollouts[1] for one in group]
    with SyncRolloutClient(os.environ["ROLLOUT_URL"]) as client:
        (backend,) = client.backends()
    figures = {
        **compare(recorder),
        "rewards": [[one.reward for one in group] for group in recorder.rollouts[0]],
        "reward": history["reward"],
        "grad_norm": history["grad_norm"],
        "modes": recorder.modes,
        "eval_reward": history["eval_reward"],
        "evaluated": evaluated,
        "versions": sorted({v for one in recorder.rollouts[1][0] for s in one.trajectory.segments for v in s.versions}),
        "weight_version": backend.weight_version,
        "refused": refused(served(submitter), submitter, tasks),
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
