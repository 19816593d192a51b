"""The trainer's policy, which is any causal language model of transformers, and the log-probabilities of samples.

Guarantee: `sampled_logprobs` returns one entry for each sampled token, in the order of the samples and at the
temperature of the sampling. The entries line up with `Sample.behavior` of the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from rollout_client.arrays import BatchArrays

PAD = 0
"""The padding after shorter samples. Attention is causal, so no token that counts attends to it."""


@dataclass(frozen=True, slots=True)
class Support:
    """Tokens that might have been sampled in the places of sampled ones, and whether they should have been."""

    places: NDArray[np.int64]
    """Each one's place, as a number among the sample's own tokens."""
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    """By the trainer's weights at the beginning of the step."""
    advantages: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sample:
    """One segment of a rollout, and the advantages of its tokens."""

    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    """True for each token that was sampled and is to be trained on."""
    behavior: NDArray[np.float32]
    """The engine's log-probabilities of the sampled tokens only."""
    versions: NDArray[np.int32]
    """The version of the weights that sampled each of these tokens."""
    advantages: NDArray[np.float32]
    """Of these tokens; all the same if the rollout has one advantage."""
    support: Support | None = None


def samples_of(arrays: BatchArrays) -> list[Sample]:
    """Return the segments of a batch to learn from: those of usable samples with an advantage other than 0."""
    tensors = arrays.tensors
    found = []
    for number, advantage in enumerate(tensors["advantages"]):
        if not tensors["usable"][number] or np.isnan(advantage) or advantage == 0.0:
            continue
        for segment in range(*tensors["sample_offsets"][number : number + 2]):
            columns = arrays.segment(segment)
            mask = columns["loss_mask"].astype(bool)
            if mask.any():
                chosen = (columns["logprobs"][mask], columns["versions"][mask])
                advantages = np.full(mask.sum(), advantage, np.float32)
                found.append(Sample(columns["token_ids"], mask, *chosen, advantages))
    return found


def load_policy(folder: Path) -> Any:
    """Load a model in float32. Eager attention is the fastest on a CPU for samples as short as these."""
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def sampled_logprobs(model: Any, samples: Sequence[Sample], temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the sampled tokens, and the entropies of the distributions at them."""
    log_shares, sampled = distributions(model, samples, temperature)
    with torch.no_grad():
        entropies = -(log_shares.exp() * log_shares).sum(-1)
    return log_shares.gather(-1, sampled.unsqueeze(-1)).squeeze(-1), entropies


def distributions(model: Any, samples: Sequence[Sample], temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the whole vocabulary at each sampled token, and the ids of these tokens.

    A prefix that all samples share, such as the system prompt, is computed once; its cache carries the gradients of all
    rows.
    """
    shared = _shared_prefix(samples)
    width = max(len(sample.token_ids) for sample in samples)
    ids = torch.full((len(samples), width), PAD)
    mask = torch.zeros((len(samples), width), dtype=torch.bool)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.token_ids)] = torch.from_numpy(sample.token_ids.astype(np.int64))
        mask[row, : len(sample.mask)] = torch.from_numpy(sample.mask)
    cache = transformers.DynamicCache(config=model.config)
    if shared:
        model.model(input_ids=ids[:1, :shared], past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(samples))
    hidden = model.model(input_ids=ids[:, shared:-1], past_key_values=cache, use_cache=True).last_hidden_state
    sampled = mask[:, shared + 1 :]
    log_shares = torch.log_softmax(model.lm_head(hidden[sampled]).float() / temperature, dim=-1)
    return log_shares, ids[:, shared + 1 :][sampled]


def portions(samples: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    """Yield the samples in portions of similar lengths, which need little padding."""
    ordered = sorted(samples, key=lambda sample: len(sample.token_ids))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def _shared_prefix(samples: Sequence[Sample]) -> int:
    """Return how many leading tokens all samples share, at most up to the last one before a sampled token."""
    shared = min(int(sample.mask.argmax()) - 1 for sample in samples)
    head = samples[0].token_ids[:shared]
    for sample in samples[1:]:
        differs = np.flatnonzero(head != sample.token_ids[: len(head)])
        head = head[: differs[0]] if differs.size else head
    return len(head)
