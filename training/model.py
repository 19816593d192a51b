"""The tiny Qwen3 model: its shape, its loss, and its checkpoints, which every engine can read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch.nn import functional

from training.examples import Example
from training.tokenizer import MAX_POSITIONS

ROPE_THETA = 10_000.0
PAD_ID, STOP_ID = 0, 2  # <|endoftext|> and <|im_end|>


def new_model(vocab_size: int = 512, *, width: int = 128, layers: int = 4) -> transformers.Qwen3ForCausalLM:
    """Return a new model; with 512 pieces, it has 853,632 parameters."""
    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=STOP_ID,
        pad_token_id=PAD_ID,
        attn_implementation="eager",  # faster on a CPU than the fused kernel for sequences this short
    )
    return transformers.Qwen3ForCausalLM(config)


def load_model(folder: Path) -> transformers.Qwen3ForCausalLM:
    model: transformers.Qwen3ForCausalLM = transformers.Qwen3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model


def sampled_logprobs(model: transformers.Qwen3ForCausalLM, batch: Sequence[Example]) -> torch.Tensor:
    """Return the log-probabilities of all tokens to learn, as one vector.

    A prefix that all examples share is computed once. Its cache is shared, and carries the gradients of all rows.
    """
    shared = _shared_prefix(batch)
    length = max(len(example.token_ids) for example in batch)
    ids = torch.full((len(batch), length), PAD_ID)
    mask = torch.zeros((len(batch), length), dtype=torch.bool)
    for row, example in enumerate(batch):
        ids[row, : len(example.token_ids)] = torch.tensor(example.token_ids)
        mask[row, : len(example.loss_mask)] = torch.tensor(example.loss_mask, dtype=torch.bool)
    cache = transformers.DynamicCache(config=model.config)
    model.model(input_ids=ids[:1, :shared], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(batch))
    hidden = model.model(input_ids=ids[:, shared:-1], past_key_values=cache, use_cache=True).last_hidden_state
    learned = mask[:, shared + 1 :]
    logits = model.lm_head(hidden[learned]).float()
    return -functional.cross_entropy(logits, ids[:, shared + 1 :][learned], reduction="none")


def save_checkpoint(model: transformers.Qwen3ForCausalLM, tokenizer: Path, folder: Path) -> None:
    """Write bfloat16 weights, the tokenizer and settings that transformers 4 and 5, SGLang and vLLM read."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if tokenizer.resolve() != folder.resolve():
            shutil.copy(tokenizer / name, folder / name)
    (folder / "model.safetensors").chmod(0o644)
    config = model.config.to_diff_dict() | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # transformers 4
        "rope_theta": ROPE_THETA,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": True,
        "bos_token_id": None,
    }
    # Plain sampling: without such a file, an engine falls back to top_k = 50, which is off-policy.
    generation = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "eos_token_id": STOP_ID,
        "pad_token_id": PAD_ID,
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def _shared_prefix(batch: Sequence[Example]) -> int:
    """Return how many leading tokens all examples share, all of them before the first token to learn."""
    first, last = min(example.token_ids for example in batch), max(example.token_ids for example in batch)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return max(1, min(same, *(example.loss_mask.index(1) - 1 for example in batch)))
