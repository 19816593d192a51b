"""The Qwen3 forward pass in float32.

Pre-norm transformer with grouped-query attention, RMS norms on queries and keys, rotary positions, SwiGLU (Qwen3
technical report, arXiv 2505.09388). One function serves prefill (one sequence, many positions) and decode (many
sequences, one position each): sequences have neighboring slots of the KV store, so a batch is a view of it.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollout_service.engines.kinds.embedded.weights import (
    Array,
    ModelConfig,
    ModelError,
    read_config,
    read_tensors,
)

Ids = NDArray[np.int64]
_MASKED = np.float32(-1e30)
_FIRST_CAPACITY = 2048  # costs only address space: pages that were never written take no memory


class KVStore:
    """Keys and values of the running sequences: `[layers, slots, kv_heads, positions, head_dim]`, float32.

    Positions are added as sequences grow. Values beyond a sequence's length are stale but finite, and masked.
    """

    def __init__(self, config: ModelConfig, slots: int, *, capacity: int = _FIRST_CAPACITY) -> None:
        self._limit = config.context_length
        self._shape = (
            config.layers,
            slots,
            config.kv_heads,
            min(capacity, self._limit),
            config.head_dim,
        )
        self.keys: Array = np.zeros(self._shape, np.float32)
        self.values: Array = np.zeros(self._shape, np.float32)

    def reserve(self, length: int) -> None:
        capacity = self.keys.shape[3]
        if length <= capacity:
            return
        while capacity < length:
            capacity *= 2
        self.keys = _widen(self.keys, min(capacity, self._limit))
        self.values = _widen(self.values, min(capacity, self._limit))

    def move(self, source: int, target: int, length: int) -> None:
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def read(self, slot: int, start: int, stop: int) -> tuple[Array, Array]:
        """Return copies: `[layers, kv_heads, positions, head_dim]`."""
        return self.keys[:, slot, :, start:stop].copy(), self.values[:, slot, :, start:stop].copy()

    def write(self, slot: int, start: int, keys: Array, values: Array) -> None:
        stop = start + keys.shape[2]
        self.reserve(stop)
        self.keys[:, slot, :, start:stop] = keys
        self.values[:, slot, :, start:stop] = values


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer, as `[inputs, outputs]`."""

    input_norm: Array
    qkv: Array
    query_norm: Array
    key_norm: Array
    output: Array
    mlp_norm: Array
    gate_up: Array
    down: Array


class Qwen3:
    """A model that is ready to run.

    Raises:
        ModelError: The folder does not hold a Qwen3 model, or tensors are missing or have the wrong shape.
    """

    def __init__(self, folder: Path) -> None:
        self.config = config = read_config(folder)
        tensors = _Tensors(folder)
        self._embedding = tensors.take("model.embed_tokens", config.vocab_size, config.hidden_size)
        self._layers = [_read_layer(tensors, config, index) for index in range(config.layers)]
        self._final_norm = tensors.take("model.norm", config.hidden_size)
        head = (
            self._embedding
            if config.tied_embeddings
            else tensors.take("lm_head", config.vocab_size, config.hidden_size)
        )
        self._head = np.ascontiguousarray(head.T)
        self._cosines, self._sines = _rotations(config)

    def forward(self, ids: Ids, positions: Ids, store: KVStore, slot: int, *, every_position: bool = False) -> Array:
        """Run `ids` of the sequences in slots `slot` to `slot + len(ids)` and store their KV.

        `ids` and `positions` are `[sequences, count]`; everything before the positions is in `store`.

        Returns:
            Logits after each sequence's last id: `[sequences, vocab_size]`, float32; with `every_position`, after each:
            `[sequences, count, vocab_size]`.
        """
        length = int(positions.max()) + 1
        store.reserve(length)
        cosines, sines = self._cosines[positions][:, :, None], self._sines[positions][:, :, None]
        hidden_from = np.arange(length) > positions[:, :, None]
        mask = np.where(hidden_from, _MASKED, np.float32(0))
        hidden = self._embedding[ids]
        for index, layer in enumerate(self._layers):
            hidden += self._attention(index, layer, hidden, positions, (cosines, sines), mask, store, slot)
            hidden += self._mlp(layer, hidden)
        wanted = hidden if every_position else hidden[:, -1]
        return np.asarray(_rms_norm(wanted, self._final_norm, self.config.rms_norm_eps) @ self._head)

    def _attention(
        self,
        index: int,
        layer: _Layer,
        hidden: Array,
        positions: Ids,
        rotation: tuple[Array, Array],
        mask: Array,
        store: KVStore,
        slot: int,
    ) -> Array:
        config = self.config
        batch, count, _ = hidden.shape
        groups = config.heads // config.kv_heads
        projected = _rms_norm(hidden, layer.input_norm, config.rms_norm_eps) @ layer.qkv
        projected = projected.reshape(batch, count, config.heads + 2 * config.kv_heads, config.head_dim)
        queries, keys, values = np.split(projected, (config.heads, config.heads + config.kv_heads), axis=2)
        queries = _rotate(_rms_norm(queries, layer.query_norm, config.rms_norm_eps), *rotation)
        rows = np.arange(slot, slot + batch)[:, None]
        store.keys[index][rows, :, positions] = _rotate(_rms_norm(keys, layer.key_norm, config.rms_norm_eps), *rotation)
        store.values[index][rows, :, positions] = values
        length = mask.shape[-1]
        past_keys = store.keys[index, slot : slot + batch, :, :length]
        past_values = store.values[index, slot : slot + batch, :, :length]
        # The query heads that share a KV head become rows of one matrix product.
        queries = queries.reshape(batch, count, config.kv_heads, groups, config.head_dim)
        queries = queries.transpose(0, 2, 3, 1, 4).reshape(batch, config.kv_heads, groups * count, config.head_dim)
        scores = queries @ past_keys.swapaxes(-1, -2)
        scores *= np.float32(config.head_dim**-0.5)
        grouped = scores.reshape(batch, config.kv_heads, groups, count, length)
        grouped += mask[:, None, None]
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = (scores @ past_values) / scores.sum(axis=-1, keepdims=True)
        mixed = mixed.reshape(batch, config.kv_heads, groups, count, config.head_dim)
        return np.asarray(mixed.transpose(0, 3, 1, 2, 4).reshape(batch, count, -1) @ layer.output)

    def _mlp(self, layer: _Layer, hidden: Array) -> Array:
        projected = _rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps) @ layer.gate_up
        gate, up = np.split(projected, 2, axis=-1)
        with np.errstate(over="ignore"):  # exp(-gate) may be infinite; the quotient is then zero, rightly
            activated = gate / (1 + np.exp(-gate))
        return np.asarray((activated * up) @ layer.down)


