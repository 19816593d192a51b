"""Train the tiny policies on examples: `python -m training.train --out FOLDER`.

This writes the tokenizer, and a checkpoint at every evaluation. The last one is `calc-tuned`; after further training
with `--guesses`, it is `calc-base`. It takes about five minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import transformers

from rollout_service.environments.builtin.calc.problems import sample_problems
from rollout_service.tokens import ChatRenderer
from training.data import Examples
from training.model import load_model, new_model, sampled_logprobs, save_checkpoint
from training.prompts import CALC_SETUP
from training.rollouts import roll_out
from training.tokenizer import build_tokenizer


def main() -> None:
    """Train, and print a line of JSON at every evaluation."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = arguments.start or arguments.out / "tokenizer"
    if not arguments.start:
        build_tokenizer(tokenizer)
    model = load_model(arguments.start) if arguments.start else new_model()
    train(model, tokenizer, arguments)


def train(model: transformers.Qwen3ForCausalLM, tokenizer: Path, arguments: argparse.Namespace) -> None:
    """Train with AdamW, a warm-up and a cosine schedule; the loss covers only the policy's own tokens."""
    optimizer = _optimizer(model, arguments.lr)
    batches = Examples(tokenizer, 1000 + arguments.seed, guesses=arguments.guesses).batches(arguments.batch)
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
            print(json.dumps(report | evaluate(folder, arguments.problems)), flush=True)


def evaluate(folder: Path, count: int) -> dict[str, float]:
    """Return the success on held-out problems, with the checkpoint as it was written."""
    model, renderer = load_model(folder), ChatRenderer.load(folder)
    problems = sample_problems(7, count, held_out=True)
    shares = {}
    for name, temperature in (("greedy", 0.0), ("temperature_1", 1.0)):
        attempts = roll_out(model, renderer, CALC_SETUP, problems, temperature)
        shares[name] = round(sum(attempt.success for attempt in attempts) / count, 3)
    return shares


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
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="a checkpoint to train further")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--problems", type=int, default=96, help="problems of an evaluation")
    parser.add_argument("--guesses", type=float, default=0.0, help="share that answers without the tool")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
