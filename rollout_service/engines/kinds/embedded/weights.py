"""Model folders as transformers writes them: `config.json` and safetensors, read into float32 arrays.

Format of safetensors: 8 bytes little-endian header length, a JSON header of names to dtype, shape and byte range,
then the bytes (https://github.com/huggingface/safetensors).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

_LENGTH_BYTES = 8
_PLAIN_DTYPES: dict[str, np.dtype[np.floating[Any]]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4")}


class ModelError(ValueError):
    """A model folder cannot be served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    eos_token_ids: frozenset[int]


def read_config(folder: Path) -> ModelConfig:
    """Read `config.json`, and `generation_config.json` for the ids that end a sequence.

    Raises:
        ModelError: A file is missing or malformed, or the architecture is not one that this engine runs.
    """
    raw = _read_json(folder / "config.json")
    _refuse_unsupported(raw)
    generation = folder / "generation_config.json"
    eos = (_read_json(generation) if generation.exists() else raw).get("eos_token_id", raw.get("eos_token_id"))
    rope = raw.get("rope_parameters") or {}
    try:
        return ModelConfig(
            hidden_size=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            kv_heads=raw["num_key_value_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            intermediate_size=raw["intermediate_size"],
            vocab_size=raw["vocab_size"],
            context_length=raw["max_position_embeddings"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0))),
            tied_embeddings=raw.get("tie_word_embeddings", False),
            eos_token_ids=frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos]),
        )
    except KeyError as error:
        raise ModelError(f"{folder}/config.json has no {error}") from error


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("architectures") != ["Qwen3ForCausalLM"]:
        raise ModelError(
            f"the embedded engine runs Qwen3ForCausalLM only, not {raw.get('architectures')}; "
            "serve this model with SGLang"
        )
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    unsupported = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(raw.get("attention_bias")),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "rope_parameters": rope.get("rope_type", "default") != "default",
    }
    for name, is_unsupported in unsupported.items():
        if is_unsupported:
            raise ModelError(f"the embedded engine does not run {name} = {raw.get(name)!r}; serve it with SGLang")


def read_tensors(folder: Path) -> dict[str, Array]:
    """Read the safetensors files of a folder, as float32.

    Raises:
        ModelError: There are no such files, or one is malformed.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"there are no safetensors files in {folder}")
    tensors: dict[str, Array] = {}
    for file in files:
        try:
            tensors.update(_read_file(file))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{file} is not a readable safetensors file: {error}") from error
    return tensors


def _read_file(file: Path) -> dict[str, Array]:
    with file.open("rb") as stream:
        header_length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if header_length > file.stat().st_size:
            raise ValueError("its header is longer than the file")
        header = json.loads(stream.read(header_length))
    data = np.memmap(file, dtype=np.uint8, mode="r", offset=_LENGTH_BYTES + header_length)
    return {
        name: _to_float32(data[slice(*entry["data_offsets"])], entry["dtype"]).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _to_float32(raw: NDArray[np.uint8], dtype: str) -> Array:
    if dtype == "BF16":  # the upper half of a float32
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype not in _PLAIN_DTYPES:
        raise ValueError(f"dtype {dtype} is not one of BF16, {', '.join(_PLAIN_DTYPES)}")
    return raw.view(_PLAIN_DTYPES[dtype]).astype(np.float32)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object")
    return value
