"""Train the tiny policies on examples: `python -m training.train --out FOLDER [--task parl|live]`.

This writes the tokenizer, and a checkpoint at every evaluation. The last one of `calc` is `calc-tuned`; after further
training with `--guesses`, it is `calc-base`. That of `parl` is `parl-base` after further training with few `--serial`
and `--wide`. That of `live` is `live-base`. Each takes some minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import transformers

from training.calc import CalcTask
from training.examples import TrainingTask
from training.live.task import LiveTask
from training.model import load_model, new_model, sampled_logprobs, save_checkpoint
from training.parl.scripts import Mixture
from training.parl.task import ParlTask


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    task = _task(arguments)
    tokenizer = arguments.start or arguments.out / "tokenizer"
    model = load_model(arguments.start) if arguments.start else _new(task, tokenizer, arguments)
    train(task, model, tokenizer, arguments)


def train(
    task: TrainingTask, model: transformers.Qwen3ForCausalLM, tokenizer: Path, arguments: argparse.Namespace
) -> None:
    """Train with AdamW, a warm-up and a cosine schedule; the loss covers only the policy's own tokens."""
    optimizer = _optimizer(model, arguments.lr)
    batches = task.batches(tokenizer, 1000 + arguments.seed, arguments.batch)
    began, average = time.monotonic(), 0.0
    for step in range(1, arguments.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * _schedule(step, arguments.warm_up, arguments.steps)
        model.train()
        with torch.autocast("cpu", torch.bfloat16):  # the weights themselves stay float32
            loss = -sampled_logprobs(model, next(batches)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average = loss.item() if step == 1 else 0.95 * average + 0.05 * loss.item()
        if step % arguments.every == 0 or step == arguments.steps:
            folder = arguments.out / f"step-{step}"
            save_checkpoint(model, tokenizer, folder)
            report = {"step": step, "loss": round(average, 4), "seconds": round(time.monotonic() - began)}
            print(json.dumps(report | task.evaluate(folder, arguments.problems)), flush=True)


def _new(task: TrainingTask, tokenizer: Path, arguments: argparse.Namespace) -> transformers.Qwen3ForCausalLM:
    return new_model(task.build_tokenizer(tokenizer), width=arguments.width, layers=arguments.layers)


def _task(arguments: argparse.Namespace) -> TrainingTask:
    if arguments.task == "calc":
        return CalcTask(arguments.guesses)
    if arguments.task == "live":
        return LiveTask()
    return ParlTask(Mixture(serial=arguments.serial, wide=arguments.wide))


def _schedule(step: int, warm_up: int, steps: int) -> float:
    return min(1.0, step / warm_up) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def _optimizer(model: transformers.Qwen3ForCausalLM, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer with weight decay on the matrices only."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=("calc", "parl", "live"), default="calc")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="a checkpoint to train further")
    parser.add_argument("--width", type=int, default=128, help="of a new model")
    parser.add_argument("--layers", type=int, default=4, help="of a new model")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--problems", type=int, default=96, help="problems of an evaluation")
    parser.add_argument("--guesses", type=float, default=0.0, help="calc: the share that answers without the tool")
    parser.add_argument("--serial", type=float, default=0.2, help="parl: the share that assigns one task a turn")
    parser.add_argument("--wide", type=float, default=0.3, help="parl: the share that assigns several a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