class _Tensors:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors = read_tensors(folder)

    def take(self, name: str, *shape: int) -> Array:
        tensor = self._tensors.get(f"{name}.weight")
        if tensor is None:
            raise ModelError(f"{self._folder} has no tensor {name}.weight")
        if tensor.shape != shape:
            raise ModelError(f"{name}.weight has shape {tensor.shape}, not {shape}")
        return tensor


def _read_layer(tensors: _Tensors, config: ModelConfig, index: int) -> _Layer:
    prefix = f"model.layers.{index}"
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return _Layer(
        input_norm=tensors.take(f"{prefix}.input_layernorm", hidden),
        qkv=_stack(
            tensors.take(f"{attention}.q_proj", queries, hidden),
            tensors.take(f"{attention}.k_proj", keys, hidden),
            tensors.take(f"{attention}.v_proj", keys, hidden),
        ),
        query_norm=tensors.take(f"{attention}.q_norm", config.head_dim),
        key_norm=tensors.take(f"{attention}.k_norm", config.head_dim),
        output=_stack(tensors.take(f"{attention}.o_proj", hidden, queries)),
        mlp_norm=tensors.take(f"{prefix}.post_attention_layernorm", hidden),
        gate_up=_stack(tensors.take(f"{mlp}.gate_proj", inner, hidden), tensors.take(f"{mlp}.up_proj", inner, hidden)),
        down=_stack(tensors.take(f"{mlp}.down_proj", hidden, inner)),
    )


def _stack(*matrices: Array) -> Array:
    return np.ascontiguousarray(np.concatenate(matrices).T)


def _widen(array: Array, capacity: int) -> Array:
    layers, slots, heads, used, width = array.shape
    wider = np.zeros((layers, slots, heads, capacity, width), np.float32)
    wider[:, :, :, :used] = array
    return wider


def _rotations(config: ModelConfig) -> tuple[Array, Array]:
    """Return cosines and sines of every position, `[context_length, head_dim]` each."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies: Array = np.power(np.float32(config.rope_theta), -exponents)
    angles_of_half = np.arange(config.context_length, dtype=np.float32)[:, None] * frequencies
    angles = np.concatenate([angles_of_half, angles_of_half], axis=-1)
    return np.cos(angles), np.sin(angles)


def _rotate(vectors: Array, cosines: Array, sines: Array) -> Array:
    half = vectors.shape[-1] // 2
    turned: Array = np.concatenate([-vectors[..., half:], vectors[..., :half]], axis=-1)
    return np.asarray(vectors * cosines + turned * sines)


def _rms_norm(vectors: Array, weight: Array, eps: float) -> Array:
    squares = np.einsum("...i,...i->...", vectors, vectors)[..., None]
    return np.asarray(vectors * (weight / np.sqrt(squares / np.float32(vectors.shape[-1]) + np.float32(eps))))
