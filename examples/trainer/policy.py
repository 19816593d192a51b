"""The policy as the trainer sees it: any causal language model of transformers, and the log-probabilities of samples.

Guarantee: `sampled_logprobs` gives one entry for each token that a policy sampled, in the order of the samples, under
the temperature that it was sampled at; so its entries stand beside `Sample.behaviour` of the same samples.
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
"""Stands behind the end of shorter samples; attention is causal, so nothing that counts looks at it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One segment of a rollout, and what to make of it."""

    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    """Where a token was sampled, and is to be trained on."""
    behaviour: NDArray[np.float32]
    """The engine's log-probabilities, of the sampled tokens alone."""
    versions: NDArray[np.int32]
    """The weights that sampled each of them."""
    advantage: float


def samples_of(arrays: BatchArrays) -> list[Sample]:
    """The segments of a batch that have something to teach: scored, better or worse than their group."""
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
                found.append(Sample(columns["token_ids"], mask, *chosen, float(advantage)))
    return found


def load_policy(folder: Path) -> Any:
    """A model in float32; eager attention is the fastest on a CPU for samples as short as these."""
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def sampled_logprobs(model: Any, samples: Sequence[Sample], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the sampled tokens, and the entropies of the distributions that they were drawn from.

    What all samples begin with, as the system prompt, is run once; its cache carries the gradients of all rows.
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
    chosen = log_shares.gather(-1, ids[:, shared + 1 :][sampled].unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        entropies = -(log_shares.exp() * log_shares).sum(-1)
    return chosen, entropies


def portions(samples: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    """The samples in portions of similar lengths, so that little is padded."""
    ordered = sorted(samples, key=lambda sample: len(sample.token_ids))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def _shared_prefix(samples: Sequence[Sample]) -> int:
    """How many leading tokens all samples share, and before the last one that is not sampled."""
    shared = min(int(sample.mask.argmax()) - 1 for sample in samples)
    head = samples[0].token_ids[:shared]
    for sample in samples[1:]:
        differs = np.flatnonzero(head != sample.token_ids[: len(head)])
        head = head[: differs[0]] if differs.size else head
    return len(head)
