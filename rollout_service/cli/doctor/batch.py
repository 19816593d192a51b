"""`rollout-service doctor --batch FILE --model DIR`: compares a batch's log-probabilities with the weights' own.

Every sampled token of the batch is compared, given its whole segment before it. Tokens of versions other than the
model's are expected to differ, so the report is by version, and says which versions kept older KV. It needs torch,
which the service itself does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_client.arrays import BatchArrays
from rollout_service.cli.common import CommandError
from rollout_service.cli.files import written

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

WORST = 10
POSITIONS_APART = 64


@dataclass(frozen=True, slots=True)
class Tokens:
    """The sampled tokens of a batch as columns, in the order of the file."""

    segment: NDArray[np.int64]
    position: NDArray[np.int64]
    """In the segment, from 0."""
    token_id: NDArray[np.int64]
    version: NDArray[np.int64]
    engine: NDArray[np.float64]
    """The log-probability in the batch."""
    recomputed: NDArray[np.float64]

    @property
    def difference(self) -> NDArray[np.float64]:
        return np.abs(self.engine - self.recomputed)

    def rows(self, order: Sequence[int] | range) -> Iterator[dict[str, float]]:
        columns = {name: getattr(self, name) for name in (*self.__slots__, "difference")}
        for at in order:
            yield {name: column[at].item() for name, column in columns.items()}


def compare(batch: Path, model: Path, temperature: float) -> tuple[BatchArrays, Tokens]:
    """Recompute the log-probability of every sampled token of a batch."""
    try:
        arrays = BatchArrays.from_file(batch)
    except (OSError, ValueError) as error:
        hint = "Write one with: rollout-service runs lease RUN --output FILE.safetensors"
        raise CommandError(f"{batch} cannot be read as a batch: {error}", hint=hint) from error
    ids = arrays.tensors["token_ids"].astype(np.int64)
    mask = arrays.tensors["loss_mask"].astype(bool)
    if not mask.any():
        raise CommandError(f"{batch} holds no sampled tokens", hint="Lease a batch with rollouts that have a turn.")
    offsets = arrays.tensors["segment_offsets"]
    recomputed = _recompute(ids, offsets, model, temperature)
    segments = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return arrays, Tokens(
        segments[mask],
        (np.arange(len(ids)) - offsets[segments])[mask],
        ids[mask],
        arrays.tensors["versions"].astype(np.int64)[mask],
        arrays.tensors["logprobs"].astype(np.float64)[mask],
        recomputed[mask],
    )


def report(arrays: BatchArrays, tokens: Tokens) -> dict[str, Any]:
    gaps = tokens.difference
    kept = _kept_kv(arrays)
    versions = [
        {"version": version, "kept_kv": version in kept, **_spread(gaps[tokens.version == version])}
        for version in np.unique(tokens.version).tolist()
    ]
    begins = tokens.position // POSITIONS_APART * POSITIONS_APART
    positions = [
        {"from": begin, "to": begin + POSITIONS_APART - 1, **_spread(gaps[begins == begin])}
        for begin in np.unique(begins).tolist()
    ]
    worst = list(tokens.rows(np.argsort(-gaps)[:WORST].tolist()))
    return {"all": _spread(gaps), "versions": versions, "positions": positions, "worst": worst}


def _spread(differences: NDArray[np.float64]) -> dict[str, float]:
    return {
        "tokens": len(differences),
        "mean": float(differences.mean()),
        "p99": float(np.quantile(differences, 0.99)),
        "max": float(differences.max()),
    }


def write_tokens(tokens: Tokens, file: Path) -> None:
    with written(file) as write:
        for row in tokens.rows(range(len(tokens.version))):
            write(json.dumps(row).encode() + b"\n")


def show(found: dict[str, Any], console: Console) -> None:
    from rollout_service.cli.console import table

    for title, rows in (
        ("all", [found["all"]]),
        ("by version", found["versions"]),
        ("by position in the segment", found["positions"]),
        ("largest differences", found["worst"]),
    ):
        lines = table(*rows[0], title=title)
        for row in rows:
            lines.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
        console.print(lines)


def _kept_kv(arrays: BatchArrays) -> set[int]:
    """Return the versions whose tokens attended to KV of older weights, which recomputation cannot repeat."""
    rollouts = [sample.rollout for group in arrays.batch.groups for sample in group.samples]
    trajectories = [rollout.trajectory for rollout in rollouts if rollout.trajectory is not None]
    return {version for trajectory in trajectories for version in trajectory.kept_kv_versions}


def _recompute(
    ids: NDArray[np.int64], offsets: NDArray[np.int64], folder: Path, temperature: float
) -> NDArray[np.float64]:
    """Return every token's log-probability given its segment before it; NaN for each segment's first token."""
    torch, model = _load(folder)
    found = np.full(len(ids), np.nan)
    with torch.inference_mode():
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            row = torch.from_numpy(ids[begin:end])
            logits = model(row[None]).logits[0, :-1].float() / temperature
            chosen = torch.log_softmax(logits, dim=-1).take_along_dim(row[1:, None], dim=-1)
            found[begin + 1 : end] = chosen[:, 0].numpy()
    return found


def _load(folder: Path) -> tuple[Any, Any]:
    try:
        import torch
    except ImportError as error:
        hint = "Install it into this environment with `scripts/train --install` or `pip install torch`."
        raise CommandError("recomputing log-probabilities needs torch, which is not installed", hint=hint) from error
    import transformers

    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise CommandError(f"{folder} cannot be loaded as a model: {error}") from error
    return torch, model.eval()
