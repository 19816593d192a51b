"""Recomputes logprobs with transformers, in float32: run with the Python of SGLang's environment, which has torch.

Reads `{"model": folder, "sequences": [{"prompt": ids, "output": ids, "temperature": t}]}` from standard input and
writes, for each sequence, the logprob of every output id under the temperature-scaled distribution.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    order = json.load(sys.stdin)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        order["model"], dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    with torch.inference_mode():
        logprobs = [recompute(model, **sequence) for sequence in order["sequences"]]
    json.dump(logprobs, sys.stdout)


def recompute(model, prompt: list[int], output: list[int], temperature: float) -> list[float]:
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    scaled = torch.log_softmax(logits / temperature, dim=-1)
    return scaled[torch.arange(len(output)), torch.tensor(output)].tolist()


if __name__ == "__main__":
    main()
