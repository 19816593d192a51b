"""A Qwen3 checkpoint with random weights, in transformers' layout; it needs neither torch nor a network."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_BYTES = 256
END_TOKEN = "<|im_end|>"  # noqa: S105 - a token of the vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a random model."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 256
    experts: int = 0
    """Experts per layer, each of size `intermediate`; 0 for a dense model."""
    experts_per_token: int = 2
    vocab: int = 512
    context: int = 2048
    tied: bool = True
    std: float = 0.15
    """Standard deviation of the matrices; at 0.15 the model has clear preferences without being certain."""


def write_random_checkpoint(folder: Path, shape: Shape | None = None, *, seed: int = 0, dtype: str = "BF16") -> Path:
    """Write config, weights and a byte-level tokenizer into `folder`, which is created.

    The ids from 256 on are `<|im_end|>` (the end of a sequence) and unused special tokens. The row of `<|im_end|>` in
    the output layer is zero, so greedy decoding does not end by itself.
    """
    shape = shape or Shape()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": _BYTES}))
    rng = np.random.default_rng(seed)
    tensors = {name: _draw(rng, name, size, shape.std) for name, size in _tensor_shapes(shape).items()}
    tensors["model.embed_tokens.weight" if shape.tied else "lm_head.weight"][_BYTES] = 0
    (folder / "model.safetensors").write_bytes(_safetensors(tensors, dtype))
    _write_tokenizer(folder, shape)
    return folder


def _config(shape: Shape) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": _BYTES,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "rope_theta": 10_000.0,
        "tie_word_embeddings": shape.tied,
        "dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
    }
    return config | _experts_config(shape) if shape.experts else config


def _experts_config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.intermediate,
        "norm_topk_prob": True,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
    }


def _tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (shape.vocab, shape.hidden),
        "model.norm": (shape.hidden,),
    }
    for index in range(shape.layers):
        prefix = f"model.layers.{index}"
        shapes |= {
            f"{prefix}.input_layernorm": (shape.hidden,),
            f"{prefix}.post_attention_layernorm": (shape.hidden,),
            f"{prefix}.self_attn.q_proj": (queries, shape.hidden),
            f"{prefix}.self_attn.k_proj": (keys, shape.hidden),
            f"{prefix}.self_attn.v_proj": (keys, shape.hidden),
            f"{prefix}.self_attn.o_proj": (shape.hidden, queries),
            f"{prefix}.self_attn.q_norm": (shape.head_dim,),
            f"{prefix}.self_attn.k_norm": (shape.head_dim,),
        }
        for mlp in _mlps(shape, prefix):
            shapes |= {
                f"{mlp}.gate_proj": (shape.intermediate, shape.hidden),
                f"{mlp}.up_proj": (shape.intermediate, shape.hidden),
                f"{mlp}.down_proj": (shape.hidden, shape.intermediate),
            }
        if shape.experts:
            shapes[f"{prefix}.mlp.gate"] = (shape.experts, shape.hidden)
    if not shape.tied:
        shapes["lm_head"] = (shape.vocab, shape.hidden)
    return {f"{name}.weight": size for name, size in shapes.items()}


def _mlps(shape: Shape, prefix: str) -> list[str]:
    if not shape.experts:
        return [f"{prefix}.mlp"]
    return [f"{prefix}.mlp.experts.{number}" for number in range(shape.experts)]


def _draw(rng: np.random.Generator, name: str, size: tuple[int, ...], std: float) -> NDArray[np.float32]:
    noise = rng.standard_normal(size, dtype=np.float32) * np.float32(std)
    return noise + 1 if "norm" in name else noise


def _safetensors(tensors: dict[str, NDArray[np.float32]], dtype: str) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, tensor in tensors.items():
        raw = _encode(tensor, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(data)


def _encode(tensor: NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "BF16":
        return (tensor.view(np.uint32) >> 16).astype("<u2").tobytes()
    return tensor.astype({"F16": "<f2", "F32": "<f4"}[dtype]).tobytes()


def _write_tokenizer(folder: Path, shape: Shape) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    unused = [f"<|unused_{i}|>" for i in range(shape.vocab - _BYTES - 1)]
    tokenizer.add_special_tokens([END_TOKEN, *unused])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_TOKEN, "pad_token": END_TOKEN}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
