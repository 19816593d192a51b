"""Computes the experts to which transformers routes tokens, in float32: run with the Python of SGLang's environment.

Reads `{"model": folder, "ids": ids}` from standard input and writes `[tokens, layers, experts per token]`, sorted.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def main() -> None:
    order = json.load(sys.stdin)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32)
    model.eval()
    with torch.inference_mode():
        logits = model(torch.tensor([order["ids"]]), output_router_logits=True).router_logits
    chosen = [layer.topk(model.config.num_experts_per_tok, dim=-1).indices for layer in logits]
    json.dump(torch.stack(chosen, dim=1).sort(dim=-1).values.tolist(), sys.stdout)


if __name__ == "__main__":
    main()
