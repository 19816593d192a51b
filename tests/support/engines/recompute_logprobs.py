"""Recomputes logprobs with transformers, in float32: run with the Python of SGLang's environment, which has torch.

Reads `{"model": folder, "sequences": [{"prompt": ids, "output": ids, "temperature": t}]}` from standard input and
writes, for each sequence, the logprob of every output id under the temperature-scaled distribution. For a list of such
objects it writes a list of such results.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def main() -> None:
    orders = json.load(sys.stdin)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    answers = [answer(order) for order in orders] if isinstance(orders, list) else answer(orders)
    json.dump(answers, sys.stdout)


def answer(order: dict) -> list[list[float]]:
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32, attn_implementation="eager")
    model.eval()
    with torch.inference_mode():
        return [recompute(model, **sequence) for sequence in order["sequences"]]


def recompute(model, prompt: list[int], output: list[int], temperature: float) -> list[float]:
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    scaled = torch.log_softmax(logits / temperature, dim=-1)
    return scaled[torch.arange(len(output)), torch.tensor(output)].tolist()


if __name__ == "__main__":
    main()
